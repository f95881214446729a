// Leaves h of the sums, 16 columns of gate and then of up at a time, through a strip of workgroup memory of each subgroup's own: its lanes
// take half a row each, and write blocks whole.
{% set by_lane = "subgroup * 64u + subgroup_lane * 2u" %}
{% for i in range(sub_rows // 16) %}
{
    let place = first_row + row_begin + {{ i * 16 }}u + subgroup_lane / 2u;
    let pair = u32(ids[params.sorted_base + place]);
    let entry = x[params.exponents + place];
    let power = i32(entry.x);
    let unscale = power_of_two(-power) * params.w_unscale;
    let shift = gated_shift(i32(entry.y), power);
    let scale = power_of_two(shift);
    {% for j in range(sub_columns // 32) %}
    {
        let column = first_column + column_begin / 2u + {{ j * 16 }}u;
        {% for half in ["gate", "up"] %}
        {
            {{ m.hold("block", "sum" ~ i ~ "_" ~ (2 * j + loop.index0)) }}
            {{ m.point("begin", "strip", "subgroup * 64u") }}
            {{ m.store_t("block", "begin", "strip", "4u", true) }}
        }
        subgroupBarrier();
        let {{ half }}_low = {{ m.of_quad("strip[" ~ by_lane ~ "]") }} * unscale;
        let {{ half }}_high = {{ m.of_quad("strip[" ~ by_lane ~ " + 1u]") }} * unscale;
        subgroupBarrier();
        {% endfor %}
        let low = gated(gate_low, up_low) * scale;
        let high = gated(gate_high, up_high) * scale;
        let words = vec4<u32>(pack2x16float(low.xy), pack2x16float(low.zw), pack2x16float(high.xy), pack2x16float(high.zw));
        let block = (first_row + row_begin) / 16u + {{ i }}u;
        // Behind the end of a row stand zeros.
        let h_group = column / 8u + subgroup_lane % 2u;
        let real = h_group < params.h_groups;
        if (column / 16u < params.h_blocks) {
            h_blocks[(block * params.h_blocks + column / 16u) * 32u + subgroup_lane] = select(vec4<u32>(), words, real);
        }
        {% if by_row %}
        if (real && pair < params.rows) {
            let to = (pair * params.h_groups + h_group) * 2u;
            h_rows[to] = words.xy;
            h_rows[to + 1u] = words.zw;
        }
        {% endif %}
    }
    {% endfor %}
    if (first_column + column_begin + subgroup_lane % 2u == 0u && pair < params.rows) {
        h_rows[params.rows * params.h_groups * 2u + pair] = vec2<u32>(pack2x16float(vec2<f32>(f32(shift), 0.0)), 0u);
    }
}
{% endfor %}
