//! How products on matrices are cut, and which cut a product takes.

use super::{EDGE, WORKGROUP_BYTES};
use crate::plan::capabilities::Capabilities;

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

    /// Workgroups of a dense product.
    fn workgroups(&self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.height as usize) * columns.div_ceil(self.columns as usize)
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

/// Whether a dense product should come in such parts: where no tile reads the weights once and makes enough workgroups, and the depth
/// has a few steps for each part.
pub fn parts(caps: &Capabilities, rows: usize, columns: usize, depth: usize) -> bool {
    let Some(whole) = dense(caps, rows, columns, false) else { return false };
    let once = whole.height as usize >= rows && whole.workgroups(rows, columns) >= caps.tuning.matrix_workgroups;
    let steps = depth / dense_tiles(caps)[0].depth as usize;
    !once && !whole.direct && rows <= MOST_PARTED_ROWS && steps >= 2 * DEPTH_PARTS
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
    let tiles = dense_tiles(caps);
    let fits = |t: &&MatrixTile| t.height as usize <= rows && enough(t, t.workgroups(rows, columns));
    (rows > 8).then(|| *tiles.iter().rev().find(fits).unwrap_or(&tiles[0]))
}

/// Whether a product of `rows` rows that must be as exact as f32 arithmetic runs faster on matrices, which then multiply twice.
pub fn exact(caps: &Capabilities, rows: usize) -> bool {
    rows >= caps.tuning.exact_matrix_rows
}

#[cfg(test)]
mod tests {
    use super::super::{EDGES, WIDTHS};
    use super::*;
    use crate::plan::classes::classes;
    use crate::plan::tuning::Tuning;

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
    fn few_rows_share_out_a_depth_of_many_steps() {
        let own = device();
        // Too few workgroups; enough, but of tiles that read the weights four times; enough of one that reads them once.
        assert_eq!([(16, 2048), (64, 2048), (64, 16_384)].map(|(r, n)| parts(&own, r, n, 4096)), [true, true, false]);
        assert_eq!([8, 9, 256, 257].map(|rows| parts(&own, rows, 2048, 4096)), [false, true, true, false]);
        assert_eq!([1023, 1024].map(|depth| parts(&own, 64, 2048, depth)), [false, true]);
        let height = |rows| parted(&own, rows, 2048).map(|t| t.height);
        assert_eq!([8, 16, 32, 64].map(height), [None, Some(16), Some(32), Some(64)]);
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
}
