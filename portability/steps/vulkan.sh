#!/usr/bin/env bash
# The kernel tests and the demonstration on Vulkan in software: llvmpipe with subgroups of 4, 8 and 16, SwiftShader,
# WebGPU's default limits, and bindings of at most 1 MiB.
set -euo pipefail
source portability/lib.sh

packages libvulkan1 mesa-vulkan-drivers chromium
mapfile -t tests < <(kernel_tests | tr ' ' '\n')

# run NAME HOW [VARIABLE=VALUE...] -- TEST...
run() {
    local name=$1 how=$2 log=$WORK/logs/vulkan-$1.log
    shift 2
    local environment=()
    while [ "$1" != -- ]; do environment+=("$1"); shift; done
    shift
    (export "${environment[@]}"; logged_cargo "$log" test --locked "$@")
    evidence_of_log "$log" vulkan "$how"
    shown "$name: $(tests_passed "$log") tests"
}

for width in 4 8 16; do
    run "llvmpipe-$width" "ran on llvmpipe, subgroups of $width" "VK_ICD_FILENAMES=$LLVMPIPE" \
        "LP_NATIVE_VECTOR_WIDTH=$((width * 32))" -- "${tests[@]}" --test demo
done
[ -e "$SWIFTSHADER" ] || cannot "Chromium's SwiftShader is not at $SWIFTSHADER"
run swiftshader 'ran on SwiftShader' "VK_ICD_FILENAMES=$SWIFTSHADER" -- "${tests[@]}" --test demo
run webgpu-limits 'ran on llvmpipe, subgroups of 8' "VK_ICD_FILENAMES=$LLVMPIPE" WGMOE_TEST_LIMITS=webgpu -- "${tests[@]}" --test demo
# Not the tests that need more scratch than that.
run 1-MiB-bindings 'ran on llvmpipe, subgroups of 8' "VK_ICD_FILENAMES=$LLVMPIPE" WGMOE_TEST_BINDING_BYTES=1048576 -- \
    --test layer --test logits --test demo --test engine --test kernels_gemm --test kernels_lora
