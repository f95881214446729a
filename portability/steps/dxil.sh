#!/usr/bin/env bash
# Microsoft's DXC compiles the HLSL of every variant to DXIL, and its validator accepts the result.
set -euo pipefail
source portability/lib.sh

need_shaders
packages python3-pip
# A build of DXC 1.8 for Linux, inside a Python package.
python_package compushady-lrtu==0.18.0
library=$(find "$python_folder" -name 'libdxcompiler_x86_64.so')
[ -n "$library" ] || cannot 'compushady-lrtu holds no libdxcompiler_x86_64.so'
"${cargo[@]}" build --release --locked --manifest-path portability/dxc/Cargo.toml --target-dir "$WORK/dxc"
dxc=$WORK/dxc/release/dxc

cat >"$WORK/too-large.hlsl" <<'HLSL'
groupshared float t[16384];
RWByteAddressBuffer y : register(u0);
[numthreads(64, 1, 1)] void main(uint i : SV_GroupIndex) { t[i * 256] = 1.0; GroupMemoryBarrierWithGroupSync(); y.Store(0, asuint(t[0])); }
HLSL
must_fail "$dxc" "$library" "$WORK/too-large.hlsl"

"$dxc" "$library" "$SHADERS"/hlsl/*.hlsl | tee "$WORK/dxil.txt"
mapfile -t numbers < <(find "$SHADERS/hlsl" -name '*.unchecked.hlsl' -printf '%f\n' | cut -d. -f1)
evidence_for_variants dx12 checked 'compiled to DXIL by DXC' "${numbers[@]}"
shown "$(tail -n 1 "$WORK/dxil.txt")"
