#!/usr/bin/env bash
# Clang parses the MSL of every variant and finds its types right, against a stand-in for Apple's header.
set -euo pipefail
source portability/lib.sh

need_shaders
packages clang-16
parse=(clang++-16 -std=c++20 -x c++ -fsyntax-only -w -Iportability/msl/shim)

# Many files to a run, each in a namespace of its own, because the header takes longer than a shader.
all() {
    echo '#include <metal_stdlib>'
    local file name
    for file in "$@"; do
        name=$(basename "$file" .metal)
        printf 'namespace n%s {\n# 1 "%s"\n' "${name//./_}" "$file"
        awk -f portability/msl/once.awk "$file"
        echo '}'
    done
}
files=("$SHADERS"/metal/*.metal)
for ((i = 0; i < ${#files[@]}; i += 100)); do
    all "${files[@]:i:100}" >"$WORK/parse.cpp"
    "${parse[@]}" "$WORK/parse.cpp"
done
# Vectors of different types do not mix in MSL, nor here.
printf '#include <metal_stdlib>\nfloat4 f(metal::uint4 a, metal::float4 b) { return a + b; }\n' >"$WORK/wrong.cpp"
must_fail "${parse[@]}" "$WORK/wrong.cpp" 2>/dev/null

mapfile -t numbers < <(printf '%s\n' "${files[@]##*/}" | cut -d. -f1)
evidence_for_variants metal checked 'parsed by clang against a stand-in header' "${numbers[@]}"
shown "${#files[@]} files parsed"
