//! How the rows of a step are shared out over the ways to compute attention: rows of a prompt in tiles on cooperative
//! matrices, single rows with their context split over workgroups.

use crate::kernels::rope::AttentionShape;
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::EDGE;

/// How a workgroup of the matrix kernel works: each subgroup owns 16 rows of queries, and keys and values come in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionCut {
    /// Subgroups of a workgroup.
    pub subgroups: u32,
    /// Positions of a block.
    pub positions: u32,
    /// Columns of scores that pass through workgroup memory at once.
    pub strip: u32,
}

/// The cut for matrices of 16, from a search on an H200 (see `docs/EXPERIMENTS.md`).
pub const CUT: AttentionCut = AttentionCut { subgroups: 8, positions: 32, strip: 32 };

/// The cut for matrices of 8, which 32 KiB of workgroup memory hold. Not measured.
const NARROW_CUT: AttentionCut = AttentionCut { subgroups: 4, ..CUT };

/// The cut in use on a device.
pub fn cut(caps: &Capabilities) -> AttentionCut {
    if caps.edge == EDGE { CUT } else { NARROW_CUT }
}

/// Widths of a head that the matrix kernel takes.
pub const MATRIX_WIDTHS: [usize; 2] = [64, 128];

/// Columns of weights that pass through workgroup memory at once.
pub const WEIGHT_COLUMNS: u32 = 32;

impl AttentionCut {
    /// Rows of queries of a workgroup: rows of the step times query heads that share keys.
    pub fn height(&self) -> usize {
        (self.subgroups * EDGE) as usize
    }

    /// Workgroup memory in bytes: a block of keys and one of values, rows longer by eight halves; scores and weights.
    pub fn workgroup_bytes(&self, head_dim: u32) -> u32 {
        let operands = 2 * self.positions * (head_dim + 8) * 2;
        let scores = self.subgroups * EDGE * (self.strip + 8) * 4;
        operands + scores + self.subgroups * EDGE * (WEIGHT_COLUMNS + 8) * 2
    }

    /// Bytes of one packed block of one key head: keys, values and their exponents.
    pub fn block_bytes(&self, head_dim: usize) -> usize {
        2 * self.positions as usize * head_dim * 2 + 16
    }
}

/// Fewest rows of a sequence that are worth a tile.
const TILE_ROWS: usize = 16;
/// Most bytes of packed keys and values; sequences past it are read row by row.
const PACK_BYTES: usize = 256 << 20;
/// Workgroups that keep a large GPU busy with loads.
const WORKGROUPS: usize = 256;
/// Most splits of a context.
pub const SPLITS: usize = 64;
/// Fewest positions of a split.
const SPLIT_POSITIONS: usize = 16;

/// The rows of one step. Every layer does the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionWork {
    /// i32 `[packs + tiles + singles, 4]`. Packs: sequence, first position, end of the positions in the cache, 0.
    /// Tiles: first row, rows, position of the first, first pack. Singles: row, position, sequence, 0.
    pub table: Vec<[i32; 4]>,
    /// Blocks of keys and values that are packed for the tiles.
    pub packs: usize,
    /// Tiles on cooperative matrices.
    pub tiles: usize,
    /// Rows on their own.
    pub singles: usize,
    /// How tiles are worked on.
    pub cut: AttentionCut,
    /// Positions of a split.
    pub chunk: usize,
    /// Splits of the longest single row; 1 needs no second dispatch.
    pub splits: usize,
}

/// Query heads of a workgroup of the split kernel: those that share keys, or a part of them.
pub fn split_heads(shape: &AttentionShape) -> usize {
    let group = shape.heads / shape.kv_heads;
    let most = if shape.head_dim <= 128 { 8 } else { 4 };
    (1..=most.min(group)).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1)
}

impl AttentionWork {
    /// Shares out `rows`: token, position, sequence, slot. Where attention is not split there is nothing to share out.
    pub fn new(caps: &Capabilities, shape: &AttentionShape, rows: &[[i32; 4]]) -> Self {
        Self::with_cut(caps, shape, rows, cut(caps), WORKGROUPS)
    }

    /// The same with another cut of the tiles and another number of workgroups: for measurements.
    #[doc(hidden)]
    pub fn with_cut(
        caps: &Capabilities,
        shape: &AttentionShape,
        rows: &[[i32; 4]],
        cut: AttentionCut,
        workgroups: usize,
    ) -> Self {
        if !caps.split_attention {
            let table = Vec::new();
            return Self { table, packs: 0, tiles: 0, singles: 0, cut, chunk: SPLIT_POSITIONS, splits: 1 };
        }
        let group = shape.heads / shape.kv_heads;
        let height = cut.height() / group;
        let matrix = caps.matrix && MATRIX_WIDTHS.contains(&shape.head_dim) && height > 0;
        let positions = cut.positions as usize;
        let room = PACK_BYTES.min(caps.max_binding_bytes as usize) / (cut.block_bytes(shape.head_dim) * shape.kv_heads);
        let (mut packs, mut tiles, mut singles) = (Vec::new(), Vec::new(), Vec::new());
        let mut longest = 0;
        let mut begin = 0;
        while begin < rows.len() {
            let [_, position, sequence, _] = rows[begin];
            let follows = |i: usize| rows[i][2] == sequence && rows[i][1] == position + (i - begin) as i32;
            let end = (begin + 1..rows.len()).find(|i| !follows(*i)).unwrap_or(rows.len());
            let last = position + (end - begin) as i32;
            let blocks = (last as usize).div_ceil(positions);
            if matrix && end - begin >= TILE_ROWS && packs.len() + blocks <= room {
                let first_pack = packs.len() as i32;
                packs.extend((0..blocks).map(|b| [sequence, (b * positions) as i32, last, 0]));
                tiles.extend((begin..end).step_by(height).map(|row| {
                    let first_position = position + (row - begin) as i32;
                    [row as i32, height.min(end - row) as i32, first_position, first_pack]
                }));
            } else {
                singles.extend((begin..end).map(|row| [row as i32, rows[row][1], sequence, 0]));
                longest = longest.max(last as usize);
            }
            begin = end;
        }
        // The longest first, so that no long one is left for the end.
        tiles.sort_by_key(|t| std::cmp::Reverse(t[2]));
        let per_row = shape.heads / split_heads(shape);
        let splits = (workgroups / (singles.len() * per_row).max(1)).clamp(1, SPLITS);
        let chunk = longest.div_ceil(splits).next_multiple_of(EDGE as usize).max(SPLIT_POSITIONS);
        let splits = longest.div_ceil(chunk).max(1);
        let (n_packs, n_tiles, n_singles) = (packs.len(), tiles.len(), singles.len());
        let mut table = packs;
        table.append(&mut tiles);
        table.append(&mut singles);
        Self { table, packs: n_packs, tiles: n_tiles, singles: n_singles, cut, chunk, splits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::classes::classes;
    use crate::plan::matrix::EDGES;

    const SHAPE: AttentionShape =
        AttentionShape { heads: 32, kv_heads: 4, head_dim: 128, block_size: 16, max_blocks: 4096 };

    fn device(matrix: bool) -> Capabilities {
        classes().into_iter().find(|c| c.split_attention && c.matrix == matrix).unwrap()
    }

    fn rows(of: &[(i32, i32, i32)]) -> Vec<[i32; 4]> {
        of.iter().flat_map(|&(sequence, from, n)| (from..from + n).map(move |p| [0, p, sequence, -1])).collect()
    }

    #[test]
    fn every_row_is_in_one_tile_or_single() {
        let rows = rows(&[(3, 99, 1), (0, 0, 1), (1, 0, 100), (2, 70, 33), (4, 5, 15), (4, 300, 16)]);
        for matrix in [false, true] {
            let work = AttentionWork::new(&device(matrix), &SHAPE, &rows);
            let mut seen = vec![0; rows.len()];
            for &[first, n, position, pack] in &work.table[work.packs..work.packs + work.tiles] {
                assert_eq!(rows[first as usize][1], position);
                let [sequence, from, end, _] = work.table[pack as usize];
                assert_eq!((sequence, from), (rows[first as usize][2], 0));
                assert!(position + n <= end);
                let reach = work.table[(pack + (position + n - 1) / work.cut.positions as i32) as usize];
                assert!(reach[0] == sequence && reach[1] < position + n);
                (first..first + n).for_each(|r| seen[r as usize] += 1);
            }
            work.table[work.packs + work.tiles..].iter().for_each(|s| {
                let row = rows[s[0] as usize];
                assert_eq!(s[1..3], row[1..3]);
                seen[s[0] as usize] += 1;
            });
            assert!(seen.iter().all(|n| *n == 1), "{seen:?}");
            assert_eq!(work.table.len(), work.packs + work.tiles + work.singles);
            assert_eq!(work.singles, if matrix { 17 } else { rows.len() });
        }
    }

    #[test]
    fn few_rows_are_split_and_many_are_not() {
        let caps = device(false);
        let splits = |n: i32, context: i32| {
            let rows: Vec<[i32; 4]> = (0..n).map(|s| [0, context - 1, s, -1]).collect();
            let work = AttentionWork::new(&caps, &SHAPE, &rows);
            assert!(work.chunk * work.splits >= context as usize && work.splits <= SPLITS);
            work.splits
        };
        assert_eq!(splits(1, 16), 1);
        assert_eq!(splits(1, 1000), 63);
        assert_eq!(splits(1, 32_768), 64);
        assert_eq!(splits(512, 500), 1);
        let none = AttentionWork::new(&caps, &SHAPE, &[]);
        assert_eq!((none.table.len(), none.splits), (0, 1));
    }

    #[test]
    fn what_does_not_fit_the_packed_blocks_is_read_row_by_row() {
        let caps = Capabilities { max_binding_bytes: 1 << 20, ..device(true) };
        let work = AttentionWork::new(&caps, &SHAPE, &rows(&[(0, 0, 128), (1, 0, 1024)]));
        assert!(work.tiles > 0);
        assert_eq!(work.singles, 1024);
    }

    #[test]
    fn the_cut_fits_and_heads_of_a_workgroup_share_keys() {
        for (cut, (_, room)) in [CUT, NARROW_CUT].into_iter().zip(EDGES) {
            for width in MATRIX_WIDTHS {
                assert!(cut.workgroup_bytes(width as u32) <= room);
                assert_eq!(cut.positions as usize * width / 4 % (cut.subgroups * 32) as usize, 0);
            }
            assert!(cut.positions.is_multiple_of(WEIGHT_COLUMNS) && cut.positions.is_multiple_of(cut.strip));
        }
        for (heads, kv_heads, head_dim, expected) in
            [(32, 4, 128, 8), (4, 4, 64, 1), (48, 4, 128, 6), (64, 4, 64, 8), (14, 2, 64, 7), (16, 1, 256, 4)]
        {
            assert_eq!(split_heads(&AttentionShape { heads, kv_heads, head_dim, ..SHAPE }), expected);
        }
    }
}
