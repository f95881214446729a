#!/usr/bin/env bash
# The MSL of every stage that a kernel test runs, and of a mixture-of-experts layer with two adapters, gives on the CPU
# what the tests have compared with the oracle. Variants are those of a device whose subgroups have no known size, as on
# Metal.
set -euo pipefail
source portability/lib.sh

need_shaders
packages clang-16 python3
need_traces
replay() { ${PORTABILITY_TURN:-} python3 portability/msl/replay.py "$1" "$SHADERS" "$WORK/msl" --simdgroup "$2"; }

: >"$WORK/msl.txt"
for simdgroup in 32 16; do
    for trace in "$WORK/stages" "$WORK/layer.json"; do replay "$trace" "$simdgroup" >>"$WORK/msl.txt"; done
done

# A comparison must find one wrong word.
mkdir -p "$WORK/wrong"
python3 - "$WORK/stages" "$WORK/wrong" <<'PYTHON'
import json, pathlib, sys
stages, wrong = map(pathlib.Path, sys.argv[1:])
case = json.loads(next(stages.glob("*.json")).read_text())
word = next(b for b in case["after"] if "bytes" in b)
# The upper bit of an exponent.
word["bytes"] = f"{word['bytes'][:6]}{int(word['bytes'][6], 16) ^ 4:x}{word['bytes'][7:]}"
(wrong / "case.json").write_text(json.dumps(case))
PYTHON
must_fail replay "$WORK/wrong" 32

sort -u "$WORK/msl.txt" -o "$WORK/msl.txt"
while read -r tier stage; do
    evidence metal "$tier" "$stage" stand-in 'ran on the CPU through a stand-in header'
done <"$WORK/msl.txt"
shown "$(wc -l <"$WORK/msl.txt") stages and tiers right, with simdgroups of 32 and of 16"
