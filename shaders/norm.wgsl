// RMS norm: out[i] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, where r = i, or gather[i] with `gathered`. One
// workgroup a row.
struct NormParams {
    rows: u32,
    // D / 4.
    quads: u32,
    eps: f32,
    // 1 / D.
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: NormParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [T, D]
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>; // [D]
@group(0) @binding(3) var<storage, read> gather: array<u32>; // [rows]; unused unless gathered
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>; // [rows, D]

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = folded(workgroup);
    if (row >= params.rows) {
        return;
    }
    {% if gathered %}
    let source = gather[row] * params.quads;
    {% else %}
    let source = row * params.quads;
    {% endif %}
    var squares = 0.0;
    for (var i = lane; i < params.quads; i = i + {{ lanes }}u) {
        let v = x[source + i];
        squares = squares + dot(v, v);
    }
    squares = reduce_sum(squares, lane);
    let factor = inverseSqrt(squares * params.scale + params.eps);
    for (var i = lane; i < params.quads; i = i + {{ lanes }}u) {
        out[row * params.quads + i] = x[source + i] * factor * weight[i];
    }
}
