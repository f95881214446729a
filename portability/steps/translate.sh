#!/usr/bin/env bash
# Every shader variant, validated with what each back end can express, translated as wgpu does, and linted.
set -euo pipefail
source portability/lib.sh

rm -rf "$SHADERS"
export WGMOE_SHADERS=$SHADERS
"${cargo[@]}" test --locked --test shaders --test translate --test known_devices
for back_end in vulkan:spv dx12:hlsl metal:metal; do
    mapfile -t numbers < <(find "$SHADERS/${back_end#*:}" -name '*.unchecked.*' -printf '%f\n' | cut -d. -f1)
    evidence_for_variants "${back_end%:*}" checked 'translated and linted' "${numbers[@]}"
    shown "${#numbers[@]} variants for ${back_end%:*}, each with and without run-time checks"
done
