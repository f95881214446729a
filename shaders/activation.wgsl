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

{% with factor = "" %}
{% include "shared/gated.wgsl" %}
{% endwith %}

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
    h[at] = activated(row, quad);
}
