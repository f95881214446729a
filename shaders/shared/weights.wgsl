// Eight consecutive weights of a row, decoded to f32. `at` counts groups of eight from the start of `w`.
struct Eight {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

{% if dtype == "bf16" %}
fn decode_bf16(word: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(word.x << 16u, word.x & 0xffff0000u, word.y << 16u, word.y & 0xffff0000u));
}

fn load_weight8(at: u32) -> Eight {
    let words = w[at];
    return Eight(decode_bf16(words.xy), decode_bf16(words.zw));
}
{% elif dtype == "f16" %}
fn load_weight8(at: u32) -> Eight {
    let words = w[at];
    return Eight(
        vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)),
        vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w)),
    );
}
{% else %}
fn load_weight8(at: u32) -> Eight {
    return Eight(bitcast<vec4<f32>>(w[at * 2u]), bitcast<vec4<f32>>(w[at * 2u + 1u]));
}
{% endif %}
