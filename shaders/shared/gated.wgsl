// The gated non-linearity: four columns of h for one pair. `kind` is one of silu, gelu, swiglu_clamped, relu_squared.

// exp overflows past 88; where it would, the result is already exact.
fn sigmoid(v: vec4<f32>) -> vec4<f32> {
    return 1.0 / (1.0 + exp(min(-v, vec4<f32>(80.0))));
}

fn activated(row: u32, quad: u32) -> vec4<f32> {
    {% if kind == "swiglu_clamped" %}
    let first = gate_up[row * params.quads * 2u + quad * 2u];
    let second = gate_up[row * params.quads * 2u + quad * 2u + 1u];
    let gate = min(vec4<f32>(first.xz, second.xz), vec4<f32>(params.limit));
    let up = clamp(vec4<f32>(first.yw, second.yw), vec4<f32>(-params.limit), vec4<f32>(params.limit));
    return (up + 1.0) * gate * sigmoid(params.alpha * gate);
    {% elif kind == "relu_squared" %}
    let v = max(gate_up[row * params.quads + quad], vec4<f32>());
    return v * v;
    {% else %}
    let gate = gate_up[row * params.quads * 2u + quad];
    let up = gate_up[row * params.quads * 2u + params.quads + quad];
    {% if kind == "gelu" %}
    let inner = clamp(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate), vec4<f32>(-15.0), vec4<f32>(15.0));
    return 0.5 * gate * (1.0 + tanh(inner)) * up;
    {% else %}
    return gate * sigmoid(gate) * up;
    {% endif %}
    {% endif %}
}
