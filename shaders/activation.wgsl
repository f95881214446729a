// h = act(gate) * up on four columns an invocation. Rows of negative ids are neither read nor written. The down
// projection reads h.
struct ActivationParams {
    rows: u32,
    // F / 4.
    quads: u32,
    alpha: f32,
    limit: f32,
}

@group(0) @binding(0) var<uniform> params: ActivationParams;
@group(0) @binding(1) var<storage, read> gate_up: array<vec4<f32>>; // [P, 2F]: gate then up, or interleaved, or [P, F]
@group(0) @binding(2) var<storage, read> ids: array<i32>; // [P]; unused when dense
@group(0) @binding(3) var<storage, read_write> h: array<vec4<f32>>; // [P, F]

{% include "shared/rows.wgsl" %}

// exp overflows past 88; where it would, the result is already exact.
fn sigmoid(v: vec4<f32>) -> vec4<f32> {
    return 1.0 / (1.0 + exp(min(-v, vec4<f32>(80.0))));
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = folded(workgroup) * 64u + lane;
    let row = at / params.quads;
    let quad = at % params.quads;
    if (row >= params.rows) {
        return;
    }
    {% if not dense %}
    if (ids[row] < 0) {
        return;
    }
    {% endif %}
    {% if kind == "swiglu_clamped" %}
    let first = gate_up[row * params.quads * 2u + quad * 2u];
    let second = gate_up[row * params.quads * 2u + quad * 2u + 1u];
    let gate = min(vec4<f32>(first.xz, second.xz), vec4<f32>(params.limit));
    let up = clamp(vec4<f32>(first.yw, second.yw), vec4<f32>(-params.limit), vec4<f32>(params.limit));
    h[at] = (up + 1.0) * gate * sigmoid(params.alpha * gate);
    {% elif kind == "relu_squared" %}
    let v = max(gate_up[at], vec4<f32>());
    h[at] = v * v;
    {% else %}
    let gate = gate_up[row * params.quads * 2u + quad];
    let up = gate_up[row * params.quads * 2u + params.quads + quad];
    {% if kind == "gelu" %}
    let inner = clamp(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate), vec4<f32>(-15.0), vec4<f32>(15.0));
    h[at] = 0.5 * gate * (1.0 + tanh(inner)) * up;
    {% else %}
    h[at] = gate * sigmoid(gate) * up;
    {% endif %}
    {% endif %}
}
