let y_begin = params.out_begin + first_column;
// The projection whose columns this tile has{% if across %}, or the first of several{% endif %}, and chunks of 16 ranks.
var first_projection = 0u;
{% if across %}
let y_end = params.out_begin + min(first_column + {{ columns }}u, {{ size.out_rows }});
var projections = 1u;
{% endif %}
for (var i = 1u; i < params.projections; i = i + 1u) {
    if (params.span_begin[i] <= y_begin) {
        first_projection = i;
        {% if across %}
        projections = 1u;
    } else if (params.span_begin[i] < y_end) {
        projections = projections + 1u;
        {% endif %}
    }
}
{% if across %}
if (params.step > 1u) {
    // They alternate.
    first_projection = 0u;
    projections = params.projections;
}
{% endif %}
