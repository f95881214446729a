// The largest magnitude of four values, as bits: those of magnitudes order like them.
fn most_of(v: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(abs(v));
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// The power of two that takes a row whose largest magnitude has the bits `most` to just below 2^15: within the range of
// f16, and far enough from its small end that 29 binary places under the largest keep their precision. Rows of zeros, or of
// values below 2^-74, take the same as rows of such values, so that what is added to their products stays finite.
fn half_shift(most: u32) -> i32 {
    return 141 - clamp(i32(most >> 23u), 53, 254);
}

// The same to just below 2^7 (`matrix::ROW_EXPONENT`), where the sums of an adapter's A stay in range.
fn operand_shift(most: u32) -> i32 {
    return half_shift(most) - 8;
}

// What a row of an operand takes: none where its largest magnitude lies in 2^-5 to 2^7, so that a product has nothing to undo; else
// that which takes it to just below 2^7. f16 holds 18 binary places or more under the largest value.
fn row_shift(most: u32) -> i32 {
    return select(operand_shift(most), 0, most >= {{ 127 - 5 }}u << 23u && most < {{ 127 + 7 }}u << 23u);
}

fn power_of_two(exponent: i32) -> f32 {
    return bitcast<f32>(u32(exponent + 127) << 23u);
}

// Four f16 from two words. The device does nothing for it: there is no way to say that bits stay as they are.
fn halves(words: vec2<u32>) -> vec4<f16> {
    return vec4<f16>(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
}
