//! The matrix tier: what a device needs for it, how its products are cut, and which weights it can take.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crate::dtype::DType;
use crate::plan::capabilities::Capabilities;

/// Rows, columns and depth of the blocks that the shaders are written for: f16 operands, f32 sums. A device whose cooperative
/// matrices are smaller multiplies several for each block ([`Capabilities::edge`]).
pub const EDGE: u32 = 16;

/// Edges of the cooperative matrices that a block can be made of, the better first, and the workgroup memory that the largest
/// cut of a device with them needs, in bytes: devices whose matrices are small have less of it.
pub const EDGES: [(u32, u32); 2] = [(EDGE, WORKGROUP_BYTES), (8, 32 << 10)];

/// Subgroup sizes that the cuts below are made for.
const WIDTHS: [u32; 1] = [32];

/// Workgroup memory that the largest product on matrices of [`EDGE`] needs, in bytes.
pub const WORKGROUP_BYTES: u32 = 48 << 10;

/// Features that a device of this tier has beside subgroups.
pub const FEATURES: wgpu::Features = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::SUBGROUP_BARRIER);

/// Whether lanes can be laid out: by the size of a subgroup, which is fixed.
pub fn takes_subgroups(min: u32, max: u32) -> bool {
    min == max && WIDTHS.contains(&min)
}

/// Whether the back end does not tell the size of subgroups: wgpu 30 says of every Metal device that it is between 4 and 64,
/// which is so of no device. Such a device is asked once it is open ([`MatrixProbe`](crate::kernels::matrix_probe)).
pub fn asks_subgroups(backend: wgpu::Backend) -> bool {
    backend == wgpu::Backend::Metal
}

/// Whether an adapter can run this tier, and with matrices of which edge: f16, subgroups of one size or of one to be asked for,
/// and matrices with our types in its list.
pub fn offered(
    info: &wgpu::AdapterInfo,
    features: &wgpu::Features,
    limits: &wgpu::Limits,
    listed: &[wgpu::CooperativeMatrixProperties],
) -> Option<u32> {
    use wgpu::CooperativeScalarType::{F16, F32};
    let subgroups = takes_subgroups(info.subgroup_min_size, info.subgroup_max_size) || asks_subgroups(info.backend);
    if !features.contains(FEATURES) || !subgroups {
        return None;
    }
    // WGSL has square matrices only.
    let lists = |edge: u32| {
        let ours = |m: &wgpu::CooperativeMatrixProperties| {
            [m.m_size, m.n_size, m.k_size] == [edge; 3] && m.ab_type == F16 && m.cr_type == F32
        };
        listed.iter().any(ours)
    };
    let fits = |bytes: u32| limits.max_compute_workgroup_storage_size >= bytes;
    EDGES
        .into_iter()
        .find(|(edge, bytes)| takes_edge(info.backend, *edge) && lists(*edge) && fits(*bytes))
        .map(|(edge, _)| edge)
}

/// Whether the back end takes the shaders for matrices of this edge. Those of 8 have structs in workgroup memory, for Metal's sake, to
/// which naga 30 gives a layout that Vulkan forbids there.
pub fn takes_edge(backend: wgpu::Backend, edge: u32) -> bool {
    (edge == EDGE) != (backend == wgpu::Backend::Metal)
}

/// Workgroup memory that the largest cut for matrices of this edge needs, in bytes.
pub fn workgroup_bytes(edge: u32) -> u32 {
    EDGES.into_iter().find(|of| of.0 == edge).map_or(WORKGROUP_BYTES, |of| of.1)
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
    /// Steps that weights are loaded ahead.
    pub ahead: u32,
    /// Steps that x is loaded ahead: as many, or one, since it is nearer; registers are short in high tiles. Of a direct cut
    /// blocks of 16 values.
    pub x_ahead: u32,
    /// Rows of a subgroup.
    pub sub_rows: u32,
    /// Columns of a subgroup.
    pub sub_columns: u32,
    /// Subgroups whose rows are all padding do not multiply. A branch keeps loads and products apart, for better or worse.
    pub rests: bool,
    /// What is still held behind the last step is stored, unread, so that a compiler leaves loads ahead of their use. Not of high tiles:
    /// they lack the registers, and compilers do not unroll their loops.
    pub kept: bool,
    /// Rows of x come in blocks that go straight from memory into matrices; only weights pass through workgroup memory, one step
    /// ahead.
    pub direct: bool,
}

/// A cut; its fields in order.
const fn cut(height: u32, columns: u32, depth: u32, ahead: u32, sub_rows: u32, sub_columns: u32) -> MatrixTile {
    MatrixTile {
        height,
        columns,
        depth,
        ahead,
        x_ahead: ahead,
        sub_rows,
        sub_columns,
        rests: true,
        kept: false,
        direct: false,
    }
}

/// The cut of many rows, of which x goes straight into matrices.
const DIRECT: MatrixTile = MatrixTile { direct: true, rests: false, x_ahead: 4, ..cut(128, 128, 64, 1, 32, 128) };

/// The lowest cuts, which dense products share.
const LOW: [MatrixTile; 2] =
    [MatrixTile { kept: true, ..cut(16, 64, 64, 2, 16, 16) }, MatrixTile { kept: true, ..cut(32, 64, 64, 2, 16, 32) }];

/// Every cut of tiles of pairs, by height and the direct one last, from a search on an H200: little workgroup memory, and a height
/// that holds the pairs of a matrix at once, matter most (see `docs/PERFORMANCE.md`).
pub const TILES: [MatrixTile; 6] = [
    LOW[0],
    LOW[1],
    MatrixTile { kept: true, ..cut(48, 64, 64, 2, 48, 16) },
    MatrixTile { x_ahead: 1, rests: false, ..cut(80, 256, 64, 2, 80, 32) },
    MatrixTile { x_ahead: 1, rests: false, ..cut(144, 128, 64, 2, 48, 64) },
    DIRECT,
];

/// The same for dense products, which need workgroup memory for their sums.
pub const DENSE_TILES: [MatrixTile; 5] =
    [LOW[0], LOW[1], cut(64, 128, 64, 2, 32, 32), cut(128, 128, 64, 2, 64, 32), DIRECT];

/// The cuts of [`TILES`] for matrices of 8: of the same heights, and of columns that 32 KiB of workgroup memory hold. Not measured.
const NARROW_TILES: [MatrixTile; 6] = [
    LOW[0],
    LOW[1],
    TILES[2],
    MatrixTile { columns: 128, ..TILES[3] },
    MatrixTile { columns: 64, sub_columns: 32, ..TILES[4] },
    NARROW_DIRECT,
];

/// Half the columns, and half the sums of a subgroup.
const NARROW_DIRECT: MatrixTile = MatrixTile { columns: 64, sub_columns: 64, ..DIRECT };

/// The same for dense products.
const NARROW_DENSE_TILES: [MatrixTile; 4] = [LOW[0], LOW[1], cut(64, 64, 64, 2, 32, 32), NARROW_DIRECT];

/// Every cut of tiles of pairs on a device, of the heights of [`TILES`].
pub fn tiles(caps: &Capabilities) -> &'static [MatrixTile; 6] {
    if caps.edge == EDGE { &TILES } else { &NARROW_TILES }
}

/// Every cut of dense products on a device.
pub fn dense_tiles(caps: &Capabilities) -> &'static [MatrixTile] {
    if caps.edge == EDGE { &DENSE_TILES } else { &NARROW_DENSE_TILES }
}

impl MatrixTile {
    /// The cut of tiles of `height` pairs.
    pub fn of(caps: &Capabilities, height: usize) -> Option<Self> {
        tiles(caps).iter().find(|t| t.height as usize == height).copied()
    }

    /// The same where it is the direct one.
    pub fn direct_of(caps: &Capabilities, height: usize) -> Option<Self> {
        Self::of(caps, height).filter(|cut| cut.direct)
    }

    /// Subgroups of a workgroup.
    pub fn subgroups(&self) -> u32 {
        (self.height / self.sub_rows) * (self.columns / self.sub_columns)
    }

    /// Columns of the strip of 16 rows through which a subgroup of a dense product writes its sums: 32, or 16 where memory
    /// is short.
    pub fn strip(&self) -> u32 {
        if self.direct {
            return EDGE;
        }
        let fits = self.workgroup_bytes() + self.subgroups() * 16 * 32 * 4 <= WORKGROUP_BYTES;
        if fits && self.sub_columns >= 32 { 32 } else { 16 }
    }

    /// Workgroup memory of a step of both operands in bytes, rows longer by eight halves.
    pub fn workgroup_bytes(&self) -> u32 {
        let rows = if self.direct { self.columns } else { self.height + self.columns };
        rows * (self.depth + 8) * 2
    }

    /// The same and the strips of a dense product.
    pub fn dense_workgroup_bytes(&self) -> u32 {
        self.workgroup_bytes() + self.subgroups() * 16 * self.strip() * 4
    }

    /// What adding adapters takes beside: a word a row, and 16 bytes a subgroup.
    pub fn folded_workgroup_bytes(&self) -> u32 {
        self.height * 4 + self.subgroups() * 16
    }

    /// Blocks of 16 values in a row of x of a direct cut, padded to whole steps.
    pub fn blocks(&self, width: usize) -> usize {
        width.next_multiple_of(self.depth as usize) / EDGE as usize
    }
}

/// Tile height for `pairs` spread over `matrices` on the matrix tier, or `None` for one pair at a time: the lowest one that
/// holds the pairs of a matrix, two standard deviations of random routing more than their mean. Two tiles of one matrix read
/// it twice. Where the mean alone fills more than one tile, that of the direct cut.
pub fn tile(caps: &Capabilities, pairs: usize, matrices: usize) -> Option<usize> {
    let mean = pairs as f64 / matrices.max(1) as f64;
    if mean < caps.tuning.tiles_from {
        return None;
    }
    let most = mean + 2.0 * mean.sqrt();
    let [staged @ .., direct] = TILES;
    let [.., highest] = staged;
    if mean > f64::from(highest.height) {
        return Some(direct.height as usize);
    }
    Some(staged.iter().find(|t| f64::from(t.height) >= most).unwrap_or(&highest).height as usize)
}

/// The next lower tile through workgroup memory.
pub fn lower(height: usize) -> Option<usize> {
    TILES.iter().rev().filter(|t| !t.direct).map(|t| t.height as usize).find(|h| *h < height)
}

/// The cut of a dense product of `rows` rows with `columns` columns, or `None` for few rows: the highest tile that still
/// makes enough workgroups. With `staged` it is not the direct one, which needs x as blocks and each value once.
pub fn dense(caps: &Capabilities, rows: usize, columns: usize, staged: bool) -> Option<MatrixTile> {
    cut_of(caps, rows, columns, |tile, workgroups| {
        !(staged && tile.direct) && workgroups >= caps.tuning.matrix_workgroups
    })
}

/// Parts of the depth of a dense product whose reader adds them up: of few rows or columns, few workgroups that each walk all of the
/// depth would wait for one load after another.
pub const DEPTH_PARTS: usize = 8;

/// The cut of a dense product in [`DEPTH_PARTS`] parts of its depth.
pub fn parted(caps: &Capabilities, rows: usize, columns: usize) -> Option<MatrixTile> {
    cut_of(caps, rows, columns, |tile, workgroups| {
        !tile.direct && workgroups * DEPTH_PARTS >= caps.tuning.matrix_workgroups
    })
}

/// Whether a dense product should come in such parts: where the tile that would make enough workgroups is lower than one that reads the
/// weights once, and the depth has a few steps for each part.
pub fn parts(caps: &Capabilities, rows: usize, columns: usize, depth: usize) -> bool {
    let [whole, part] = [dense(caps, rows, columns, false), parted(caps, rows, columns)];
    let higher = |whole: MatrixTile, part: MatrixTile| part.height > whole.height || (whole.height as usize) < rows;
    whole.zip(part).is_some_and(|(whole, part)| !whole.direct && higher(whole, part))
        && rows <= MOST_PARTED_ROWS
        && depth >= 2 * DEPTH_PARTS * dense_tiles(caps)[0].depth as usize
}

/// Rows of products in parts: of more, writing the parts and reading them again would cost what they save.
const MOST_PARTED_ROWS: usize = 256;

/// The highest tile for a dense product that is `enough`, given how many workgroups it makes; the lowest if none is.
fn cut_of(
    caps: &Capabilities,
    rows: usize,
    columns: usize,
    enough: impl Fn(&MatrixTile, usize) -> bool,
) -> Option<MatrixTile> {
    let workgroups = |t: &MatrixTile| rows.div_ceil(t.height as usize) * columns.div_ceil(t.columns as usize);
    let tiles = dense_tiles(caps);
    let fits = |t: &&MatrixTile| t.height as usize <= rows && enough(t, workgroups(t));
    (rows > 8).then(|| *tiles.iter().rev().find(fits).unwrap_or(&tiles[0]))
}

/// Whether a product of `rows` rows that must be as exact as f32 arithmetic runs faster on matrices, which then multiply twice.
pub fn exact(caps: &Capabilities, rows: usize) -> bool {
    rows >= caps.tuning.exact_matrix_rows
}

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
    use crate::plan::classes::classes;
    use crate::plan::tuning::Tuning;

    #[test]
    fn a_device_has_the_tier_by_its_own_list() {
        use wgpu::{Backend, CooperativeScalarType::F16, CooperativeScalarType::F32};
        let listed = |edge: u32, cr_type| wgpu::CooperativeMatrixProperties {
            m_size: edge,
            n_size: edge,
            k_size: edge,
            ab_type: F16,
            cr_type,
            saturating_accumulation: false,
        };
        let offered = |backend, (subgroup_min_size, subgroup_max_size), bytes, list: &[(u32, _)]| {
            let info = wgpu::AdapterInfo {
                subgroup_min_size,
                subgroup_max_size,
                ..wgpu::AdapterInfo::new(wgpu::DeviceType::DiscreteGpu, backend)
            };
            let limits = wgpu::Limits { max_compute_workgroup_storage_size: bytes, ..wgpu::Limits::defaults() };
            let list: Vec<_> = list.iter().map(|(edge, sums)| listed(*edge, *sums)).collect();
            super::offered(&info, &FEATURES, &limits, &list)
        };
        let fixed = |bytes, list: &[(u32, _)]| offered(Backend::Vulkan, (32, 32), bytes, list);
        assert_eq!(fixed(48 << 10, &[(16, F32), (8, F32)]), Some(16));
        assert_eq!(fixed(32 << 10, &[(16, F32)]), None, "the cuts for 16 do not fit");
        assert_eq!(fixed(48 << 10, &[(8, F32)]), None, "Vulkan does not take the shaders for 8");
        let metal = |bytes, list: &[(u32, _)]| offered(Backend::Metal, (4, 64), bytes, list);
        assert_eq!(metal(32 << 10, &[(8, F16), (8, F32)]), Some(8));
        assert_eq!(metal(48 << 10, &[(16, F32)]), None, "there is no such matrix in Metal");
        assert_eq!(metal(16 << 10, &[(8, F32)]), None);
        assert_eq!(fixed(48 << 10, &[(16, F16), (8, F16)]), None, "sums of f16");
        assert_eq!(offered(Backend::Vulkan, (32, 64), 64 << 10, &[(16, F32)]), None);
        assert_eq!(offered(Backend::Metal, (4, 64), 32 << 10, &[(8, F32)]), Some(8), "it will be asked");
        assert_eq!(offered(Backend::Metal, (4, 64), 32 << 10, &[]), None);
    }

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

    /// Cuts for both edges, each with the workgroup memory that it may take.
    fn with_room(
        of_16: impl IntoIterator<Item = MatrixTile>,
        of_8: impl IntoIterator<Item = MatrixTile>,
    ) -> impl Iterator<Item = (MatrixTile, u32)> {
        let [room_16, room_8] = EDGES.map(|(_, bytes)| bytes);
        of_16.into_iter().map(move |t| (t, room_16)).chain(of_8.into_iter().map(move |t| (t, room_8)))
    }

    #[test]
    fn every_cut_divides_evenly_and_fits() {
        for (t, room) in with_room(TILES, NARROW_TILES).chain(with_room(DENSE_TILES, NARROW_DENSE_TILES)) {
            for lanes in WIDTHS.map(|width| width * t.subgroups()) {
                assert!(lanes <= 256, "{t:?}");
                assert_eq!(lanes % (t.depth / 8), 0, "{t:?}: one part of a row a lane");
                let round = if t.direct { t.depth / EDGE } else { t.ahead };
                assert_eq!(round % t.x_ahead, 0, "{t:?}: registers go round");
                assert!(!t.direct || t.columns % (lanes / (t.depth / 8)) == 0, "{t:?}: a column of W for every lane");
            }
            assert!(t.height % t.sub_rows == 0 && t.columns % t.sub_columns == 0, "{t:?}");
            assert!(t.sub_rows % EDGE == 0 && t.sub_columns % EDGE == 0 && t.depth % EDGE == 0, "{t:?}");
            let bytes = t.workgroup_bytes() + t.folded_workgroup_bytes();
            assert!(bytes <= room, "{t:?}: {bytes}");
        }
        for (t, room) in with_room(DENSE_TILES, NARROW_DENSE_TILES) {
            assert_eq!(t.sub_columns % t.strip(), 0, "{t:?}");
            let bytes = t.dense_workgroup_bytes() + t.folded_workgroup_bytes();
            assert!(bytes <= room, "{t:?}: {bytes}");
        }
        // A height is all that an alignment knows of a cut.
        assert_eq!(NARROW_TILES.map(|t| (t.height, t.direct)), TILES.map(|t| (t.height, t.direct)));
    }

    fn device() -> Capabilities {
        classes().into_iter().find(|caps| caps.matrix).unwrap()
    }

    #[test]
    fn thresholds_are_those_of_the_tuning() {
        let own = device();
        let height = |caps: &Capabilities, rows| dense(caps, rows, 2048, false).map(|t| t.height);
        assert_eq!([8, 9, 128, 2048].map(|rows| height(&own, rows)), [None, Some(16), Some(32), Some(128)]);
        assert_eq!([383, 384].map(|rows| exact(&own, rows)), [false, true]);
        let tuning = Tuning { tiles_from: 0.5, matrix_workgroups: 1, exact_matrix_rows: 9, ..own.tuning };
        let caps = Capabilities { tuning, ..own };
        assert_eq!([8, 9, 128, 2048].map(|rows| height(&caps, rows)), [None, Some(16), Some(128), Some(128)]);
        assert_eq!([8, 9].map(|rows| exact(&caps, rows)), [false, true]);
        assert_eq!([7, 8].map(|pairs| tile(&caps, pairs, 16)), [None, Some(16)]);
    }

    #[test]
    fn tiles_grow_with_the_pairs_of_a_matrix() {
        let caps = device();
        let tile = |pairs| tile(&caps, pairs, 16);
        assert_eq!([0, 31, 32, 16 * 64, 16 * 128].map(tile), [None, None, Some(16), Some(80), Some(144)]);
        assert_eq!([16 * 144, 16 * 145].map(tile), [Some(144), Some(128)], "the direct cut");
        assert!((0..1 << 14).filter_map(tile).all(|h| MatrixTile::of(&caps, h).is_some()));
        assert_eq!([144, 128, 80].map(lower), [Some(80), Some(80), Some(48)]);
        assert_eq!(lower(16), None);
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
