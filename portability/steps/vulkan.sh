#!/usr/bin/env bash
# The kernel tests and the demonstration on Vulkan in software: llvmpipe with subgroups of 4, 8 and 16, and SwiftShader,
# which has no half precision, 256 invocations, ten storage buffers and offsets aligned to 256 bytes.
set -euo pipefail
source portability/lib.sh

packages libvulkan1 mesa-vulkan-drivers chromium
mapfile -t tests < <(kernel_tests | tr ' ' '\n')

for width in 4 8 16; do
    run_tests "llvmpipe-$width" "ran on llvmpipe, subgroups of $width" "VK_ICD_FILENAMES=$LLVMPIPE" \
        "LP_NATIVE_VECTOR_WIDTH=$((width * 32))" -- "${tests[@]}" --test demo
done
[ -e "$SWIFTSHADER" ] || cannot "Chromium's SwiftShader is not at $SWIFTSHADER"
run_tests swiftshader 'ran on SwiftShader' "VK_ICD_FILENAMES=$SWIFTSHADER" -- "${tests[@]}" --test demo
