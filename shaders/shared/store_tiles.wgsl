// Sums to their place in y, straight from the matrices: in tiles padding included, of a dense product where all rows are real.
{% for j in range(sub_columns // 16) %}
{% if fixed and fixed_out_rows % columns == 0 %}
{
{% else %}
if (first_column + column_begin + {{ j * 16 }}u < {{ size.out_rows }}) {
{% endif %}
    let at = {{ "y_part + " if parted is defined and parted }}(first_row + row_begin) * {{ size.y_stride }} + params.out_begin + first_column + column_begin + {{ j * 16 }}u;
    {% for i in range(sub_rows // 16) %}
    {
        {{ m.hold("block", "sum" ~ i ~ "_" ~ j) }}
        {{ m.point("place", "y", "at + " ~ i * 16 ~ "u * " ~ size.y_stride) }}
        {{ m.store_t("block", "place", "y", size.y_stride, false) }}
    }
    {% endfor %}
}
{% endfor %}
