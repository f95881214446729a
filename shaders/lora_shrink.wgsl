// First half of an adapter: u[p] = s A x[row(p)] for the factors of the pair's virtual expert, one projection a column
// tile. The f32 intermediate carries the scale; `lora_expand` reads it.
struct LoraShrinkParams {
    rows: u32,
    row_div: u32,
    x_stride: u32,
    groups: u32,
    // Entries of this site in `index`, projections of the site, and the rank that u has room for.
    index_base: u32,
    projections: u32,
    max_rank: u32,
    buckets: u32,
    expert_base: u32,
    sorted_base: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: LoraShrinkParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [rows / row_div, K]
@group(0) @binding(2) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> index: array<Factor>; // [V, projections] from index_base
@group(0) @binding(4) var<storage, read> ids: array<i32>; // alignment over V buckets, or virtual ids [P]
@group(0) @binding(5) var<storage, read_write> u: array<f32>; // [P, projections, max_rank]

{% include "shared/rows.wgsl" %}
{% include "shared/factors.wgsl" %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    {% if carriers or depth_lanes %}
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    {% endif %}
    {% if depth_lanes %}
    @builtin(subgroup_id) subgroup: u32,
    {% endif %}
) {
    {% include "shared/tiles.wgsl" %}
    if (label < 0 || label >= i32(params.buckets)) {
        return;
    }
    // Rows of A that a workgroup takes.
    {% if depth_lanes %}
    let block = {{ lanes // depth_lanes * per_lane }}u;
    {% else %}
    let block = {{ lanes }}u;
    {% endif %}
    let rank_tiles = (params.max_rank + block - 1u) / block;
    let projection = workgroup.x / rank_tiles;
    let factor = index[params.index_base + u32(label) * params.projections + projection];
    let rank = factor.rank_type & 0xffffu;
    let storage = storage_of(factor);
    // A bias is a column of B whose element of u is the scale alone.
    let a_rows = rank - biased(factor);
    let r_begin = workgroup.x % rank_tiles * block;
    // u is read in whole vec4: the rows up to the next multiple of eight are written as 0.
    let padded_rank = (rank + 7u) / 8u * 8u;
    if (r_begin >= padded_rank) {
        return;
    }
    let groups = params.groups;
    {% for j in range(per_lane) %}
    {% if depth_lanes %}
    let r{{ j }} = r_begin + subgroup * {{ per_lane }}u + {{ j }}u;
    {% else %}
    let r{{ j }} = r_begin + lane;
    {% endif %}
    let w_row{{ j }} = min(r{{ j }}, a_rows - 1u) * groups;
    {% for i in range(tile) %}
    var sum{{ i }}_{{ j }} = 0.0;
    {% endfor %}
    {% endfor %}
    {% with input = "x", row = "x_row", load = "load_factor8(factor.a, ", storage = ", storage", steps = (8 // per_lane // tile if per_lane * tile < 8 else 1), whole = true %}
    {% include "shared/walk.wgsl" %}
    {% endwith %}
    {% for j in range(per_lane) %}
    if (r{{ j }} < padded_rank) {
        {% for i in range(tile) %}
        if (pair{{ i }} < params.rows{% if depth_lanes %} && subgroup_lane == {{ (i * per_lane + j) % depth_lanes }}u{% endif %}) {
            let at = (pair{{ i }} * params.projections + projection) * params.max_rank + r{{ j }};
            u[at] = select(0.0, select(1.0, sum{{ i }}_{{ j }}, r{{ j }} < a_rows) * factor.scale, r{{ j }} < rank);
        }
        {% endfor %}
    }
    {% endfor %}
}
