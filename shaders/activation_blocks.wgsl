// Activation for the direct product: h = act(gate) * up for 16 places of a tile, as blocks of 16 rows and 16 values, each row times a
// power of two that keeps it within the range of f16. Sixteen lanes take a row, so that what a workgroup writes at a time is whole
// blocks, and keep its values, for so many rows read a second time would no longer be in the cache: for narrow experts. Gate and up lie
// in the same order and keep the powers of two of their operands.
{% if by_row %}
// Rows are written as well, by pair.
{% endif %}
enable f16;

struct ActivationBlocksParams {
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
    sorted_base: u32,
    // Blocks in a row of h.
    blocks: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: ActivationBlocksParams;
@group(0) @binding(1) var<storage, read> gate_up: array<vec4<f32>>; // [C, 2F]: gate then up, or interleaved, or [C, F]
@group(0) @binding(2) var<storage, read> ids: array<i32>; // alignment
@group(0) @binding(3) var<storage, read> x: array<vec4<f16>>; // [P / row_div, D], exponents [P / row_div]
@group(0) @binding(4) var<storage, read_write> packed: array<vec4<f16>>; // [P, F], exponents [P]
@group(0) @binding(5) var<storage, read_write> blocks: array<vec4<f16>>; // [C / 16, F / 16, 16, 16]

{% include "shared/rows.wgsl" %}
{% include "shared/halves.wgsl" %}
{% include "shared/blocks.wgsl" %}

var<private> unscale: f32;

{% with factor = " * unscale * params.w_unscale" %}
{% include "shared/gated.wgsl" %}
{% endwith %}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    // The sixteen lanes of a row belong to one subgroup.
    let lane = subgroup * {{ width }}u + subgroup_lane;
    let tile = folded(workgroup);
    if (tile >= u32(ids[65])) {
        return;
    }
    let rows_begin = tile * {{ height }}u + workgroup.x * 16u;
    if (u32(ids[params.sorted_base + rows_begin]) >= params.rows) {
        return;
    }
    let place = rows_begin + lane / 16u;
    let part = lane % 16u;
    let pair = u32(ids[params.sorted_base + place]);
    let real = pair < params.rows;
    unscale = power_of_two(-i32(x[params.exponents + min(pair, params.rows - 1u) / params.row_div].x));
    // All at once, so that their loads do not wait for each other; past the end the last again.
    var most = 0u;
    {% for i in range(quads) %}
    let q{{ i }} = min(part + {{ 16 * i }}u, params.quads - 1u);
    let h{{ i }} = activated(place, q{{ i }});
    {% endfor %}
    {% for i in range(quads) %}
    most = max(most, most_of(h{{ i }}));
    {% endfor %}
    {% for distance in [8, 4, 2, 1] %}
    most = max(most, subgroupShuffleXor(most, {{ distance }}u));
    {% endfor %}
    if (!real) {
        return;
    }
    let shift = row_shift(most);
    let scale = power_of_two(shift);
    {% for i in range(quads) %}
    {
        let value = vec4<f16>(h{{ i }} * scale);
        {% if by_row %}
        packed[pair * params.quads + q{{ i }}] = value;
        {% endif %}
        blocks[block_quad(place, q{{ i }}, params.blocks)] = value;
    }
    {% endfor %}
    for (var q = params.quads + part; q < params.blocks * 4u; q = q + 16u) {
        blocks[block_quad(place, q, params.blocks)] = vec4<f16>();
    }
    if (part == 0u) {
        packed[params.rows * params.quads + pair] = vec4<f16>(f16(shift));
    }
}
