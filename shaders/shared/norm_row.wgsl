// Reads the row that begins at `source`, and leaves what its values are multiplied by in `factor`. With `loads` a lane has at most that
// many vec4 of the row and keeps them (`v0` and so on, of which those past the end are 0): all that is read is on its way before anything
// waits.
var squares = 0.0;
{% if loads %}
{% for n in range(loads) %}
let i{{ n }} = lane + {{ n * lanes }}u;
let at{{ n }} = min(i{{ n }}, params.quads - 1u);
{% if parts is defined and parts %}
let read{{ n }} = x[source + at{{ n }}]{% for p in range(parts) %} + added[{{ p }}u * params.rows * params.quads + source + at{{ n }}]{% endfor %};
{% else %}
let read{{ n }} = x[source + at{{ n }}];
{% endif %}
let weight{{ n }} = weight[at{{ n }}];
{% endfor %}
{% for n in range(loads) %}
let v{{ n }} = select(vec4<f32>(), read{{ n }}, i{{ n }} < params.quads);
squares = squares + dot(v{{ n }}, v{{ n }});
{% endfor %}
{% else %}
for (var i = lane; i < params.quads; i = i + {{ lanes }}u) {
    let v = x[source + i];
    squares = squares + dot(v, v);
}
{% endif %}
{% if parts is defined and parts %}
{% for n in range(loads) %}
if (i{{ n }} < params.quads) {
    x[source + i{{ n }}] = read{{ n }};
}
{% endfor %}
{% endif %}
squares = reduce_sum(squares, lane);
let factor = inverseSqrt(squares * params.scale + params.eps);
