// Sums to their place in y, straight from the matrices: in tiles padding included, of a dense product where all rows are real.
let stride = params.y_stride;
{% for j in range(sub_columns // 16) %}
if (first_column + column_begin + {{ j * 16 }}u < params.out_rows) {
    let at = (first_row + row_begin) * stride + params.out_begin + first_column + column_begin + {{ j * 16 }}u;
    {% for i in range(sub_rows // 16) %}
    {
        {{ m.hold("block", "sum" ~ i ~ "_" ~ j) }}
        {{ m.point("place", "y", "at + " ~ i * 16 ~ "u * stride") }}
        {{ m.store_t("block", "place", "y", "stride", false) }}
    }
    {% endfor %}
}
{% endfor %}
