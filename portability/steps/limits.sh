#!/usr/bin/env bash
# The kernel tests and the demonstration on a device with WebGPU's default limits, and with bindings of at most 1 MiB, so
# that what is cut at larger sizes is cut here.
set -euo pipefail
source portability/lib.sh

packages libvulkan1 mesa-vulkan-drivers
mapfile -t tests < <(kernel_tests)
run_tests webgpu-limits 'vulkan, llvmpipe' "ran on llvmpipe with WebGPU's default limits" "VK_ICD_FILENAMES=$LLVMPIPE" \
    WGMOE_TEST_LIMITS=webgpu -- "${tests[@]}"
run_tests 1-MiB-bindings 'vulkan, llvmpipe' 'ran on llvmpipe with bindings of 1 MiB' "VK_ICD_FILENAMES=$LLVMPIPE" \
    WGMOE_TEST_BINDING_BYTES=1048576 -- "${tests[@]}"
