// The power of two that takes a row whose largest magnitude has the bits `most` to just below 2^15: within the range of
// f16, and far enough from its small end that 29 binary places under the largest keep their precision.
fn half_shift(most: u32) -> i32 {
    return 141 - clamp(i32(most >> 23u), 15, 254);
}

fn power_of_two(exponent: i32) -> f32 {
    return bitcast<f32>(u32(exponent + 127) << 23u);
}
