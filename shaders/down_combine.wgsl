// The down projection of few tokens, adapters included, and the sum over each token's experts, whose outputs never reach
// memory. A workgroup owns {{ per_lane }} columns of one token; its subgroups share the experts, and their sums are added in
// order. Pairs that this rank does not hold are not read. What `combine` is to y, this is to h.
struct DownCombineParams {
    // T.
    tokens: u32,
    // A.
    top_k: u32,
    // Groups of eight in a row of W.
    groups: u32,
    // Rows of W of this piece, where they stand in out, and D.
    out_rows: u32,
    out_begin: u32,
    hidden: u32,
    // Matrices of this piece.
    first: u32,
    count: u32,
    // 1: add to out.
    accumulate: u32,
    // Rank that u has room for.
    max_rank: u32,
    // Parts whose sum u is, one behind the other.
    chunks: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: DownCombineParams;
@group(0) @binding(1) var<storage, read> h: array<vec4<f32>>; // [P, F]
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>; // [count, out_rows, F]
@group(0) @binding(3) var<storage, read> ids: array<i32>; // [T, A], local
@group(0) @binding(4) var<storage, read> topk_weights: array<f32>; // [T, A]
@group(0) @binding(5) var<storage, read> u: array<vec4<u32>>; // [P, 1 + chunks max_rank / 4]
@group(0) @binding(6) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>; // [T, D]

{% include "shared/weights.wgsl" %}
{% if lora %}
{% include "shared/factors.wgsl" %}
{% include "shared/addend.wgsl" %}

// What an adapter adds to column `j` of a subgroup's pair by one group of eight columns of B and one part of u, as it was read.
struct Addend {
    j: u32,
    group: Group,
    of_u: Eight,
}

fn read_addend(item: u32, pair_at: u32, factor: vec4<u32>, first_column: u32) -> Addend {
    let groups_of_b = params.max_rank / 8u;
    let parts = groups_of_b * params.chunks;
    let part = item % parts;
    let group = part % groups_of_b;
    let j = item / parts;
    let column = params.out_begin + min(first_column + j, params.out_rows - 1u);
    // Without a group there is nothing to add.
    let head = select(vec4<u32>(), factor, j < {{ per_lane }}u);
    return Addend(j, read_group(head, column, group), read_u(head, pair_at + 1u + 2u * (part - group), group));
}
{% endif %}

{% set subgroups = lanes // depth_lanes %}
var<workgroup> sums: array<f32, {{ subgroups * per_lane }}>;

fn held(id: i32) -> bool {
    return id >= i32(params.first) && id < i32(params.first + params.count);
}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(local_invocation_index) lane: u32,
) {
    let token = workgroup.x;
    let first_pair = token * params.top_k;
    let first_column = workgroup.y * {{ per_lane }}u;
    let groups = params.groups;
    {% for j in range(per_lane) %}
    let row{{ j }} = min(first_column + {{ j }}u, params.out_rows - 1u);
    var sum{{ j }} = 0.0;
    {% endfor %}

    for (var k = subgroup; k < params.top_k; k = k + {{ subgroups }}u) {
        let pair = first_pair + k;
        let id = ids[pair];
        {% if lora %}
        let pair_at = pair * (params.chunks * params.max_rank / 4u + 1u);
        let factor = u[pair_at];
        {% endif %}
        if (!held(id)) {
            continue;
        }
        {% if lora %}
        // The adapter's part, shared by the lanes.
        let addend = read_addend(subgroup_lane, pair_at, factor, first_column);
        {% endif %}
        let weight = topk_weights[pair];
        let first_row = (u32(id) - params.first) * params.out_rows;
        {% for j in range(per_lane) %}
        var part{{ j }} = 0.0;
        {% endfor %}
        for (var begin = 0u; begin < groups; begin = begin + {{ steps * depth_lanes }}u) {
            {% for q in range(steps) %}
            let g{{ q }} = begin + {{ q * depth_lanes }}u + subgroup_lane;
            let at{{ q }} = min(g{{ q }}, groups - 1u);
            {% for j in range(per_lane) %}
            let w{{ q }}_{{ j }} = load_weight8((first_row + row{{ j }}) * groups + at{{ q }});
            {% endfor %}
            {% endfor %}
            {% for q in range(steps) %}
            let lo{{ q }} = select(vec4<f32>(), h[(pair * groups + at{{ q }}) * 2u], g{{ q }} < groups);
            let hi{{ q }} = select(vec4<f32>(), h[(pair * groups + at{{ q }}) * 2u + 1u], g{{ q }} < groups);
            {% for j in range(per_lane) %}
            part{{ j }} = part{{ j }} + dot(w{{ q }}_{{ j }}.lo, lo{{ q }}) + dot(w{{ q }}_{{ j }}.hi, hi{{ q }});
            {% endfor %}
            {% endfor %}
        }
        {% if lora %}
        {% macro add(addend) %}
        {
            let value = product_of({{ addend }}.group, {{ addend }}.of_u);
            {% for j in range(per_lane) %}
            part{{ j }} = part{{ j }} + select(0.0, value, {{ addend }}.j == {{ j }}u);
            {% endfor %}
        }
        {% endmacro %}
        {{ add("addend") }}
        // High ranks have more of it than lanes.
        let items = {{ per_lane }}u * params.chunks * (params.max_rank / 8u);
        for (var item = subgroup_lane + {{ depth_lanes }}u; item < items; item = item + {{ depth_lanes }}u) {
            let more = read_addend(item, pair_at, factor, first_column);
            {{ add("more") }}
        }
        {% endif %}
        {% for j in range(per_lane) %}
        sum{{ j }} = sum{{ j }} + weight * part{{ j }};
        {% endfor %}
    }

    {% for j in range(per_lane) %}
    let total{{ j }} = subgroupAdd(sum{{ j }});
    if (subgroup_lane == {{ j }}u) {
        sums[subgroup * {{ per_lane }}u + {{ j }}u] = total{{ j }};
    }
    {% endfor %}
    workgroupBarrier();
    let column = first_column + lane;
    if (lane < {{ per_lane }}u && column < params.out_rows) {
        var total = sums[lane];
        for (var s = 1u; s < {{ subgroups }}u; s = s + 1u) {
            total = total + sums[s * {{ per_lane }}u + lane];
        }
        let at = token * params.hidden + params.out_begin + column;
        if (params.accumulate != 0u) {
            total = total + out[at];
        }
        out[at] = total;
    }
}
