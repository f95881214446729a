// Four weights as f16.
fn decode(words: vec2<u32>) -> vec4<f16> {
    {% if dtype == "f16" %}
    return vec4<f16>(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
    {% else %}
    let v = bitcast<vec4<f32>>(vec4<u32>(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
    return vec4<f16>(v{% if scaled %} * params.w_scale{% endif %});
    {% endif %}
}
