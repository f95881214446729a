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
    // From a column of a projection to the next in y.
    step: u32,
    pad0: u32,
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
    {% include "shared/projection.wgsl" %}
    let column = (workgroup.x - params.tile_begin[projection]) * {{ lanes }}u + lane;
    let columns = params.out_rows[projection];
    let w_row0 = min(column, columns - 1u) * groups;
    {% for i in range(tile) %}
    let u_row{{ i }} = x_row{{ i }} + projection * params.max_rank / 4u;
    var sum{{ i }}_0 = 0.0;
    {% endfor %}
    {% with input = "u", row = "u_row", load = "load_factor8(factor.b, ", storage = ", storage", per_lane = 1, depth_lanes = 0, steps = 1, whole = true %}
    {% include "shared/walk.wgsl" %}
    {% endwith %}
    if (column < columns) {
        {% for i in range(tile) %}
        if (pair{{ i }} < params.rows) {
            let at = pair{{ i }} * params.y_stride + params.out_begin[projection] + column * params.step;
            y[at] = y[at] + sum{{ i }}_0;
        }
        {% endfor %}
    }
}
