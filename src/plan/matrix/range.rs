//! Which values the matrix tier takes as f16, and the powers of two that bring them there.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::EDGE;
use super::bound::{Norms, larger, row_squares};
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
            assert_eq!(norms(dtype, &[&[f32::NAN, 1.0, 1.0, 1.0]], 1), None);
            assert_eq!(norms(dtype, &[&[f32::INFINITY]], 1), None);
            assert_eq!(norms(dtype, &[&[0.0; 4]], 2), None);
        }
        assert_eq!(norms(DType::Bf16, &[&[1e30]], 1), None, "squares leave the range");
        assert_eq!(norms(DType::Bf16, &[&[1e-30], &[1.0]], 1), Some((1.0, 1.0)), "beside others as good as zeros");
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
