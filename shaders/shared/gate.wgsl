// The gated non-linearity.

// exp overflows past 88; where it would, the result is already exact.
fn sigmoid(v: vec4<f32>) -> vec4<f32> {
    return 1.0 / (1.0 + exp(min(-v, vec4<f32>(80.0))));
}

{% if kind == "swiglu_clamped" %}
fn gated(gate: vec4<f32>, up: vec4<f32>) -> vec4<f32> {
    let low = min(gate, vec4<f32>(params.limit));
    return (clamp(up, vec4<f32>(-params.limit), vec4<f32>(params.limit)) + 1.0) * low * sigmoid(params.alpha * low);
}
{% elif kind == "gelu" %}
fn gated(gate: vec4<f32>, up: vec4<f32>) -> vec4<f32> {
    let inner = clamp(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate), vec4<f32>(-15.0), vec4<f32>(15.0));
    return 0.5 * gate * (1.0 + tanh(inner)) * up;
}
{% elif kind == "silu" %}
fn gated(gate: vec4<f32>, up: vec4<f32>) -> vec4<f32> {
    return gate * sigmoid(gate) * up;
}
{% endif %}
