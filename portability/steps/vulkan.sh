#!/usr/bin/env bash
# The kernel tests and the demonstration on llvmpipe with subgroups of 4 and of 16. Subgroups of 8, and SwiftShader, are
# what the step `validation` runs them on.
set -euo pipefail
source portability/lib.sh

packages libvulkan1 mesa-vulkan-drivers
mapfile -t tests < <(kernel_tests)
for width in 4 16; do
    run_tests "llvmpipe-$width" "vulkan, llvmpipe \(LLVM [0-9.]+, $((width * 32)) bits\)" \
        "ran on llvmpipe, subgroups of $width" "VK_ICD_FILENAMES=$LLVMPIPE" \
        "LP_NATIVE_VECTOR_WIDTH=$((width * 32))" -- "${tests[@]}"
done
