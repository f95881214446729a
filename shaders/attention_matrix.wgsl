{% import "shared/matrices.wgsl" as m %}
// Causal attention of a tile of queries, consecutive rows of one sequence times the heads that share a key head, on
// cooperative matrices: {{ subgroups * 16 }} queries a workgroup, 16 a subgroup, over keys and values in blocks of {{ positions }} positions as
// `attention_pack` left them. Scores and weights pass through workgroup memory of each subgroup's own, where two lanes
// own a row; sums of values stay in registers as matrices. A running maximum is a reference only: weights may exceed 1
// by up to 2^8 before the sums are rescaled (a matrix cannot be scaled by rows in place), which is rare after the first
// blocks. Scores are in base 2. The output projection reads out.
enable f16;
enable wgpu_cooperative_matrix;
// What a subgroup does is uniform within it, but not for the analysis.
diagnostic(off, derivative_uniformity);

struct AttentionMatrixParams {
    heads: u32,
    kv_heads: u32,
    // Query heads of a key head.
    group: u32,
    // First tile in `items`, and their number.
    base: u32,
    count: u32,
    // log2(e) / sqrt(head_dim).
    scale: f32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: AttentionMatrixParams;
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>; // [T, heads, head_dim]
@group(0) @binding(2) var<storage, read> packed: array<vec4<f16>>; // [packs, kv_heads] keys, values, exponents
@group(0) @binding(3) var<storage, read> items: array<vec4<i32>>; // from base on: first row, rows, position, first pack
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>; // [T, heads, head_dim]

{% include "shared/matrices.wgsl" %}

{# Rows in workgroup memory are eight elements longer than their content, so that lanes meet different banks. #}
{% set quads = head_dim // 4 %}
{% set row = (head_dim + 8) // 4 %}
{% set strip_row = (strip + 8) // 4 %}
{% set weight_row = (weight_columns + 8) // 4 %}
{% set lanes = subgroups * width %}
{% set loads = positions * quads // lanes %}
{% set columns = positions // 16 %}
{% set depths = head_dim // 16 %}
const QUADS = {{ quads }}u;
const BLOCK = {{ positions * quads }}u;
const ROW = {{ row }}u;
const STRIP_ROW = {{ strip_row }}u;
const WEIGHT_ROW = {{ weight_row }}u;
// Masked scores, before they are scaled: far below all others, and finite whatever the scale.
const MASKED: f32 = -3.0e26;
// A new maximum above the reference by more than this rescales the sums.
const SLACK: f32 = 8.0;
// Weights are kept above the small end of f16 by this power of two.
const LIFT = 3;

var<workgroup> k_tile: array<{{ m.quad("f16") }}, {{ positions * row }}>;
var<workgroup> v_tile: array<{{ m.quad("f16") }}, {{ positions * row }}>;
var<workgroup> score_tile: array<{{ m.quad("f32") }}, {{ subgroups * 16 * strip_row }}>;
var<workgroup> weight_tile: array<{{ m.quad("f16") }}, {{ subgroups * 16 * weight_row }}>;

{% include "shared/rows.wgsl" %}
{% include "shared/halves.wgsl" %}

fn largest(v: vec4<f32>) -> f32 {
    return max(max(v.x, v.y), max(v.z, v.w));
}

@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let entry = folded(workgroup);
    if (entry >= params.count) {
        return;
    }
    let kv_head = workgroup.x;
    let item = vec4<u32>(items[params.base + entry]);
    let first_position = item.z;
    let steps = (first_position + item.y - 1u) / {{ positions }}u + 1u;
    let stride = params.kv_heads * (2u * BLOCK + 2u);
    let first_block = item.w * stride + kv_head * (2u * BLOCK + 2u);

    // Keys and values on their way into workgroup memory.
    {% for i in range(loads) %}
    var k{{ i }} = packed[first_block + lane + {{ i * lanes }}u];
    var v{{ i }} = packed[first_block + BLOCK + lane + {{ i * lanes }}u];
    let place{{ i }} = (lane + {{ i * lanes }}u) / QUADS * ROW + (lane + {{ i * lanes }}u) % QUADS;
    {% endfor %}

    // The query of this lane's row, which it shares with one other. Rows past the last repeat it and are not written.
    let half = subgroup_lane % 2u;
    let m = subgroup * 16u + subgroup_lane / 2u;
    let query = min(m / params.group, item.y - 1u);
    let source = ((item.x + query) * params.heads + kv_head * params.group + m % params.group) * QUADS;
    let limit = first_position + query;
    let score_begin = subgroup * {{ 16 * strip_row }}u;
    let score_at = score_begin + subgroup_lane / 2u * STRIP_ROW + half;
    let weight_begin = subgroup * {{ 16 * weight_row }}u;
    let weight_at = weight_begin + subgroup_lane / 2u * WEIGHT_ROW + half;
    var q_most = 0.0;
    for (var i = half; i < QUADS; i = i + 2u) {
        q_most = max(q_most, largest(abs(q[source + i])));
    }
    q_most = max(q_most, subgroupShuffleXor(q_most, 1u)) * params.scale;
    let q_shift = min(half_shift(bitcast<u32>(q_most)), {{ most_score_shift }});
    let q_scale = power_of_two(q_shift);
    {% for r in range(head_dim // 32) %}
    {% for j in range(4) %}
    weight_tile[weight_at + {{ 2 * j }}u] = {{ m.to_quad("f16", "vec4<f16>(q[source + " ~ (8 * r + 2 * j) ~ "u + half] * params.scale * q_scale)") }};
    {% endfor %}
    subgroupBarrier();
    {{ m.load_t("let q" ~ 2 * r, "Left", "weight_tile", "weight_begin", "WEIGHT_ROW") }}
    {{ m.load_t("let q" ~ (2 * r + 1), "Left", "weight_tile", "weight_begin + 4u", "WEIGHT_ROW") }}
    subgroupBarrier();
    {% endfor %}

    {% for d in range(depths) %}
    {{ m.zero("sum" ~ d) }}
    {% endfor %}
    var reference = -3.0e38;
    // Of this lane's columns.
    var total = 0.0;
    // Sums are in units of 2^-(exponent + LIFT).
    var exponent = 0;
    var least_exponent = 1000;

    {% for i in range(loads) %}
    k_tile[place{{ i }}] = {{ m.to_quad("f16", "k" ~ i) }};
    {% endfor %}
    workgroupBarrier();
    for (var step = 0u; step < steps; step = step + 1u) {
        let block = first_block + step * stride;
        let next_block = first_block + min(step + 1u, steps - 1u) * stride;
        let exponents = packed[block + 2u * BLOCK];
        {% for c in range(columns) %}
        {{ m.zero("score" ~ c) }}
        {% endfor %}
        {% for d in range(depths) %}
        {% for c in range(columns) %}
        {{ m.multiply_add_loaded("score" ~ c, "q" ~ d, "k_tile", (c * 16 * row + d * 4) ~ "u", "ROW", false) }}
        {% endfor %}
        {% endfor %}
        {% for i in range(loads) %}
        v_tile[place{{ i }}] = {{ m.to_quad("f16", "v" ~ i) }};
        {% endfor %}
        {% for i in range(loads) %}
        k{{ i }} = packed[next_block + lane + {{ i * lanes }}u];
        {% endfor %}

        // Scores to the lanes that own their rows.
        {% for s in range(positions // strip) %}
        {
            {% for j in range(strip // 16) %}
            {{ m.point("strip" ~ j, "score_tile", "score_begin + " ~ 4 * j ~ "u") }}
            {{ m.hold("part" ~ j, "score" ~ (s * (strip // 16) + j)) }}
            {{ m.store_t("part" ~ j, "strip" ~ j, "score_tile", "STRIP_ROW", true) }}
            {% endfor %}
        }
        subgroupBarrier();
        {% for j in range(strip // 16) %}
        {% set c = s * (strip // 16) + j %}
        var low{{ c }} = {{ m.of_quad("score_tile[score_at + " ~ 4 * j ~ "u]") }};
        var high{{ c }} = {{ m.of_quad("score_tile[score_at + " ~ (4 * j + 2) ~ "u]") }};
        {% endfor %}
        subgroupBarrier();
        {% endfor %}
        if ((step + 1u) * {{ positions }}u > first_position + 1u) {
            let column = vec4<u32>(step * {{ positions }}u + half * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
            let bound = vec4<u32>(limit);
            {% for c in range(columns) %}
            low{{ c }} = select(vec4<f32>(MASKED), low{{ c }}, column + {{ 16 * c }}u <= bound);
            high{{ c }} = select(vec4<f32>(MASKED), high{{ c }}, column + {{ 16 * c + 8 }}u <= bound);
            {% endfor %}
        }
        var most = max(largest(low0), largest(high0));
        {% for c in range(1, columns) %}
        most = max(most, max(largest(low{{ c }}), largest(high{{ c }})));
        {% endfor %}
        let unscale = power_of_two(clamp(-(q_shift + i32(exponents.x)), -80, 39));
        most = max(most, subgroupShuffleXor(most, 1u)) * unscale;

        // Larger values than before lower the exponent; much smaller ones raise it, but not so far that sums of the
        // largest overflow.
        let v_shift = i32(exponents.y);
        least_exponent = min(least_exponent, v_shift);
        var next_exponent = exponent;
        if (step == 0u || v_shift < exponent) {
            next_exponent = v_shift;
        } else if (v_shift > exponent + 10) {
            next_exponent = min(v_shift, least_exponent + 80);
        }
        if (subgroupAny(most > reference + SLACK) || next_exponent != exponent) {
            let next = max(reference, most);
            let keep = exp2(reference - next);
            reference = next;
            total = total * keep;
            if (step > 0u) {
                let factor = keep * power_of_two(clamp(next_exponent - exponent, -126, 126));
                {% for d in range(depths) %}
                {
                    {{ m.point("strip", "score_tile", "score_begin") }}
                    {{ m.hold("part", "sum" ~ d) }}
                    {{ m.store_t("part", "strip", "score_tile", "STRIP_ROW", true) }}
                }
                subgroupBarrier();
                score_tile[score_at] = {{ m.to_quad("f32", m.of_quad("score_tile[score_at]") ~ " * factor") }};
                score_tile[score_at + 2u] = {{ m.to_quad("f32", m.of_quad("score_tile[score_at + 2u]") ~ " * factor") }};
                subgroupBarrier();
                {{ m.load_t("sum" ~ d, "Sum", "score_tile", "score_begin", "STRIP_ROW") }}
                subgroupBarrier();
                {% endfor %}
            }
            exponent = next_exponent;
        }

        // Weights, in units that undo this block's exponent.
        let lift = max(exponent - v_shift + LIFT, -126);
        let offset = vec4<f32>(f32(lift) - reference);
        let slope = vec4<f32>(unscale);
        var added = vec4<f32>();
        {% for r in range(positions // weight_columns) %}
        {% for j in range(weight_columns // 16) %}
        {% set c = r * (weight_columns // 16) + j %}
        let first{{ c }} = exp2(fma(low{{ c }}, slope, offset));
        let second{{ c }} = exp2(fma(high{{ c }}, slope, offset));
        added = added + first{{ c }} + second{{ c }};
        weight_tile[weight_at + {{ 4 * j }}u] = {{ m.to_quad("f16", "vec4<f16>(first" ~ c ~ ")") }};
        weight_tile[weight_at + {{ 4 * j + 2 }}u] = {{ m.to_quad("f16", "vec4<f16>(second" ~ c ~ ")") }};
        {% endfor %}
        subgroupBarrier();
        {% for j in range(weight_columns // 16) %}
        {{ m.load_t("let weight" ~ (r * (weight_columns // 16) + j), "Left", "weight_tile", "weight_begin + " ~ 4 * j ~ "u", "WEIGHT_ROW") }}
        {% endfor %}
        subgroupBarrier();
        {% endfor %}
        total = total + (added.x + added.y + added.z + added.w) * power_of_two(-lift);

        workgroupBarrier();
        {% for i in range(loads) %}
        k_tile[place{{ i }}] = {{ m.to_quad("f16", "k" ~ i) }};
        {% endfor %}
        {% for i in range(loads) %}
        v{{ i }} = packed[next_block + BLOCK + lane + {{ i * lanes }}u];
        {% endfor %}
        {% for c in range(columns) %}
        {% for d in range(depths) %}
        {{ m.multiply_add_loaded("sum" ~ d, "weight" ~ c, "v_tile", (c * 16 * row + d * 4) ~ "u", "ROW", true) }}
        {% endfor %}
        {% endfor %}
        workgroupBarrier();
    }

    total = total + subgroupShuffleXor(total, 1u);
    let inverse = 1.0 / total;
    let unit = power_of_two(-(exponent + LIFT));
    let written = m < item.y * params.group;
    {% for d in range(depths) %}
    {
        {{ m.point("strip", "score_tile", "score_begin") }}
        {{ m.hold("part", "sum" ~ d) }}
        {{ m.store_t("part", "strip", "score_tile", "STRIP_ROW", true) }}
    }
    subgroupBarrier();
    if (written) {
        out[source + {{ 4 * d }}u + half] = {{ m.of_quad("score_tile[score_at]") }} * inverse * unit;
        out[source + {{ 4 * d + 2 }}u + half] = {{ m.of_quad("score_tile[score_at + 2u]") }} * inverse * unit;
    }
    subgroupBarrier();
    {% endfor %}
}
