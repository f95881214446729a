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
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: DownCombineParams;
@group(0) @binding(1) var<storage, read> h: array<vec4<f32>>; // [P, F]
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>; // [count, out_rows, F]
@group(0) @binding(3) var<storage, read> ids: array<i32>; // [T, A], local
@group(0) @binding(4) var<storage, read> topk_weights: array<f32>; // [T, A]
@group(0) @binding(5) var<storage, read> u: array<vec4<u32>>; // [P, 1 + max_rank / 4] from `pair_shrink`
@group(0) @binding(6) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>; // [T, D]

{% include "shared/weights.wgsl" %}

{% set subgroups = lanes // depth_lanes %}
var<workgroup> sums: array<f32, {{ subgroups * per_lane }}>;

fn held(id: i32) -> bool {
    return id >= i32(params.first) && id < i32(params.first + params.count);
}

{% if lora %}
{% include "shared/factors.wgsl" %}
{% include "shared/addend.wgsl" %}

// A group of B for one column of one pair, and the pair's weight.
struct Share {
    addend: Addend,
    weight: f32,
}

fn read_share(item: u32, first_pair: u32, first_column: u32) -> Share {
    let parts = params.max_rank / 8u;
    let sum = item / parts % {{ per_lane }}u;
    let k = item / parts / {{ per_lane }}u;
    let pair = first_pair + k;
    let column = first_column + sum;
    if (k >= params.top_k || column >= params.out_rows || !held(ids[pair])) {
        return Share(no_addend(sum), 0.0);
    }
    let addend = read_group(sum, pair * (params.max_rank / 4u + 1u), params.out_begin + column, item % parts);
    return Share(addend, topk_weights[pair]);
}
{% endif %}

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

    // What the lane adds to, and of the adapters, is read before the weights, so that nothing is waited for afterwards.
    let column = first_column + lane;
    let writes = lane < {{ per_lane }}u && column < params.out_rows;
    let out_at = token * params.hidden + params.out_begin + column;
    var before = 0.0;
    if (writes && params.accumulate != 0u) {
        before = out[out_at];
    }
    {% if lora %}
    var share = read_share(lane, first_pair, first_column);
    {% endif %}

    for (var k = subgroup; k < params.top_k; k = k + {{ subgroups }}u) {
        let pair = first_pair + k;
        let id = ids[pair];
        if (!held(id)) {
            continue;
        }
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
        {% for j in range(per_lane) %}
        sum{{ j }} = sum{{ j }} + weight * part{{ j }};
        {% endfor %}
    }

    {% if lora %}
    // Many experts a token, and high ranks, have more of the adapters' part than lanes.
    let items = {{ per_lane }}u * params.top_k * (params.max_rank / 8u);
    for (var item = lane; item < items; item = item + {{ lanes }}u) {
        let value = value_of(share.addend) * share.weight;
        {% for j in range(per_lane) %}
        sum{{ j }} = sum{{ j }} + select(0.0, value, share.addend.sum == {{ j }}u);
        {% endfor %}
        if (item + {{ lanes }}u < items) {
            share = read_share(item + {{ lanes }}u, first_pair, first_column);
        }
    }
    {% endif %}

    {% for j in range(per_lane) %}
    let total{{ j }} = subgroupAdd(sum{{ j }});
    if (subgroup_lane == {{ j }}u) {
        sums[subgroup * {{ per_lane }}u + {{ j }}u] = total{{ j }};
    }
    {% endfor %}
    workgroupBarrier();
    if (writes) {
        var total = sums[lane];
        for (var s = 1u; s < {{ subgroups }}u; s = s + 1u) {
            total = total + sums[s * {{ per_lane }}u + lane];
        }
        out[out_at] = total + before;
    }
}
