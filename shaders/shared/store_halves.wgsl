// Sums to their place in y as f16, times a power of two that keeps all of them in its range, through a strip of workgroup memory of each
// subgroup's own, 16 columns at a time, of which a lane takes half a row.
{% set by_lane = "subgroup * 64u + subgroup_lane * 2u" %}
{% for j in range(sub_columns // 16) %}
{
    let column = first_column + column_begin + {{ j * 16 }}u;
    {% for i in range(sub_rows // 16) %}
    {
        {{ m.hold("block", "sum" ~ i ~ "_" ~ j) }}
        {{ m.point("begin", "strip", "subgroup * 64u") }}
        {{ m.store_t("block", "begin", "strip", "4u", true) }}
    }
    subgroupBarrier();
    {
        let low = {{ m.of_quad("strip[" ~ by_lane ~ "]") }} * params.y_scale;
        let high = {{ m.of_quad("strip[" ~ by_lane ~ " + 1u]") }} * params.y_scale;
        {% if not (fixed and fixed_out_rows % columns == 0) %}
        if (column < {{ size.out_rows }}) {
        {% else %}
        {
        {% endif %}
            let at = (first_row + row_begin + {{ i * 16 }}u + subgroup_lane / 2u) * {{ size.y_stride }} + params.out_begin + column;
            y[at / 8u + subgroup_lane % 2u] =
                vec4<u32>(pack2x16float(low.xy), pack2x16float(low.zw), pack2x16float(high.xy), pack2x16float(high.zw));
        }
    }
    subgroupBarrier();
    {% endfor %}
}
{% endfor %}
