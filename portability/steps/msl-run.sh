#!/usr/bin/env bash
# The MSL of every stage that a kernel test runs, and of a mixture-of-experts layer with two adapters, gives on the CPU
# what the tests have compared with the oracle. Variants are those of a device whose subgroups have no known size, as on
# Metal; and those of matrices of 8 x 8, which no driver here has: tests record them on a device that only poses, and compare
# what the CPU computes with the oracle.
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

on_matrices() {
    WGMOE_REPLAY=$1 "${cargo[@]}" test --locked "${@:2}" -- --ignored matrices_of_8
}
rm -rf "$WORK/replayed"
on_matrices "$SHADERS" --test kernels_bench --test kernels_pack --test kernels_gemm --test kernels_gated --test kernels_lora --test kernels_attention --test layer
sort -u "$WORK/replayed/ran.txt" | tee -a "$WORK/msl.txt" >"$WORK/msl-matrices.txt"
# A matrix that is loaded the other way round must be found.
rm -rf "$WORK/turned"
mkdir -p "$WORK/turned/shaders/metal"
grep -F 'matrix_probe[edge-8' "$SHADERS/variants.tsv" >"$WORK/turned/shaders/variants.tsv"
read -r number _ <"$WORK/turned/shaders/variants.tsv"
sed 's/ptr, stride, 0, is_row_major/ptr, stride, 0, !is_row_major/' "$SHADERS/metal/$number.checked.metal" \
    >"$WORK/turned/shaders/metal/$number.checked.metal"
must_fail on_matrices "$WORK/turned/shaders" --test kernels_bench

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
shown "$(grep -cvxFf "$WORK/msl-matrices.txt" "$WORK/msl.txt") stages and tiers right, with simdgroups of 32 and of 16"
shown "$(wc -l <"$WORK/msl-matrices.txt") stages of the matrix tier right, with matrices of 8 x 8 and simdgroups of 32"
