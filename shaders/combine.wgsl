// out[t] = sum over k of w[t,k] y[t A + k], in the order of k. The rows of pairs that this rank does not hold are not
// read: they were never written. With `accumulate` the sum is added to out, which holds the residual.
struct CombineParams {
    tokens: u32,
    top_k: u32,
    // D / 4.
    quads: u32,
    accumulate: u32,
}

@group(0) @binding(0) var<uniform> params: CombineParams;
@group(0) @binding(1) var<storage, read> y: array<vec4<f32>>; // [P, D]
@group(0) @binding(2) var<storage, read> topk_weights: array<f32>; // [T, A]
@group(0) @binding(3) var<storage, read> ids: array<i32>; // [T, A], local
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>; // [T, D]

{% include "shared/rows.wgsl" %}

fn output(pair: u32, quad: u32) -> vec4<f32> {
    return y[pair * params.quads + quad];
}

{% include "shared/weighted_sum.wgsl" %}
