// Second half of an adapter: y[p] += B u[p], one projection of the site a range of column tiles, so that gate never
// meets the factors of up. u carries the scale. A pair without adapter, and a factor of rank 0, cost no work.
struct LoraExpandParams {
    rows: u32,
    // Always 1: u has a row a pair.
    row_div: u32,
    // Row of u in vec4: all projections.
    x_stride: u32,
    index_base: u32,
    projections: u32,
    max_rank: u32,
    buckets: u32,
    y_stride: u32,
    expert_base: u32,
    sorted_base: u32,
    pad0: u32,
    pad1: u32,
    // For each projection: first column tile, first column in y, columns.
    tile_begin: vec4<u32>,
    out_begin: vec4<u32>,
    out_rows: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: LoraExpandParams;
@group(0) @binding(1) var<storage, read> u: array<vec4<f32>>; // [P, projections, max_rank]
@group(0) @binding(2) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> index: array<Factor>; // [V, projections] from index_base
@group(0) @binding(4) var<storage, read> ids: array<i32>; // alignment over V buckets, or virtual ids [P]
@group(0) @binding(5) var<storage, read_write> y: array<f32>; // [P, y_stride]

{% include "shared/rows.wgsl" %}
{% include "shared/factors.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    {% if carriers %}
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    {% endif %}
) {
    {% include "shared/tiles.wgsl" %}
    if (label < 0 || label >= i32(params.buckets)) {
        return;
    }
    var projection = 0u;
    for (var i = 1u; i < params.projections; i = i + 1u) {
        projection = select(projection, i, workgroup.x >= params.tile_begin[i]);
    }
    let factor = index[params.index_base + u32(label) * params.projections + projection];
    let rank = factor.rank_type & 0xffffu;
    if (rank == 0u) {
        return;
    }
    let storage = factor.rank_type >> 16u;
    let groups = (rank + 7u) / 8u;
    let column = (workgroup.x - params.tile_begin[projection]) * {{ lanes }}u + lane;
    let columns = params.out_rows[projection];
    let b_row = min(column, columns - 1u) * groups;
    let u_begin = projection * params.max_rank / 4u;
    {% for i in range(tile) %}
    var sum{{ i }} = 0.0;
    {% endfor %}
    {% if carriers %}
    let carried = subgroup_lane % {{ carriers }}u;
    for (var g = 0u; g < groups; g = g + {{ carriers // 2 }}u) {
        let part = g * 2u + carried;
        let inside = part < groups * 2u;
        {% for i in range(tile) %}
        let u{{ i }} = select(vec4<f32>(), u[x_row{{ i }} + u_begin + min(part, groups * 2u - 1u)], inside);
        {% endfor %}
        {% for q in range(carriers // 2) %}
        {% if q > 0 %}
        if (g + {{ q }}u < groups) {
        {% else %}
        {
        {% endif %}
            let b = load_factor8(factor.b, b_row + g + {{ q }}u, storage);
            {% for i in range(tile) %}
            sum{{ i }} = sum{{ i }} + dot(b.lo, subgroupBroadcast(u{{ i }}, {{ 2 * q }}u)) + dot(b.hi, subgroupBroadcast(u{{ i }}, {{ 2 * q + 1 }}u));
            {% endfor %}
        }
        {% endfor %}
    }
    {% else %}
    for (var g = 0u; g < groups; g = g + 1u) {
        let b = load_factor8(factor.b, b_row + g, storage);
        {% for i in range(tile) %}
        sum{{ i }} = sum{{ i }} + dot(b.lo, u[x_row{{ i }} + u_begin + g * 2u]) + dot(b.hi, u[x_row{{ i }} + u_begin + g * 2u + 1u]);
        {% endfor %}
    }
    {% endif %}
    if (column < columns) {
        {% for i in range(tile) %}
        if (pair{{ i }} < params.rows) {
            let at = pair{{ i }} * params.y_stride + params.out_begin[projection] + column;
            y[at] = y[at] + sum{{ i }};
        }
        {% endfor %}
    }
}
