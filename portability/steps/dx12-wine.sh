#!/usr/bin/env bash
# The kernel tests and the demonstration through wgpu's DX12 back end: programs for Windows under Wine, Microsoft's
# shader compiler FXC, and Wine's vkd3d on SwiftShader. It stands in for Windows and a driver and is neither: shader
# model 5.1 and so the baseline tier alone, and nothing of DXIL.
set -euo pipefail
source portability/lib.sh
source portability/wine.sh

packages gcc libvulkan-dev chromium rust-web-src rustc-web cargo-web
target=x86_64-pc-windows-gnu
programs=$WORK/windows/$target/debug/deps
mapfile -t tests < <(kernel_tests)

mkdir -p "$programs" "$WORK/wine/vulkan/implicit_layer.d"
cp "$FXC" "$programs"
x86_64-w64-mingw32-gcc -shared -o "$programs/bcryptprimitives.dll" portability/wine/bcryptprimitives.c -ladvapi32
gcc -O1 -fPIC -shared -o "$WORK/wine/libpass_on.so" portability/wine/pass_on.c
sed "s,LIBRARY,$WORK/wine/libpass_on.so," portability/wine/pass_on.json >"$WORK/wine/vulkan/implicit_layer.d/pass_on.json"

export XDG_DATA_HOME=$WORK/wine VK_ICD_FILENAMES=$SWIFTSHADER
export WGPU_BACKEND=dx12 WGPU_DX12_COMPILER=fxc
# Debian's Rust, whose package brings the source of the standard library for a target that rustup has not installed.
export RUSTC_BOOTSTRAP=1 RUSTC=/usr/bin/rustc CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER='xvfb-run -a wine'
read -ra cargo <<<"${PORTABILITY_TURN:-} /usr/bin/cargo"
log=$WORK/logs/dx12-tests.log
logged_cargo "$log" test --locked -Z build-std=std,panic_abort --target "$target" --target-dir "$WORK/windows" \
    "${tests[@]}"
evidence_of_log "$log" 'dx12, ' dx12 stand-in "ran through Wine's vkd3d on SwiftShader, compiled by FXC"
demo_right "$log"
shown "$(tests_passed "$log") tests by FXC and vkd3d under $(wine --version), and the demonstration's thirty answers right; it is not Windows"
rm -rf "$WORK/windows"
