// The inner loop of every matrix product: sum<i>_<j> += row <j> of the matrix times row <i> of the input. It stands inside
// `main`, where `groups` (of eight columns) and `w_row<j>` exist; `input` names the buffer of vec4, `row` its row offsets,
// `load` and `storage` make the call that decodes eight weights.
{% if carriers and not depth_lanes %}
// {{ carriers }} lanes load a run of the input, and all take it from there.
let carried = subgroup_lane % {{ carriers }}u;
for (var g = 0u; g < groups; g = g + {{ carriers // 2 }}u) {
    let part = g * 2u + carried;
    let inside = part < groups * 2u;
    {% for i in range(tile) %}
    let x{{ i }} = select(vec4<f32>(), {{ input }}[{{ row }}{{ i }} + min(part, groups * 2u - 1u)], inside);
    {% endfor %}
    {% for q in range(carriers // 2) %}
    {% if q > 0 %}
    if (g + {{ q }}u < groups) {
    {% else %}
    {
    {% endif %}
        {% for j in range(per_lane) %}
        let w{{ j }} = {{ load }}w_row{{ j }} + g + {{ q }}u{{ storage }});
        {% endfor %}
        {% for i in range(tile) %}
        let lo{{ i }} = subgroupBroadcast(x{{ i }}, {{ 2 * q }}u);
        let hi{{ i }} = subgroupBroadcast(x{{ i }}, {{ 2 * q + 1 }}u);
        {% for j in range(per_lane) %}
        sum{{ i }}_{{ j }} = sum{{ i }}_{{ j }} + dot(w{{ j }}.lo, lo{{ i }}) + dot(w{{ j }}.hi, hi{{ i }});
        {% endfor %}
        {% endfor %}
    }
    {% endfor %}
}
{% else %}
{% if depth_lanes %}
// Lanes lie along the row, so that a subgroup reads it in whole cache lines; every lane ends with the sums.
for (var g = subgroup_lane; g < groups; g = g + {{ depth_lanes }}u) {
{% else %}
for (var g = 0u; g < groups; g = g + 1u) {
{% endif %}
    {% for j in range(per_lane) %}
    let w{{ j }} = {{ load }}w_row{{ j }} + g{{ storage }});
    {% endfor %}
    {% for i in range(tile) %}
    let lo{{ i }} = {{ input }}[{{ row }}{{ i }} + g * 2u];
    let hi{{ i }} = {{ input }}[{{ row }}{{ i }} + g * 2u + 1u];
    {% for j in range(per_lane) %}
    sum{{ i }}_{{ j }} = sum{{ i }}_{{ j }} + dot(w{{ j }}.lo, lo{{ i }}) + dot(w{{ j }}.hi, hi{{ i }});
    {% endfor %}
    {% endfor %}
}
{% if depth_lanes %}
{% for i in range(tile) %}
{% for j in range(per_lane) %}
sum{{ i }}_{{ j }} = subgroupAdd(sum{{ i }}_{{ j }});
{% endfor %}
{% endfor %}
{% endif %}
{% endif %}
