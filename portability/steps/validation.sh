#!/usr/bin/env bash
# Every test passes on llvmpipe with subgroups of 8, and every test that opens a device on SwiftShader, which has no half
# precision, 256 invocations, ten storage buffers and offsets aligned to 256 bytes; and a current Vulkan validation layer,
# which also checks synchronisation, has nothing to say about any of them.
set -euo pipefail
source portability/lib.sh

packages libvulkan1 mesa-vulkan-drivers chromium gcc libvulkan-dev
[ -e /usr/lib/chromium/libVkLayer_khronos_validation.so ] || cannot "Chromium brings no validation layer"
mkdir -p "$WORK/layer"
cp portability/vulkan/layer.json "$WORK/layer"
# A message ends the process that caused it, so that no test can pass over it, not even in a program that it starts.
# What is filtered is the same false alarm as in the step `spirv`, by name; spirv-val is inside the layer.
cat >"$WORK/layer/vk_layer_settings.txt" <<'SETTINGS'
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG,VK_DBG_LAYER_ACTION_BREAK
khronos_validation.log_filename = stdout
khronos_validation.report_flags = error,warn
khronos_validation.validate_sync = true
khronos_validation.message_id_filter = VUID-StandaloneSpirv-None-10684
SETTINGS
export VK_LAYER_PATH=$WORK/layer VK_LAYER_SETTINGS_PATH=$WORK/layer/vk_layer_settings.txt
export VK_INSTANCE_LAYERS=VK_LAYER_KHRONOS_validation VK_ICD_FILENAMES=$LLVMPIPE

# The layer must see a hazard where there is one, and end the program.
gcc -o "$WORK/hazard" portability/vulkan/hazard.c -lvulkan
must_fail "$WORK/hazard" >"$WORK/hazard.txt"
grep -q SYNC-HAZARD-WRITE-AFTER-WRITE "$WORK/hazard.txt"

# validated NAME HOW DRIVER DEVICE ARGUMENT...
validated() {
    local name=$1 how=$2 driver=$3 device=$4 log=$WORK/logs/validation-$1.log
    shift 4
    VK_ICD_FILENAMES=$driver logged_cargo "$log" test --locked "$@" || {
        grep -a -A 3 '^Validation' "$log" | head -n 40
        exit 1
    }
    must_fail grep -aq '^Validation' "$log"
    evidence_of_log "$log" "$device" vulkan ran "$how, and a validation layer said nothing"
    demo_right "$log"
    shown "$name: $(tests_passed "$log") tests, and the demonstration's thirty answers right; no message"
}
export LP_NATIVE_VECTOR_WIDTH=256
validated llvmpipe-8 'ran on llvmpipe, subgroups of 8' "$LLVMPIPE" 'vulkan, llvmpipe \(LLVM [0-9.]+, 256 bits\)' \
    --lib --bins --tests
mapfile -t tests < <(device_tests)
validated swiftshader 'ran on SwiftShader' "$SWIFTSHADER" 'vulkan, SwiftShader' "${tests[@]}"
