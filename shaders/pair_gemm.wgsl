// The product of few pairs with their experts, adapters included: with `gated` gate and up at once and h = act(gate) up, else
// y. A subgroup owns {{ per_lane }} columns and reads each row of the weights with all its lanes. `down_combine`, or
// this shader again, reads h; `combine` reads y.
struct PairGemmParams {
    // P.
    rows: u32,
    // Pairs that share a row of x.
    row_div: u32,
    // Row of x in vec4.
    x_stride: u32,
    // Groups of eight in a row of W.
    groups: u32,
    // Columns of y in this piece, and where they stand in y: all of h with gate and up.
    out_rows: u32,
    out_begin: u32,
    y_stride: u32,
    // Matrices of this piece.
    first: u32,
    count: u32,
    // Rank that u has room for.
    max_rank: u32,
    // Parts of `ids` when it is an alignment.
    expert_base: u32,
    sorted_base: u32,
    // Constants of the clamped swiglu.
    alpha: f32,
    limit: f32,
    // Parts whose sum u is, one behind the other.
    chunks: u32,
    // Experts of a row of logits; 1: their weights are divided by their sum; and a factor on each.
    experts: u32,
    renormalise: u32,
    scale: f32,
    // Word of the weights in `topk`.
    weights_base: u32,
    pad0: u32,
}

@group(0) @binding(0) var<uniform> params: PairGemmParams;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [rows / row_div, K]
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>; // [count, out_rows or twice that, K]
{% if rows == "chosen" %}
@group(0) @binding(3) var<storage, read> logits: array<f32>; // [P / row_div, E]
{% else %}
@group(0) @binding(3) var<storage, read> ids: array<i32>; // alignment, or ids [P]
{% endif %}
@group(0) @binding(4) var<storage, read> u: array<vec4<u32>>; // [P, projections, 1 + chunks max_rank / 4]
@group(0) @binding(5) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read_write> y: array<f32>; // [P, y_stride]
{% if rows == "chosen" %}
@group(0) @binding(7) var<storage, read_write> topk: array<u32>; // i32 [P], f32 [P] from weights_base
@group(0) @binding(8) var<storage, read_write> status: array<atomic<u32>>; // [1]
{% endif %}

{% include "shared/rows.wgsl" %}
{% include "shared/weights.wgsl" %}
{% if lora %}
{% include "shared/factors.wgsl" %}
{% endif %}
{% set gated = kind != "none" %}
{% if gated %}
{% include "shared/gate.wgsl" %}
{% endif %}
{% if rows == "chosen" %}
{% include "shared/choose.wgsl" %}
{% endif %}
{% set matrices = 2 if gated else 1 %}
{% set w_rows = matrices * per_lane %}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    // Pairs vary first, so that pairs of one expert read its rows at about the same time.
    {% if rows == "chosen" %}
    if (group.y == 0u) {
        if (group.x < params.rows / params.row_div) {
            let found = leave_choice(group.x, params.row_div, subgroup_lane, subgroup == 0u);
            if (subgroup == 0u && subgroup_lane == 0u && found < params.row_div) {
                atomicOr(&status[0], 1u);
            }
        }
        return;
    }
    let workgroup = vec3<u32>(group.y - 1u, group.x, group.z);
    {% else %}
    let workgroup = group.yxz;
    {% endif %}
    {% include "shared/tiles.wgsl" %}
    if (label < i32(params.first) || label >= i32(params.first + params.count)) {
        return;
    }
    let groups = params.groups;
    let first_row = (u32(label) - params.first) * {{ matrices }}u * params.out_rows;
    {% for j in range(per_lane) %}
    let column{{ j }} = (workgroup.x * {{ lanes // depth_lanes }}u + subgroup) * {{ per_lane }}u + {{ j }}u;
    {% if kind == "swiglu_clamped" %}
    let w_row{{ 2 * j }} = (first_row + 2u * min(column{{ j }}, params.out_rows - 1u)) * groups;
    let w_row{{ 2 * j + 1 }} = w_row{{ 2 * j }} + groups;
    {% elif gated %}
    let w_row{{ 2 * j }} = (first_row + min(column{{ j }}, params.out_rows - 1u)) * groups;
    let w_row{{ 2 * j + 1 }} = w_row{{ 2 * j }} + params.out_rows * groups;
    {% else %}
    let w_row{{ j }} = (first_row + min(column{{ j }}, params.out_rows - 1u)) * groups;
    {% endif %}
    {% endfor %}
    {% for i in range(tile) %}
    {% for r in range(w_rows) %}
    var sum{{ i }}_{{ r }} = 0.0;
    {% endfor %}
    {% endfor %}

    // Most tiles are not full where pairs are few.
    {% for height in [1, 2, 4] if height < tile %}
    if (pair{{ height }} >= params.rows) {
        {% with tile = height, per_lane = w_rows, carriers = 0, whole = false, input = "x", row = "x_row", load = "load_weight8(", storage = "" %}
        {% include "shared/walk.wgsl" %}
        {% endwith %}
    } else
    {% endfor %}
    {
        {% with per_lane = w_rows, carriers = 0, whole = false, input = "x", row = "x_row", load = "load_weight8(", storage = "" %}
        {% include "shared/walk.wgsl" %}
        {% endwith %}
    }

    {% if lora %}
    // The adapters' part, shared by the lanes: eight columns of a row of B, for one pair and part of u.
    let groups_of_b = params.max_rank / 8u;
    let parts = groups_of_b * params.chunks;
    for (var item = subgroup_lane; item < {{ tile * w_rows }}u * parts; item = item + {{ depth_lanes }}u) {
        let part = item % parts;
        let sum = item / parts;
        var pair = pair0;
        {% for i in range(1, tile) %}
        pair = select(pair, pair{{ i }}, sum / {{ w_rows }}u == {{ i }}u);
        {% endfor %}
        let column = (workgroup.x * {{ lanes // depth_lanes }}u + subgroup) * {{ per_lane }}u + sum % {{ w_rows }}u / {{ matrices }}u;
        if (pair >= params.rows || column >= params.out_rows) {
            continue;
        }
        let at = (pair * {{ matrices }}u + sum % {{ matrices }}u) * (params.chunks * params.max_rank / 4u + 1u);
        let factor = u[at];
        let group = part % groups_of_b;
        if (group >= factor.y) {
            continue;
        }
        let b = load_factor8(factor.x, (params.out_begin + column) * factor.y + group, factor.z);
        let value = dot(b.lo, bitcast<vec4<f32>>(u[at + 1u + 2u * part])) + dot(b.hi, bitcast<vec4<f32>>(u[at + 2u + 2u * part]));
        {% for i in range(tile) %}
        {% for r in range(w_rows) %}
        sum{{ i }}_{{ r }} = sum{{ i }}_{{ r }} + select(0.0, value, sum == {{ i * w_rows + r }}u);
        {% endfor %}
        {% endfor %}
    }
    {% endif %}

    {% for i in range(tile) %}
    if (pair{{ i }} < params.rows) {
        {% for j in range(per_lane) %}
        {% for m in range(matrices) %}
        let total{{ j }}_{{ m }} = subgroupAdd(sum{{ i }}_{{ matrices * j + m }});
        {% endfor %}
        if (column{{ j }} < params.out_rows && subgroup_lane == {{ (i * per_lane + j) % depth_lanes }}u) {
            let at = pair{{ i }} * params.y_stride + params.out_begin + column{{ j }};
            {% if gated %}
            y[at] = gated(vec4<f32>(total{{ j }}_0), vec4<f32>(total{{ j }}_1)).x;
            {% else %}
            y[at] = total{{ j }}_0;
            {% endif %}
        }
        {% endfor %}
    }
    {% endfor %}
}
