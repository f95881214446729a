// Adapter factors of every storage type lie in one pool; an index entry says where and how.
{# Beside `weights.wgsl`, which has a `dtype`, it is there already. #}
{% if dtype is not defined %}
{% include "shared/eight.wgsl" %}
{% endif %}

{% include "shared/factor.wgsl" %}

fn storage_of(factor: Factor) -> u32 {
    return extractBits(factor.rank_type, 16u, 2u);
}

fn biased(factor: Factor) -> u32 {
    return extractBits(factor.rank_type, 18u, 1u);
}

// The power of two that brings A into the range of f16.
fn a_scale(factor: Factor) -> f32 {
    return bitcast<f32>(u32((i32(factor.rank_type) >> 24u) + 127) << 23u);
}

// Four values of a type of two bytes.
fn decode_factor4(words: vec2<u32>, storage: u32) -> vec4<f32> {
    return select(decode_bf16(words), vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)), storage == 1u);
}

// Eight values of which the first 16 bytes are `words`, and the rest, of f32, `more`.
fn decode_factor8(words: vec4<u32>, more: vec4<u32>, storage: u32) -> Eight {
    let wide = storage == 0u;
    return Eight(
        select(decode_factor4(words.xy, storage), bitcast<vec4<f32>>(words), wide),
        select(decode_factor4(words.zw, storage), bitcast<vec4<f32>>(more), wide),
    );
}

// Eight values of f32: group `group` of a matrix that starts at word `base`.
fn load_wide8(base: u32, group: u32) -> Eight {
    let at = base + group * 2u;
    return Eight(bitcast<vec4<f32>>(pool[at]), bitcast<vec4<f32>>(pool[at + 1u]));
}

// The same of a type of two bytes, without a branch: what is loaded in a branch is waited for at its end.
fn load_narrow8(base: u32, group: u32, storage: u32) -> Eight {
    let words = pool[base + group];
    return Eight(decode_factor4(words.xy, storage), decode_factor4(words.zw, storage));
}

// The same of any type.
fn load_factor8(base: u32, group: u32, storage: u32) -> Eight {
    if (storage == 0u) {
        return load_wide8(base, group);
    }
    let words = pool[base + group];
    if (storage == 1u) {
        return Eight(
            vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)),
            vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w)),
        );
    }
    return Eight(decode_bf16(words.xy), decode_bf16(words.zw));
}
