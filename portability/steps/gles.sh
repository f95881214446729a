#!/usr/bin/env bash
# The kernel tests and the demonstration through wgpu's OpenGL ES back end, on llvmpipe. Baseline tier: GL has no
# subgroups.
set -euo pipefail
source portability/lib.sh

packages libegl1 libgl1-mesa-dri libegl-mesa0 libgles2
mapfile -t tests < <(kernel_tests)
# A build of its own, because a feature of wgpu differs; without debug information, which takes most of the disk.
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0 CARGO_INCREMENTAL=0
log=$WORK/logs/gles-tests.log
WGPU_BACKEND=gl logged_cargo "$log" test --locked --features gles --target-dir "$WORK/gles" "${tests[@]}"
evidence_of_log "$log" 'gl, llvmpipe' gles ran 'ran on llvmpipe through OpenGL ES'
demo_right "$log"
shown "$(tests_passed "$log") tests, and the demonstration's thirty answers right"
rm -rf "$WORK/gles"
