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
    {% if carriers %}
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    {% endif %}
) {
    {% include "shared/tiles.wgsl" %}
    if (label < 0 || label >= i32(params.buckets)) {
        return;
    }
    let rank_tiles = (params.max_rank + {{ lanes }}u - 1u) / {{ lanes }}u;
    let projection = workgroup.x / rank_tiles;
    let factor = index[params.index_base + u32(label) * params.projections + projection];
    let rank = factor.rank_type & 0xffffu;
    let storage = factor.rank_type >> 16u;
    let r_begin = workgroup.x % rank_tiles * {{ lanes }}u;
    // u is read in whole vec4: the rows up to the next multiple of eight are written as 0.
    let padded_rank = (rank + 7u) / 8u * 8u;
    if (r_begin >= padded_rank) {
        return;
    }
    let r = r_begin + lane;
    let a_row = min(r, rank - 1u) * params.groups;
    {% for i in range(tile) %}
    var sum{{ i }} = 0.0;
    {% endfor %}
    {% if carriers %}
    let carried = subgroup_lane % {{ carriers }}u;
    for (var g = 0u; g < params.groups; g = g + {{ carriers // 2 }}u) {
        let part = g * 2u + carried;
        let inside = part < params.groups * 2u;
        {% for i in range(tile) %}
        let x{{ i }} = select(vec4<f32>(), x[x_row{{ i }} + min(part, params.groups * 2u - 1u)], inside);
        {% endfor %}
        {% for q in range(carriers // 2) %}
        {% if q > 0 %}
        if (g + {{ q }}u < params.groups) {
        {% else %}
        {
        {% endif %}
            let a = load_factor8(factor.a, a_row + g + {{ q }}u, storage);
            {% for i in range(tile) %}
            sum{{ i }} = sum{{ i }} + dot(a.lo, subgroupBroadcast(x{{ i }}, {{ 2 * q }}u)) + dot(a.hi, subgroupBroadcast(x{{ i }}, {{ 2 * q + 1 }}u));
            {% endfor %}
        }
        {% endfor %}
    }
    {% else %}
    for (var g = 0u; g < params.groups; g = g + 1u) {
        let a = load_factor8(factor.a, a_row + g, storage);
        {% for i in range(tile) %}
        sum{{ i }} = sum{{ i }} + dot(a.lo, x[x_row{{ i }} + g * 2u]) + dot(a.hi, x[x_row{{ i }} + g * 2u + 1u]);
        {% endfor %}
    }
    {% endif %}
    if (r < padded_rank) {
        {% for i in range(tile) %}
        if (pair{{ i }} < params.rows) {
            u[(pair{{ i }} * params.projections + projection) * params.max_rank + r] = select(0.0, sum{{ i }} * factor.scale, r < rank);
        }
        {% endfor %}
    }
}
