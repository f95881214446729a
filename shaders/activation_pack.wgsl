// h = act(gate) * up, written as f16 with a power of two a row, as `pack` writes x. Rows of negative ids are neither read
// nor written. The down projection of the matrix tier reads h. One workgroup a row.
enable f16;

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
@group(0) @binding(3) var<storage, read_write> packed: array<vec4<f16>>; // [P, F], exponents [P]

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}
{% include "shared/halves.wgsl" %}
{% include "shared/gated.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = folded(workgroup);
    if (row >= params.rows) {
        return;
    }
    {% if not dense %}
    if (ids[row] < 0) {
        return;
    }
    {% endif %}
    var most = 0u;
    for (var q = lane; q < params.quads; q = q + {{ lanes }}u) {
        let v = bitcast<vec4<u32>>(abs(activated(row, q)));
        most = max(most, max(max(v.x, v.y), max(v.z, v.w)));
    }
    let shift = half_shift(reduce_max_u32(most, lane));
    let scale = power_of_two(shift);
    // Computed again rather than kept: the inputs are in the cache, and a row has any width.
    for (var q = lane; q < params.quads; q = q + {{ lanes }}u) {
        packed[row * params.quads + q] = vec4<f16>(activated(row, q) * scale);
    }
    if (lane == 0u) {
        packed[params.rows * params.quads + row] = vec4<f16>(f16(shift));
    }
}
