#!/usr/bin/env bash
# The kernel tests and the demonstration through wgpu's OpenGL ES back end, on llvmpipe. Baseline tier: GL has no
# subgroups.
set -euo pipefail
source portability/lib.sh

packages libegl1 libgl1-mesa-dri libegl-mesa0 libgles2
mapfile -t tests < <(kernel_tests | tr ' ' '\n')
log=$WORK/logs/gles-tests.log
WGPU_BACKEND=gl logged_cargo "$log" test --locked --features gles --target-dir "$WORK/gles" "${tests[@]}" --test demo
evidence_of_log "$log" gles 'ran on llvmpipe through OpenGL ES'
shown "$(tests_passed "$log") tests"
