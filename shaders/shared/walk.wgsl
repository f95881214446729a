// The inner loop of every matrix product: sum<i>_<j> += row <j> of the matrix times row <i> of the input. It stands inside
// `main`, where `groups` (of eight columns) and `w_row<j>` exist; `input` names the buffer of vec4, `row` its row offsets,
// `load` and `storage` make the call that decodes eight weights. With `depth_lanes`, `steps` are loaded at once, and the
// lanes' parts are added up at the end if `whole`.
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
// Lanes lie along the row, so that a subgroup reads it in whole cache lines. Past the end of a row x counts as 0.
for (var begin = 0u; begin < groups; begin = begin + {{ steps * depth_lanes }}u) {
    {% for q in range(steps) %}
    let g{{ q }} = begin + {{ q * depth_lanes }}u + subgroup_lane;
    let at{{ q }} = min(g{{ q }}, groups - 1u);
    {% for j in range(per_lane) %}
    let w{{ q }}_{{ j }} = {{ load }}w_row{{ j }} + at{{ q }}{{ storage }});
    {% endfor %}
    {% endfor %}
    {% for q in range(steps) %}
    {% for i in range(tile) %}
    let lo{{ q }}_{{ i }} = select(vec4<f32>(), {{ input }}[{{ row }}{{ i }} + at{{ q }} * 2u], g{{ q }} < groups);
    let hi{{ q }}_{{ i }} = select(vec4<f32>(), {{ input }}[{{ row }}{{ i }} + at{{ q }} * 2u + 1u], g{{ q }} < groups);
    {% for j in range(per_lane) %}
    sum{{ i }}_{{ j }} = sum{{ i }}_{{ j }} + dot(w{{ q }}_{{ j }}.lo, lo{{ q }}_{{ i }}) + dot(w{{ q }}_{{ j }}.hi, hi{{ q }}_{{ i }});
    {% endfor %}
    {% endfor %}
    {% endfor %}
}
{% else %}
for (var g = 0u; g < groups; g = g + 1u) {
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
{% endif %}
{% if depth_lanes and whole %}
{% for i in range(tile) %}
{% for j in range(per_lane) %}
sum{{ i }}_{{ j }} = subgroupAdd(sum{{ i }}_{{ j }});
{% endfor %}
{% endfor %}
{% endif %}
{% endif %}
