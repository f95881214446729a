// out[t] = sum over k of w[t,k] y[t A + k], in the order of k, where y lies in the order of the tiles and keeps the powers of
// two of h and of the weights, as `expert_gemm_matrix` leaves it. The rows of pairs that this rank does not hold were never
// written: some other is read for them, and does not count.{% if halves %} It comes as f16, times a power of two of its own.{% endif %} With `accumulate` the sum is added to out, which holds the residual.
enable f16;

struct CombineTilesParams {
    tokens: u32,
    top_k: u32,
    // D / 4, and a row of y in vec4.
    quads: u32,
    y_quads: u32,
    accumulate: u32,
    // Where the exponents of the pairs begin in h, in words of eight bytes.
    exponents: u32,
    // The inverse of the powers of two of all of y.
    unscale: f32,
    // Where the places of the pairs begin in the alignment.
    places_base: u32,
}

@group(0) @binding(0) var<uniform> params: CombineTilesParams;
{% if halves %}
@group(0) @binding(1) var<storage, read> y: array<vec2<u32>>; // f16 [C, y_stride]
{% else %}
@group(0) @binding(1) var<storage, read> y: array<vec4<f32>>; // [C, y_stride]
{% endif %}
@group(0) @binding(2) var<storage, read> topk_weights: array<f32>; // [T, A]
@group(0) @binding(3) var<storage, read> ids: array<i32>; // [T, A], local
@group(0) @binding(4) var<storage, read> aligned: array<i32>;
@group(0) @binding(5) var<storage, read> h: array<vec4<f16>>; // [P, F], exponents [P]
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>; // [T, D]

{% include "shared/rows.wgsl" %}
{% include "shared/halves.wgsl" %}

fn output(pair: u32, quad: u32) -> vec4<f32> {
    let place = select(0u, u32(aligned[params.places_base + pair]), ids[pair] >= 0);
    let unscale = power_of_two(-i32(h[params.exponents + pair].x));
    let read = y[place * params.y_quads + quad];
    {% if halves %}
    let value = vec4<f32>(unpack2x16float(read.x), unpack2x16float(read.y));
    {% else %}
    let value = read;
    {% endif %}
    return value * unscale * params.unscale;
}

{% include "shared/weighted_sum.wgsl" %}
