// The norm of rows that still lack what their adapters add: x[t] += B u[t], then out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight.
// One workgroup a row, which it writes back. What `dense_gemm` and `norm` are apart, this is where the product only left u. With
// `loads` a lane has at most that many columns and keeps them; all that is read is on its way before anything waits.
struct ExpandNormParams {
    // T.
    rows: u32,
    // D.
    width: u32,
    // Rank that u has room for.
    max_rank: u32,
    eps: f32,
    // 1 / D.
    scale: f32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> params: ExpandNormParams;
@group(0) @binding(1) var<storage, read> weight: array<f32>; // [D]
@group(0) @binding(2) var<storage, read> u: array<vec4<u32>>; // [T, 1 + max_rank / 4], as `pair_shrink` has it
@group(0) @binding(3) var<storage, read> pool: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> x: array<f32>; // [T, D]
@group(0) @binding(5) var<storage, read_write> out: array<f32>; // [T, D]

{% include "shared/rows.wgsl" %}
{% include "shared/reduce.wgsl" %}
{% include "shared/factors.wgsl" %}
{% include "shared/addend.wgsl" %}

{% set columns = loads if loads else 8 %}
@compute @workgroup_size({{ lanes }})
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let lane = subgroup * {{ lanes // subgroups }}u + subgroup_lane;
    let row = folded(workgroup);
    if (row >= params.rows) {
        return;
    }
    let u_at = row * (params.max_rank / 4u + 1u);
    let factor = u[u_at];
    let first = row * params.width;
    var squares = 0.0;

    {# Adds group `part` of B to every column that is held. The type is known: f32 alone has a second half that is read. #}
    {% macro add(part, wide) %}
    {
        let present = {{ part }} < factor.y;
        {% for n in range(columns) %}
        let at{{ n }} = group_at(factor, column{{ n }}, {{ part }});
        let words{{ n }} = pool[at{{ n }}];
        {% if wide %}
        let more{{ n }} = pool[select(at{{ n }}, at{{ n }} + 1u, present)];
        {% endif %}
        {% endfor %}
        let of_u = read_u(factor, u_at + 1u, {{ part }});
        {% for n in range(columns) %}
        {
            {% if wide %}
            let value = dot(bitcast<vec4<f32>>(words{{ n }}), of_u.lo) + dot(bitcast<vec4<f32>>(more{{ n }}), of_u.hi);
            {% else %}
            let value = dot(decode_factor4(words{{ n }}.xy, factor.z), of_u.lo) + dot(decode_factor4(words{{ n }}.zw, factor.z), of_u.hi);
            {% endif %}
            v{{ n }} = v{{ n }} + select(0.0, value, present);
        }
        {% endfor %}
    }
    {% endmacro %}
    {# Reads the columns from `begin` on and adds everything to them. Two groups of B, a rank of 16, are read at once. #}
    {% macro read_columns(begin) %}
    {% for n in range(columns) %}
    let i{{ n }} = {{ begin }} + {{ n * lanes }}u + lane;
    let column{{ n }} = min(i{{ n }}, params.width - 1u);
    var v{{ n }} = x[first + column{{ n }}];
    {% endfor %}
    if (factor.z == 0u) {
        for (var part = 0u; part < factor.y; part = part + 1u) {
            {{ add("part", true) }}
        }
    } else {
        {{ add("0u", false) }}
        {{ add("1u", false) }}
        for (var part = 2u; part < factor.y; part = part + 1u) {
            {{ add("part", false) }}
        }
    }
    {% for n in range(columns) %}
    if (i{{ n }} < params.width) {
        x[first + i{{ n }}] = v{{ n }};
        squares = squares + v{{ n }} * v{{ n }};
    }
    {% endfor %}
    {% endmacro %}
    {% if loads %}
    {% for n in range(columns) %}
    let weight{{ n }} = weight[min({{ n * lanes }}u + lane, params.width - 1u)];
    {% endfor %}
    {{ read_columns("0u") }}
    {% else %}
    for (var begin = 0u; begin < params.width; begin = begin + {{ columns * lanes }}u) {
        {{ read_columns("begin") }}
    }
    {% endif %}
    squares = reduce_sum(squares, lane);
    let norm = inverseSqrt(squares * params.scale + params.eps);
    {% if loads %}
    {% for n in range(columns) %}
    if (i{{ n }} < params.width) {
        out[first + i{{ n }}] = v{{ n }} * norm * weight{{ n }};
    }
    {% endfor %}
    {% else %}
    for (var i = lane; i < params.width; i = i + {{ lanes }}u) {
        out[first + i] = x[first + i] * norm * weight[i];
    }
    {% endif %}
}
