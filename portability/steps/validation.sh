#!/usr/bin/env bash
# A current Vulkan validation layer, which also checks synchronisation, has nothing to say about the kernel tests, whole
# models and adapter pools on llvmpipe and SwiftShader.
set -euo pipefail
source portability/lib.sh

packages libvulkan1 mesa-vulkan-drivers chromium gcc libvulkan-dev
[ -e /usr/lib/chromium/libVkLayer_khronos_validation.so ] || cannot "Chromium brings no validation layer"
# The same false alarm as in the step `spirv`, by name; spirv-val is inside the layer.
mkdir -p "$WORK/layer"
cp portability/vulkan/layer.json "$WORK/layer"
cat >"$WORK/layer/vk_layer_settings.txt" <<'SETTINGS'
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.log_filename = stdout
khronos_validation.report_flags = error,warn
khronos_validation.validate_sync = true
khronos_validation.message_id_filter = VUID-StandaloneSpirv-None-10684
SETTINGS
export VK_LAYER_PATH=$WORK/layer VK_LAYER_SETTINGS_PATH=$WORK/layer/vk_layer_settings.txt
export VK_INSTANCE_LAYERS=VK_LAYER_KHRONOS_validation VK_ICD_FILENAMES=$LLVMPIPE

# The layer must see a hazard where there is one.
gcc -o "$WORK/hazard" portability/vulkan/hazard.c -lvulkan
"$WORK/hazard" | grep -q SYNC-HAZARD-WRITE-AFTER-WRITE

mapfile -t tests < <(kernel_tests | tr ' ' '\n')
for device in llvmpipe:$LLVMPIPE swiftshader:$SWIFTSHADER; do
    export VK_ICD_FILENAMES=${device#*:}
    log=$WORK/logs/validation-${device%%:*}.log
    logged_cargo "$log" test --locked "${tests[@]}" --test demo --test engine --test adapter_pool
    if grep -a -A 3 '^Validation' "$log" | head -n 40 | grep .; then exit 1; fi
    shown "no message on ${device%%:*} in $(tests_passed "$log") tests"
done
