//! Which values the matrix tier takes as f16, and the powers of two that bring them there.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::EDGE;
use crate::dtype::DType;

/// Rows of x are packed with magnitudes below 2 to this power.
pub const ROW_EXPONENT: i32 = 7;

/// B of an adapter is multiplied by 2^4 where a product adds it, and u divided by as much: B is small, and u may be large.
pub const LIFT: u32 = 4;

/// Slots of a pool whose adapters a product can add: what its shader has bits for.
pub const FOLDED_SLOTS: usize = 128;

/// Pairs of a product that adds adapters are below: its shader has 24 bits for them.
pub const FOLDED_ROWS: usize = 1 << 24;

/// Whether B and u of a factor stay within the range of f16, so that a product can add them: the largest magnitudes of A
/// `[R, depth]` and of B, and the scale.
pub fn factor_folds([a, b]: [f32; 2], depth: usize, scale: f32) -> bool {
    let lift = 2f32.powi(LIFT as i32);
    let most_u = scale.abs() * depth as f32 * a * 2f32.powi(ROW_EXPONENT) / lift;
    let most_b = b * lift;
    // Neither holds for what is no number.
    most_u <= 65_504.0 && most_b <= 65_504.0
}

/// Whether a product of rows of `depth` should add up to `adapters` adapters of `max_rank` to a tile: each lengthens its rows.
pub fn folds(adapters: usize, max_rank: usize, depth: usize) -> bool {
    adapters * max_rank.next_multiple_of(EDGE as usize) <= depth
}

/// The largest magnitude in a block of weights, where [`weight_exponent`] asks for it.
pub fn largest(dtype: DType, bytes: &[u8]) -> f32 {
    if dtype == DType::Bf16 { largest_magnitude(dtype, bytes) } else { 0.0 }
}

/// The power of two that brings a factor of an adapter into the range of f16: its largest magnitude to just below 2^14.
pub fn factor_exponent(largest: f32) -> i8 {
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    (13 - exponent).clamp(-120, 120) as i8
}

/// The largest magnitude among values; not a number where one is none. Magnitudes order like their bits.
pub fn largest_magnitude(dtype: DType, bytes: &[u8]) -> f32 {
    let halves = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]) & 0x7fff).max().unwrap_or(0);
    match dtype {
        DType::Bf16 => f32::from_bits(u32::from(halves()) << 16),
        DType::F16 => half::f16::from_bits(halves()).to_f32(),
        DType::F32 | DType::I32 => {
            let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) & 0x7fff_ffff);
            f32::from_bits(words.max().unwrap_or(0))
        }
    }
}

/// The power of two that brings the weights of a stack into the range of f16: 0 where they lie well within it. `largest` is the
/// largest magnitude of each matrix. `None` where f16 cannot hold them: f32 weights, which deserve f32 arithmetic; a value
/// that is not finite; or matrices so different that the small ones would vanish beside the large ones.
pub fn weight_exponent(dtype: DType, largest: &[f32]) -> Option<i32> {
    if dtype == DType::F16 {
        return Some(0);
    }
    if dtype != DType::Bf16 || largest.iter().any(|v| !v.is_finite()) {
        return None;
    }
    let exponent = |v: f32| (v.to_bits() >> 23) as i32 - 127;
    let used = || largest.iter().filter(|v| **v > 0.0).map(|v| exponent(*v));
    let (Some(most), Some(least)) = (used().max(), used().min()) else { return Some(0) };
    if (-10..=14).contains(&most) && least >= -10 {
        return Some(0);
    }
    // 29 binary places from 2^14 down to f16's last normal number; a matrix needs about ten of them.
    (most - least <= 18 && (-112..=126).contains(&(14 - most))).then_some(14 - most)
}

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
fn row_squares(dtype: DType, bytes: &[u8], row_values: usize) -> impl Iterator<Item = f32> {
    bytes.chunks((row_values * dtype.size()).max(1)).map(move |row| squares(dtype, row))
}

/// The larger of two; what is no number stays.
fn larger(a: f32, b: f32) -> f32 {
    if a >= b { a } else { b }
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

/// How much further than a typical row of the weights a bound may be, adapters included. h = act(gate) · up takes its square, and f16 has
/// 29 binary places of normal numbers, to which 2^-25 of the smallest is rounded beyond: of rows of thousands of values the inequality
/// of Cauchy and Schwarz, twice, and rounding up to powers of two take about twelve below 2^7, this six more, and what is left of the
/// largest value of a row is rounded to 14 places, when f16 itself has 11.
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

/// How large the weights of a stack are, which is known once all of them have been read; its copies learn it, too.
#[derive(Debug, Clone, Default)]
pub struct Magnitude(Arc<OnceLock<(Option<i32>, Option<Norms>)>>);

impl Magnitude {
    /// One that is known: the [`weight_exponent`], and the norms of the rows. Without the latter stages that need them are done in another
    /// way.
    pub fn known(exponent: Option<i32>, norms: Option<Norms>) -> Self {
        Self(Arc::new(OnceLock::from((exponent, norms))))
    }

    /// The [`weight_exponent`]. `None` also as long as it is not known: f32 arithmetic is right for all weights.
    pub fn exponent(&self) -> Option<i32> {
        self.0.get()?.0
    }

    /// The norms of the rows of all matrices. `None` where they are not known, or their squares leave the range of f32.
    pub fn norms(&self) -> Option<Norms> {
        self.0.get()?.1
    }
}

/// What has been found of one matrix.
#[derive(Debug, Default)]
struct Found {
    /// The largest magnitude, and the largest square of a row's norm, as bits of f32: they order like them, and what is no number is above
    /// all numbers.
    largest: AtomicU32,
    longest: AtomicU32,
    /// Rows that are not zeros, and the sum of the squares of their norms.
    rows: Mutex<(f64, f64)>,
}

/// The magnitudes of a stack whose weights are read in parts, in any order and by several threads.
#[derive(Debug)]
pub struct Measured {
    dtype: DType,
    row_values: usize,
    matrices: Box<[Found]>,
    magnitude: Magnitude,
}

impl Measured {
    /// For `count` matrices with rows of `row_values` weights; `None`, with what is known, of types that this tier does not take.
    pub fn new(dtype: DType, count: usize, row_values: usize) -> (Option<Self>, Magnitude) {
        if !matches!(dtype, DType::Bf16 | DType::F16) {
            return (None, Magnitude::known(weight_exponent(dtype, &[]), None));
        }
        let magnitude = Magnitude::default();
        let matrices = (0..count).map(|_| Found::default()).collect();
        (Some(Self { dtype, row_values, matrices, magnitude: magnitude.clone() }), magnitude)
    }

    /// Takes whole rows of matrix `m`, zeros behind them included.
    pub fn add(&self, m: usize, bytes: &[u8]) {
        let found = &self.matrices[m];
        let (mut longest, mut rows, mut total) = (0f32, 0f64, 0f64);
        for squares in row_squares(self.dtype, bytes, self.row_values).filter(|squares| *squares != 0.0) {
            longest = larger(longest, squares);
            (rows, total) = (rows + 1.0, total + f64::from(squares));
        }
        found.largest.fetch_max(largest(self.dtype, bytes).to_bits() & 0x7fff_ffff, Ordering::Relaxed);
        found.longest.fetch_max(longest.to_bits() & 0x7fff_ffff, Ordering::Relaxed);
        // Nothing panics while it is held.
        if let Ok(mut held) = found.rows.lock() {
            *held = (held.0 + rows, held.1 + total);
        }
    }

    /// All parts have been added, by threads that have ended or handed over what they read.
    pub fn finish(&self) {
        let value = |bits: &AtomicU32| f32::from_bits(bits.load(Ordering::Relaxed));
        let largest: Vec<f32> = self.matrices.iter().map(|found| value(&found.largest)).collect();
        let longest = self.matrices.iter().map(|found| value(&found.longest)).fold(0.0, larger).sqrt();
        let typical = |found: &Found| {
            let (rows, total) = found.rows.lock().map_or((0.0, 0.0), |held| *held);
            (rows > 0.0).then(|| (total / rows).sqrt() as f32)
        };
        let typical = self.matrices.iter().filter_map(typical).fold(f32::INFINITY, f32::min);
        let norms = (1e-15..1e15).contains(&longest).then_some(Norms { longest, typical });
        // Set once: an uploader runs once.
        let _ = self.magnitude.0.set((weight_exponent(self.dtype, &largest), norms));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_any_order_give_the_exponent_of_the_whole() {
        let stacks: [&[&[f32]]; 6] = [
            &[&[0.1, -3.0], &[0.0, 0.0]],
            &[&[-1e6, 2.0], &[50.0, 1.0]],
            &[&[1e-6, 0.0], &[0.0, -1e-7]],
            &[&[1e6, 1.0], &[1e-3, 0.0]],
            &[&[1.0, f32::NAN], &[1.0, 1.0]],
            &[&[1.0, 1.0], &[f32::NEG_INFINITY, 1.0]],
        ];
        for stack in stacks {
            let largest: Vec<f32> =
                stack.iter().map(|m| m.iter().fold(0.0, |a, v| if a > v.abs() { a } else { v.abs() })).collect();
            let (measured, magnitude) = Measured::new(DType::Bf16, stack.len(), 1);
            let measured = measured.unwrap();
            for part in [1, 0] {
                assert_eq!((magnitude.exponent(), magnitude.norms()), (None, None), "not known before the end");
                for (m, values) in stack.iter().enumerate().rev() {
                    measured.add(m, &DType::Bf16.encode(&values[part..=part]));
                }
            }
            measured.finish();
            assert_eq!(magnitude.exponent(), weight_exponent(DType::Bf16, &largest), "{stack:?}");
        }
        assert!(Measured::new(DType::F32, 2, 1).0.is_none());
        assert_eq!(Measured::new(DType::F32, 2, 1).1.exponent(), None);
    }

    #[test]
    fn the_norms_of_rows_are_measured_by_matrix() {
        let norms = |dtype: DType, matrices: &[&[f32]], row_values: usize| {
            let (measured, magnitude) = Measured::new(dtype, matrices.len(), row_values);
            let measured = measured.unwrap();
            for (m, values) in matrices.iter().enumerate() {
                // In two parts, and zeros behind them.
                let half = values.len() / row_values / 2 * row_values;
                for part in [&values[..half], &values[half..], &vec![0.0; row_values]] {
                    measured.add(m, &dtype.encode(part));
                }
            }
            measured.finish();
            magnitude.norms().map(|Norms { longest, typical }| (longest, typical))
        };
        for dtype in [DType::F16, DType::Bf16] {
            assert_eq!(norms(dtype, &[&[0.0, 1.0, -3.0, 4.0], &[0.0; 4]], 2), Some((5.0, 13f32.sqrt())));
            // More values than are added side by side.
            assert_eq!(norms(dtype, &[&[0.5; 400]], 100), Some((5.0, 5.0)));
            assert_eq!(norms(dtype, &[&[2.0; 2], &[16.0; 2]], 1), Some((16.0, 2.0)));
            assert_eq!(norms(dtype, &[&[1.0, f32::NAN]], 1), None);
            assert_eq!(norms(dtype, &[&[f32::INFINITY]], 1), None);
            assert_eq!(norms(dtype, &[&[0.0; 4]], 2), None);
        }
        assert_eq!(norms(DType::Bf16, &[&[1e30]], 1), None, "squares leave the range");
        assert_eq!(norms(DType::Bf16, &[&[1e-30], &[1.0]], 1), Some((1.0, 1.0)), "beside others as good as zeros");
        let bytes = |values: &[f32]| DType::F32.encode(values);
        let reach = factor_reach([DType::F32; 2], [&bytes(&[3.0, 4.0]), &bytes(&[6.0, 1.0])], 1, -0.5);
        assert_eq!(reach, 5.0 * 6.0 * 0.5);
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

    #[test]
    fn weights_outside_the_range_of_halves_are_scaled_or_refused() {
        assert_eq!(weight_exponent(DType::Bf16, &[0.1, 3.0, 0.0]), Some(0));
        assert_eq!(weight_exponent(DType::Bf16, &[0.0]), Some(0));
        assert_eq!(weight_exponent(DType::F16, &[6e4]), Some(0));
        assert_eq!(weight_exponent(DType::F32, &[0.1]), None);
        let exponent = weight_exponent(DType::Bf16, &[1e6, 50.0]).unwrap();
        assert!(1e6 * 2f32.powi(exponent) < 32_768.0 && 1e6 * 2f32.powi(exponent) >= 16_384.0);
        assert_eq!(weight_exponent(DType::Bf16, &[1e-6]), Some(34));
        assert_eq!(weight_exponent(DType::Bf16, &[1e6, 1e-3]), None);
        assert_eq!(weight_exponent(DType::Bf16, &[f32::INFINITY]), None);
        assert_eq!(weight_exponent(DType::Bf16, &[1e-38]), None);
    }

    #[test]
    fn only_factors_within_the_range_of_halves_are_folded() {
        let fold = |a: f32, b: f32, scale: f32| {
            let largest = |v: f32| largest_magnitude(DType::Bf16, &DType::Bf16.encode(&[v, -v]));
            factor_folds([a, b].map(largest), 2048, scale)
        };
        assert!(fold(0.05, 0.05, 2.0) && fold(0.0, 0.0, 1.0) && fold(1.0, 4.0, 2.0));
        assert!(!fold(3.0, 0.05, 2.0), "u may exceed f16");
        assert!(!fold(0.05, 4096.0, 2.0), "B exceeds f16");
        assert!(!fold(0.05, 0.05, f32::NAN) && !fold(f32::NAN, 0.05, 1.0) && !fold(0.05, f32::INFINITY, 1.0));
    }

    #[test]
    fn adapters_are_folded_while_they_are_short_beside_a_row() {
        assert!(folds(8, 16, 2048) && folds(8, 16, 768) && folds(64, 16, 2048) && folds(0, 0, 8) && folds(1, 8, 24));
        assert!(!folds(8, 128, 768) && !folds(1, 8, 8));
    }

    #[test]
    fn factors_come_to_the_upper_end_of_halves() {
        let of = |dtype: DType, values: &[f32]| factor_exponent(largest_magnitude(dtype, &dtype.encode(values)));
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for value in [0.02f32, 1.0, 300.0] {
                let exponent = of(dtype, &[0.0, -value, value / 3.0]);
                let most = value * f32::from(exponent).exp2();
                assert!((8_000.0..17_000.0).contains(&most), "{dtype:?} {value}: {most}");
            }
        }
        assert!(of(DType::F32, &[1e30]) < -80);
        assert_eq!(of(DType::F32, &[0.0]), 120);
    }
}
