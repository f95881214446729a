// Four columns of h for one pair from where gate and up lie. `kind` is one of silu, gelu, swiglu_clamped, relu_squared; `factor`
// follows each value that is read.
{% include "shared/gate.wgsl" %}

fn activated(row: u32, quad: u32) -> vec4<f32> {
    {% if kind == "swiglu_clamped" %}
    let first = gate_up[row * params.quads * 2u + quad * 2u]{{ factor }};
    let second = gate_up[row * params.quads * 2u + quad * 2u + 1u]{{ factor }};
    return gated(vec4<f32>(first.xz, second.xz), vec4<f32>(first.yw, second.yw));
    {% elif kind == "relu_squared" %}
    let v = max(gate_up[row * params.quads + quad]{{ factor }}, vec4<f32>());
    return v * v;
    {% else %}
    let gate = gate_up[row * params.quads * 2u + quad]{{ factor }};
    return gated(gate, gate_up[row * params.quads * 2u + params.quads + quad]{{ factor }});
    {% endif %}
}
