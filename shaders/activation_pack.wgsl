// h = act(gate) * up, written as f16 with a power of two a row, as `pack` writes x. gate and up lie in the order of the tiles
// and keep the powers of two of x and of the weights, as `expert_gemm_matrix` leaves them; h has a row a pair. Rows of
// negative ids are neither read nor written. The down projection of the matrix tier reads h. One workgroup a row.
{% if blocks %}
// Beside or instead of that h stands as blocks in the order of the tiles, for `expert_gemm_direct`.
{% endif %}
enable f16;

struct ActivationPackParams {
    rows: u32,
    // F / 4.
    quads: u32,
    alpha: f32,
    limit: f32,
    // Pairs that share a row of x.
    row_div: u32,
    // Where the exponents of the rows begin in x, in words of eight bytes.
    exponents: u32,
    w_unscale: f32,
    // Where the places of the pairs begin in the alignment.
    places_base: u32,
    // Blocks in a row of h.
    blocks: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: ActivationPackParams;
@group(0) @binding(1) var<storage, read> gate_up: array<vec4<f32>>; // [C, 2F]: gate then up, or interleaved, or [C, F]
@group(0) @binding(2) var<storage, read> ids: array<i32>; // [P]
@group(0) @binding(3) var<storage, read> aligned: array<i32>;
@group(0) @binding(4) var<storage, read> x: array<vec4<f16>>; // [P / row_div, D], exponents [P / row_div]
@group(0) @binding(5) var<storage, read_write> packed: array<vec4<f16>>; // [P, F], exponents [P]
{% if blocks %}
@group(0) @binding(6) var<storage, read_write> blocks: array<vec4<f16>>; // [C / 16, F / 16, 16, 16]
{% endif %}

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}
{% include "shared/halves.wgsl" %}
{% if blocks %}
{% include "shared/blocks.wgsl" %}
{% endif %}

// The inverse of what the products of this row were multiplied by.
var<private> unscale: f32;

{% with factor = " * unscale * params.w_unscale" %}
{% include "shared/gated.wgsl" %}
{% endwith %}

@compute @workgroup_size({{ lanes }})
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let pair = folded(workgroup);
    if (pair >= params.rows) {
        return;
    }
    if (ids[pair] < 0) {
        return;
    }
    let place = u32(aligned[params.places_base + pair]);
    unscale = power_of_two(-i32(x[params.exponents + pair / params.row_div].x));
    var most = 0u;
    for (var q = lane; q < params.quads; q = q + {{ lanes }}u) {
        most = max(most, most_of(activated(place, q)));
    }
    let shift = row_shift(reduce_max_u32(most, lane));
    let scale = power_of_two(shift);
    // Computed again rather than kept: the inputs are in the cache, and a row has any width.
    for (var q = lane; q < params.quads; q = q + {{ lanes }}u) {
        let value = vec4<f16>(activated(place, q) * scale);
        {% if by_row %}
        packed[pair * params.quads + q] = value;
        {% endif %}
        {% if blocks %}
        blocks[block_quad(place, q, params.blocks)] = value;
        {% endif %}
    }
    {% if blocks %}
    for (var q = params.quads + lane; q < params.blocks * 4u; q = q + {{ lanes }}u) {
        blocks[block_quad(place, q, params.blocks)] = vec4<f16>();
    }
    {% endif %}
    if (lane == 0u) {
        packed[params.rows * params.quads + pair] = vec4<f16>(f16(shift));
    }
}
