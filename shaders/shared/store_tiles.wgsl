// Sums to their place in y, which lies in the order of the tiles: straight from the matrices, padding included.
let stride = params.y_stride;
{% for j in range(sub_columns // 16) %}
if (first_column + column_begin + {{ j * 16 }}u < params.out_rows) {
    let at = (first_row + row_begin) * stride + params.out_begin + first_column + column_begin + {{ j * 16 }}u;
    {% for i in range(sub_rows // 16) %}
    {
        let block = sum{{ i }}_{{ j }};
        let place = &y[at + {{ i * 16 }}u * stride];
        coopStoreT(block, place, stride);
    }
    {% endfor %}
}
{% endfor %}
