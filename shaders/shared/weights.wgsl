// Eight consecutive weights of a row, decoded to f32. `at` counts groups of eight from the start of `w`.
{% include "shared/eight.wgsl" %}

{% if dtype == "bf16" %}
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
