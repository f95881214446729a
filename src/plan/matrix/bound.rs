//! What products cannot exceed, by the norms of what they multiply: so that the power of two of a result is known before the result is.

use super::ROW_EXPONENT;
use crate::dtype::DType;

/// The sum of the squares of values, in f32 and in no particular order.
fn squares(dtype: DType, bytes: &[u8]) -> f32 {
    // As many sums side by side as a processor adds at once.
    fn sum<const SIZE: usize>(bytes: &[u8], value: impl Fn([u8; SIZE]) -> f32) -> f32 {
        let mut sums = [0f32; 16];
        for values in bytes.chunks(16 * SIZE) {
            for (sum, value_bytes) in sums.iter_mut().zip(values.as_chunks().0) {
                let v = value(*value_bytes);
                *sum += v * v;
            }
        }
        sums.iter().sum()
    }
    match dtype {
        DType::Bf16 => sum(bytes, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)),
        DType::F16 => sum(bytes, |b| half::f16::from_le_bytes(b).to_f32()),
        DType::F32 | DType::I32 => sum(bytes, f32::from_le_bytes),
    }
}

/// The squares of the Euclidean norms of rows of `row_values` values.
pub(super) fn row_squares(dtype: DType, bytes: &[u8], row_values: usize) -> impl Iterator<Item = f32> {
    bytes.chunks((row_values * dtype.size()).max(1)).map(move |row| squares(dtype, row))
}

/// The larger of two; what is no number stays, on whichever side it stands.
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

/// What a factor of an adapter, A `[R, depth]` and B `[out, R]`, can add to a value of its product, over the norm of the row of x: the
/// norm of A as a whole, times that of the longest row of B, times the scale.
pub fn factor_reach(dtype: [DType; 2], [a, b]: [&[u8]; 2], rank: usize, scale: f32) -> f32 {
    let longest = row_squares(dtype[1], b, rank).fold(0.0, larger).sqrt();
    squares(dtype[0], a).sqrt() * longest * scale.abs()
}

/// The Euclidean norms of the rows of a stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norms {
    /// What that of no row exceeds.
    pub longest: f32,
    /// Their root mean square in the matrix where it is smallest, zeros left aside.
    pub typical: f32,
}

/// How much further than a typical row of the weights a bound may be, adapters included: 2^3. Of the 29 binary places from 2^15 down to the
/// last normal number of f16, and ten more of smaller ones, h = act(gate) · up starts eight down, at 2^7, for the sake of adapters. Two
/// inequalities of Cauchy and Schwarz over rows of thousands of values, and rounding up to powers of two, take about twelve, and the square
/// of this six. So even then the largest value of a row is rounded to 14 places, when f16 itself has 11.
const UNEVEN: f32 = 8.0;

/// The power of two that a product of a row of x stays below, over the norm of that row: with weights of such norms, and adapters that
/// [`reach`](factor_reach) so far. `None` where that says too little of most values.
pub fn reach_exponent(norms: Norms, reach: f32) -> Option<i32> {
    let most = norms.longest + reach;
    // What is no number is none of either.
    (norms.typical > 0.0 && most <= UNEVEN * norms.typical).then(|| (most * 1.01).log2().ceil() as i32)
}

/// The power of two that sums of a product are multiplied by as f16, where they lie below 2 to the `reach` over the norm of a packed row
/// of `depth` values: to below 2^15.
pub fn halves_exponent(reach: i32, depth: usize) -> i32 {
    // No value exceeds 2^7.
    let norm = ROW_EXPONENT + (depth as f32).sqrt().log2().ceil() as i32;
    (15 - norm - reach).clamp(-120, 120)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_reaches_as_far_as_its_norms_say() {
        let bytes = |values: &[f32]| DType::F32.encode(values);
        let reach = factor_reach([DType::F32; 2], [&bytes(&[3.0, 4.0]), &bytes(&[6.0, 1.0])], 1, -0.5);
        assert_eq!(reach, 5.0 * 6.0 * 0.5);
        // A row that is no number is not forgotten behind one that is.
        let reach = factor_reach([DType::F32; 2], [&bytes(&[3.0, 4.0]), &bytes(&[f32::NAN, 1.0])], 1, 0.5);
        assert!(reach.is_nan(), "{reach}");
    }

    #[test]
    fn a_bound_that_says_too_little_is_none() {
        let of = |longest: f32, typical: f32, reach: f32| reach_exponent(Norms { longest, typical }, reach);
        assert_eq!([of(0.9, 0.5, 0.0), of(1.0, 1.0, 1.1), of(1.0, 1.0, 7.0)], [Some(0), Some(2), Some(4)]);
        // Adapters that are much larger than the weights; a row that is much longer than others; both in part.
        assert_eq!([of(1.0, 1.0, 7.1), of(8.1, 1.0, 0.0), of(4.0, 1.0, 4.1)], [None; 3]);
        assert_eq!([of(1.0, 1.0, f32::NAN), of(1.0, 1.0, f32::INFINITY), of(f32::NAN, 1.0, 0.0)], [None; 3]);
        assert_eq!([of(1.0, f32::NAN, 0.0), of(0.0, 0.0, 0.0)], [None; 2]);
        // 768 values of 128 each have a norm of 3547, which is below 2^12.
        assert_eq!(halves_exponent(0, 768), 3);
        assert_eq!(halves_exponent(-200, 768), 120);
    }
}
