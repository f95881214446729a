//! The matrix tier: what a device needs for it, how its products are cut, and which weights it can take.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crate::dtype::DType;

/// Rows, columns and depth of the cooperative matrices that the shaders are written for: f16 operands, f32 sums.
pub const EDGE: u32 = 16;

/// Subgroup sizes that the cuts below are made for.
const WIDTHS: [u32; 1] = [32];

/// Workgroup memory that the largest product needs, in bytes.
pub const WORKGROUP_BYTES: u32 = 48 << 10;

/// Whether lanes can be laid out: by the size of a subgroup, which is fixed.
pub fn takes_subgroups(min: u32, max: u32) -> bool {
    min == max && WIDTHS.contains(&min)
}

/// Whether an adapter can run this tier: subgroups of one size, f16, and matrices of our edge with our types.
pub fn offered(
    info: &wgpu::AdapterInfo,
    features: &wgpu::Features,
    limits: &wgpu::Limits,
    listed: &[wgpu::CooperativeMatrixProperties],
) -> bool {
    use wgpu::CooperativeScalarType::{F16, F32};
    let needed = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX | wgpu::Features::SHADER_F16;
    // WGSL has square matrices only.
    features.contains(needed)
        && takes_subgroups(info.subgroup_min_size, info.subgroup_max_size)
        && limits.max_compute_workgroup_storage_size >= WORKGROUP_BYTES
        && listed.iter().any(|m| [m.m_size, m.n_size, m.k_size] == [EDGE; 3] && m.ab_type == F16 && m.cr_type == F32)
}

/// How a workgroup of a matrix product works: its tile of `height` pairs and `columns` columns, walked along the depth in
/// steps; and the part of the tile that one subgroup holds in registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixTile {
    /// Pairs.
    pub height: u32,
    /// Columns of y.
    pub columns: u32,
    /// Values of a row in one step.
    pub depth: u32,
    /// Steps that are loaded ahead, an even number.
    pub ahead: u32,
    /// Rows of a subgroup.
    pub sub_rows: u32,
    /// Columns of a subgroup.
    pub sub_columns: u32,
}

/// Every cut, by height, from a search on an H200: many loads on the way matter most (see `docs/PERFORMANCE.md`).
pub const TILES: [MatrixTile; 4] = [
    MatrixTile { height: 16, columns: 32, depth: 64, ahead: 4, sub_rows: 16, sub_columns: 16 },
    MatrixTile { height: 32, columns: 64, depth: 32, ahead: 8, sub_rows: 16, sub_columns: 32 },
    MatrixTile { height: 64, columns: 128, depth: 32, ahead: 4, sub_rows: 32, sub_columns: 32 },
    MatrixTile { height: 128, columns: 128, depth: 32, ahead: 4, sub_rows: 64, sub_columns: 32 },
];

impl MatrixTile {
    /// The cut of tiles of `height` pairs.
    pub fn of(height: usize) -> Option<Self> {
        TILES.into_iter().find(|t| t.height as usize == height)
    }

    /// Subgroups of a workgroup.
    pub fn subgroups(&self) -> u32 {
        (self.height / self.sub_rows) * (self.columns / self.sub_columns)
    }

    /// Columns of the strip of 16 rows through which a subgroup writes its sums: 32, or 16 where memory is short.
    pub fn strip(&self) -> u32 {
        let fits = self.operand_bytes() + self.subgroups() * 16 * 32 * 4 <= WORKGROUP_BYTES;
        if fits && self.sub_columns >= 32 { 32 } else { 16 }
    }

    /// Two steps of both operands, rows longer by eight halves.
    fn operand_bytes(&self) -> u32 {
        2 * (self.height + self.columns) * (self.depth + 8) * 2
    }

    /// Workgroup memory in bytes.
    pub fn workgroup_bytes(&self) -> u32 {
        self.operand_bytes() + self.subgroups() * 16 * self.strip() * 4
    }
}

/// Tile height for `pairs` spread over `matrices` on the matrix tier, or `None` for one pair at a time.
pub fn tile(pairs: usize, matrices: usize) -> Option<usize> {
    let matrices = matrices.max(1);
    match pairs {
        n if n < 2 * matrices => None,
        n if n < 12 * matrices => Some(16),
        n if n < 24 * matrices => Some(32),
        n if n < 96 * matrices => Some(64),
        _ => Some(128),
    }
}

/// Tile height of a dense product of `rows` rows with `columns` columns, or `None` for few rows: the highest tile that
/// still makes enough workgroups.
pub fn dense(rows: usize, columns: usize) -> Option<usize> {
    if rows <= 8 {
        return None;
    }
    let workgroups = |t: &MatrixTile| rows.div_ceil(t.height as usize) * columns.div_ceil(t.columns as usize);
    let enough = |t: &&MatrixTile| t.height as usize <= rows && workgroups(t) >= ENOUGH_WORKGROUPS;
    Some(TILES.iter().rev().find(enough).unwrap_or(&TILES[0]).height as usize)
}

/// Workgroups that keep a large GPU busy.
const ENOUGH_WORKGROUPS: usize = 128;

/// The largest magnitude in a block of weights, where [`weight_exponent`] asks for it.
pub fn largest(dtype: DType, bytes: &[u8]) -> f32 {
    if dtype != DType::Bf16 {
        return 0.0;
    }
    // Magnitudes order like their bits.
    let most = bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]) & 0x7fff).max().unwrap_or(0);
    f32::from_bits(u32::from(most) << 16)
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

/// The [`weight_exponent`] of a stack, which is known once all of its weights have been read; its copies learn it, too.
#[derive(Debug, Clone, Default)]
pub struct Exponent(Arc<OnceLock<Option<i32>>>);

impl Exponent {
    /// One that is known.
    pub fn known(exponent: Option<i32>) -> Self {
        Self(Arc::new(OnceLock::from(exponent)))
    }

    /// `None` also as long as it is not known: f32 arithmetic is right for all weights.
    pub fn get(&self) -> Option<i32> {
        self.0.get().copied().flatten()
    }
}

/// The largest magnitudes of a stack whose weights are read in parts, in any order and by several threads.
#[derive(Debug)]
pub struct Measured {
    dtype: DType,
    /// One for each matrix, as bits of f32: magnitudes order like them, and what is no number is above all numbers.
    largest: Box<[AtomicU32]>,
    exponent: Exponent,
}

impl Measured {
    /// For `count` matrices of weights whose exponent depends on them; `None`, with what is known, for others.
    pub fn new(dtype: DType, count: usize) -> (Option<Self>, Exponent) {
        if dtype != DType::Bf16 {
            return (None, Exponent::known(weight_exponent(dtype, &[])));
        }
        let exponent = Exponent::default();
        let largest = (0..count).map(|_| AtomicU32::new(0)).collect();
        (Some(Self { dtype, largest, exponent: exponent.clone() }), exponent)
    }

    /// Takes a part of matrix `m`, zeros between rows included.
    pub fn add(&self, m: usize, bytes: &[u8]) {
        self.largest[m].fetch_max(largest(self.dtype, bytes).to_bits(), Ordering::Relaxed);
    }

    /// All parts have been added, by threads that have ended or handed over what they read.
    pub fn finish(&self) {
        let largest: Vec<f32> = self.largest.iter().map(|v| f32::from_bits(v.load(Ordering::Relaxed))).collect();
        // Set once: an uploader runs once.
        let _ = self.exponent.0.set(weight_exponent(self.dtype, &largest));
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
            let (measured, exponent) = Measured::new(DType::Bf16, stack.len());
            let measured = measured.unwrap();
            for part in [1, 0] {
                assert_eq!(exponent.get(), None, "not known before the end");
                for (m, values) in stack.iter().enumerate().rev() {
                    measured.add(m, &DType::Bf16.encode(&values[part..=part]));
                }
            }
            measured.finish();
            assert_eq!(exponent.get(), weight_exponent(DType::Bf16, &largest), "{stack:?}");
        }
        assert_eq!(Measured::new(DType::F16, 2).1.get(), Some(0));
        assert_eq!(Measured::new(DType::F32, 2).1.get(), None);
    }

    #[test]
    fn every_cut_divides_evenly_and_fits() {
        for t in TILES {
            for lanes in WIDTHS.map(|width| width * t.subgroups()) {
                assert!(lanes <= 256, "{t:?}");
                assert_eq!((t.height * t.depth / 4) % lanes, 0, "{t:?}: x");
                assert_eq!((t.columns * t.depth / 8) % lanes, 0, "{t:?}: w");
                assert_eq!(lanes % (t.depth / 4), 0, "{t:?}: one part of x a lane");
            }
            assert!(t.sub_rows % EDGE == 0 && t.sub_columns % EDGE == 0 && t.depth % EDGE == 0, "{t:?}");
            assert_eq!(t.ahead % 2, 0, "{t:?}: halves of workgroup memory alternate");
            assert!(t.workgroup_bytes() <= WORKGROUP_BYTES, "{t:?}: {}", t.workgroup_bytes());
        }
    }

    #[test]
    fn tiles_grow_with_the_pairs_of_a_matrix() {
        assert_eq!(tile(0, 16), None);
        assert_eq!(tile(32, 16), Some(16));
        assert_eq!(tile(16 * 200, 16), Some(128));
        assert!((0..1 << 14).filter_map(|n| tile(n, 16)).all(|h| MatrixTile::of(h).is_some()));
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
}
