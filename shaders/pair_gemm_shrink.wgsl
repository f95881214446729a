// Gate and up of few pairs as sums, y = W x, and beside them the first half of their adapters, u = s A x: two products of the same
// rows that do not wait for each other. The first workgroups have the shrink, whose loads are the longer chain: a row of A by a
// subgroup. The others own {{ per_lane }} columns of y a subgroup and read each row of the weights with all its lanes.
// `pair_expand_shrink` adds B u, and finds in one place where B, and the factor of the next site, are.
struct PairGemmShrinkParams {
    // P.
    rows: u32,
    // Pairs that share a row of x.
    row_div: u32,
    // Row of x in vec4.
    x_stride: u32,
    // Groups of eight in a row of W, and of A.
    groups: u32,
    // Columns of y in this piece, where they stand in y, and all of them.
    out_rows: u32,
    out_begin: u32,
    y_stride: u32,
    // Matrices of this piece.
    first: u32,
    count: u32,
    // Parts of `ids` when it is an alignment.
    expert_base: u32,
    sorted_base: u32,
    // Word of y in `sums`.
    y_base: u32,
    // Rows of workgroups that shrink: none but with the first piece.
    shrink_tiles: u32,
    // Entries of this site and of down in `index`, projections of the site, and the rank that u has room for.
    index_base: u32,
    down_base: u32,
    projections: u32,
    max_rank: u32,
    // Pairs of a token.
    top_k: u32,
    // Experts of this rank, and adapter slots.
    experts: u32,
    slots: u32,
    // 1: weights of a token's experts are divided by their sum; and a factor on each.
    renormalise: u32,
    scale: f32,
    // Word of the weights in `topk`.
    weights_base: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: PairGemmShrinkParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [rows / row_div, K]
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>; // [count, out_rows, K]
{% set chooses = rows == "chosen" %}
{% if chooses %}
@group(0) @binding(3) var<storage, read> logits: array<f32>; // [P / row_div, E]
{% else %}
@group(0) @binding(3) var<storage, read> ids: array<i32>; // alignment, or `pair_ids`
@group(0) @binding(4) var<storage, read> pair_ids: array<i32>; // [P], local
{% endif %}
{% set next = 4 if chooses else 5 %}
@group(0) @binding({{ next }}) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding({{ next + 1 }}) var<storage, read> index: array<Factor>; // [L, E_l, projections] from index_base, [L, E_l] from down_base
@group(0) @binding({{ next + 2 }}) var<storage, read> token_lora_mapping: array<i32>; // [T]
// For each pair: the entry of down; first group of B, groups of a row of B, storage type, and 1 for an expert of this rank with
// bits of the status, for each projection; u [projections, max_rank]. From y_base on f32 [P, y_stride].
@group(0) @binding({{ next + 3 }}) var<storage, read_write> sums: array<u32>;
{% if chooses %}
@group(0) @binding(8) var<storage, read_write> topk: array<u32>; // i32 [P], f32 [P] from weights_base
{% endif %}

{% include "shared/rows.wgsl" %}
{% include "shared/weights.wgsl" %}
{% include "shared/factors.wgsl" %}
{% if chooses %}
{% include "shared/choose.wgsl" %}
{% endif %}

fn shrink(pair: u32, row: u32, subgroup_lane: u32, subgroup: u32) {
    {% if chooses %}
    let expert = chosen(pair, params.top_k, subgroup_lane, subgroup);
    {% endif %}
    {% with dense = false, reports = false, ids = "chosen" if chooses else "pair_ids" %}
    {% include "shared/pair_factor.wgsl" %}
    {% endwith %}
    let next = index[params.down_base + select(0u, u32(slot) * params.experts + u32(id), known)];
    // A bias is a column of B whose element of u is the scale alone.
    let a_rows = rank - biased(factor);
    let b_groups = (rank + 7u) / 8u;
    let at = pair * ((1u + params.projections) * 4u + params.projections * params.max_rank);
    if (r == 0u && subgroup_lane == 0u) {
        let held = (id >= 0) & (id < i32(params.experts));
        {% if chooses %}
        let status = select(0u, 2u, slot >= i32(params.slots)) | select(0u, 8u, id < 0);
        {% else %}
        let status = select(0u, 2u, slot >= i32(params.slots)) | select(0u, 4u, id >= i32(params.experts));
        {% endif %}
        let head = at + 4u + 4u * projection;
        sums[head] = factor.b;
        sums[head + 1u] = b_groups;
        sums[head + 2u] = storage;
        sums[head + 3u] = status | u32(held);
        if (projection == 0u) {
            sums[at] = select(0u, next.a, known);
            sums[at + 1u] = select(0u, next.b, known);
            sums[at + 2u] = select(0u, next.rank_type, known);
            sums[at + 3u] = bitcast<u32>(select(0.0, next.scale, known));
        }
    }
    // B is read in groups: u is 0 up to the end of the last one.
    if (r >= b_groups * 8u) {
        return;
    }
    {% with dense = false, steps = a_steps %}
    {% include "shared/shrink_row.wgsl" %}
    {% endwith %}
    if (subgroup_lane == 0u) {
        let value = select(0.0, select(1.0, product, r < a_rows) * factor.scale, r < rank);
        sums[at + (1u + params.projections) * 4u + row] = bitcast<u32>(value);
    }
}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    // Pairs vary first, so that pairs of one expert read its rows at about the same time.
    if (group.y < params.shrink_tiles) {
        shrink(group.x, group.y * {{ lanes // depth_lanes }}u + subgroup, subgroup_lane, subgroup);
        return;
    }
    {% if chooses %}
    if (group.y == params.shrink_tiles) {
        if (group.x < params.rows / params.row_div) {
            let found = leave_choice(group.x, params.row_div, subgroup_lane, subgroup == 0u);
        }
        return;
    }
    {% endif %}
    let workgroup = vec3<u32>(group.y - params.shrink_tiles{% if chooses %} - 1u{% endif %}, group.x, group.z);
    {% include "shared/tiles.wgsl" %}
    if (label < i32(params.first) || label >= i32(params.first + params.count)) {
        return;
    }
    let groups = params.groups;
    let first_row = (u32(label) - params.first) * params.out_rows;
    {% for j in range(per_lane) %}
    let column{{ j }} = (workgroup.x * {{ lanes // depth_lanes }}u + subgroup) * {{ per_lane }}u + {{ j }}u;
    let w_row{{ j }} = (first_row + min(column{{ j }}, params.out_rows - 1u)) * groups;
    {% endfor %}
    {% for i in range(tile) %}
    {% for j in range(per_lane) %}
    var sum{{ i }}_{{ j }} = 0.0;
    {% endfor %}
    {% endfor %}

    // Most tiles are not full where pairs are few.
    {% for height in [1, 2, 4] if height < tile %}
    if (pair{{ height }} >= params.rows) {
        {% with tile = height, carriers = 0, whole = false, input = "x", row = "x_row", load = "load_weight8(", storage = "" %}
        {% include "shared/walk.wgsl" %}
        {% endwith %}
    } else
    {% endfor %}
    {
        {% with carriers = 0, whole = false, input = "x", row = "x_row", load = "load_weight8(", storage = "" %}
        {% include "shared/walk.wgsl" %}
        {% endwith %}
    }

    {% for i in range(tile) %}
    if (pair{{ i }} < params.rows) {
        {% for j in range(per_lane) %}
        let total{{ j }} = subgroupAdd(sum{{ i }}_{{ j }});
        if (column{{ j }} < params.out_rows && subgroup_lane == {{ (i * per_lane + j) % depth_lanes }}u) {
            let at = pair{{ i }} * params.y_stride + params.out_begin + column{{ j }};
            sums[params.y_base + at] = bitcast<u32>(total{{ j }});
        }
        {% endfor %}
    }
    {% endfor %}
}
