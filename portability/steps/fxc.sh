#!/usr/bin/env bash
# Microsoft's FXC, which every Windows has, compiles the HLSL of every variant of the baseline tier, optimised and not.
set -euo pipefail
source portability/lib.sh
source portability/wine.sh

need_shaders
mkdir -p "$WORK/fxc"
x86_64-w64-mingw32-gcc -O1 -Wall -o "$WORK/fxc/fxc.exe" portability/fxc/fxc.c
cp "$FXC" "$WORK/fxc"

numbers=() files=()
while IFS=$'\t' read -r number _ tiers _; do
    [[ $tiers == baseline* ]] || continue
    numbers+=("$number")
    files+=("$SHADERS/hlsl/$number.checked.hlsl" "$SHADERS/hlsl/$number.unchecked.hlsl")
done <"$SHADERS/variants.tsv"
# Shader model 5.1 has no wave operations.
cat >"$WORK/fxc/wrong.hlsl" <<'HLSL'
RWByteAddressBuffer y : register(u0);
[numthreads(64, 1, 1)] void main(uint i : SV_GroupIndex) { y.Store(0, WaveActiveSum(i)); }
HLSL
must_fail wine "$WORK/fxc/fxc.exe" "$WORK/fxc/wrong.hlsl"
# A command line of Windows has 32,767 characters.
: >"$WORK/fxc.txt"
for ((i = 0; i < ${#files[@]}; i += 200)); do
    wine "$WORK/fxc/fxc.exe" "${files[@]:i:200}" | tee -a "$WORK/fxc.txt"
done
# Its tiers above the baseline are not FXC's.
while IFS=$'\t' read -r number stage _; do
    [[ " ${numbers[*]} " != *" $number "* ]] || evidence dx12 baseline "$stage" checked 'compiled by FXC'
done <"$SHADERS/variants.tsv"
shown "$(tr -d '\r' <"$WORK/fxc.txt" | awk '/ compilations$/ { right += $1; all += $3 } END { print right " of " all }') compilations of ${#files[@]} files"
