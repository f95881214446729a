// Whether sums of a dense product go straight from matrices to y (`plain`): where no row is padding and nothing is scaled, which
// `pack` leaves so for rows of common values. Then they also begin with what is in y, if that is added to.
var unit = params.w_unscale == 1.0 && (({{ size.out_rows }} & 15u) | (({{ size.y_stride }} | params.out_begin) & 3u)) == 0u;
{% for s in range((sub_rows + width - 1) // width) %}
{
    let row = first_row + row_begin + min({{ s * width }}u + subgroup_lane, {{ sub_rows - 1 }}u);
    unit = unit && row < params.rows && {{ exponent_of("min(row, params.rows - 1u)") }} == 0;
}
{% endfor %}
let plain = subgroupAll(unit);
if (plain && params.accumulate != 0u) {
    {% for j in range(sub_columns // 16) %}
    {% if fixed and fixed_out_rows % columns == 0 %}
    {
    {% else %}
    if (first_column + column_begin + {{ j * 16 }}u < {{ size.out_rows }}) {
    {% endif %}
        let at = (first_row + row_begin) * {{ size.y_stride }} + params.out_begin + first_column + column_begin + {{ j * 16 }}u;
        {% for i in range(sub_rows // 16) %}
        {{ m.load_t("sum" ~ i ~ "_" ~ j, "Sum", "y", "at + " ~ i * 16 ~ "u * " ~ size.y_stride, size.y_stride, false) }}
        {% endfor %}
    }
    {% endfor %}
}
