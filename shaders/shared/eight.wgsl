struct Eight {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

fn decode_bf16(word: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(word.x << 16u, word.x & 0xffff0000u, word.y << 16u, word.y & 0xffff0000u));
}
