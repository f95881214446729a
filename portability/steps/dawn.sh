#!/usr/bin/env bash
# A second WGSL front end, Dawn's, accepts every variant under WebGPU's default limits: those of the baseline tier
# without any feature, the others with subgroups.
set -euo pipefail
source portability/lib.sh

need_shaders
packages nodejs
node_packages webgpu@0.6.2
check() { NODE_FOLDER=$WORK/node node portability/dawn/check.mjs "$@"; }
files_of() { awk -F'\t' -v wanted="$1" -v folder="$SHADERS/wgsl" '{ split($3, tiers, ","); if (tiers[1] == wanted) print folder "/" $1 ".wgsl" }' "$SHADERS/variants.tsv"; }

for tier in baseline:NO_FEATURES subgroup:subgroups; do
    mapfile -t files < <(files_of "${tier%:*}")
    said=$(check "${tier#*:}" "${files[@]}") || { echo "$said"; exit 1; }
    mapfile -t numbers < <(basename -s .wgsl "${files[@]}")
    evidence_for_variants webgpu checked 'accepted by Dawn' "${numbers[@]}"
    shown "$tier: $(tail -n 1 <<<"$said")"
done
# Without its `enable` line a shader with subgroups must be refused, and with it where the feature is missing.
must_fail check subgroups <(grep -v '^enable' "${files[0]}")
must_fail check NO_FEATURES "${files[0]}"
