#!/usr/bin/env bash
# The MSL of a mixture-of-experts layer with two adapters, one CPU thread for each invocation, gives the oracle's numbers.
set -euo pipefail
source portability/lib.sh

need_shaders
packages clang-16 python3
[ -s "$WORK/layer.json" ] || WGMOE_TRACE=$WORK/layer.json "${cargo[@]}" test --locked --test trace

for simdgroup in 32 16; do
    python3 portability/msl/replay.py "$WORK/layer.json" "$SHADERS" "$WORK/msl" --simdgroup "$simdgroup" >"$WORK/msl.txt"
done
while read -r tier stage; do
    evidence metal "$tier" "$stage" 'ran on CPU threads through a stand-in header'
done <"$WORK/msl.txt"
shown "$(wc -l <"$WORK/msl.txt") stages and tiers right, with simdgroups of 32 and of 16"
