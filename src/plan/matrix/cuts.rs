//! Which cuts there are on a device, and which of them a product takes.

use serde::{Deserialize, Serialize};

use super::{EDGE, EDGES, MatrixTile};
use crate::plan::capabilities::Capabilities;

/// The cuts of products on matrices, in ascending order of their heights and a direct one last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cuts {
    /// Of tiles of the pairs of an expert; no two of the same height, which is all that an alignment knows of a cut.
    pub experts: Vec<MatrixTile>,
    /// Of dense products, which need workgroup memory for their sums.
    pub dense: Vec<MatrixTile>,
}

/// The [`Cuts`] for matrices of every edge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CutTable {
    /// For matrices of 16 x 16. The crate's are from a search on an H200: little workgroup memory, and a height that holds the pairs of
    /// a matrix at once, matter most (see `docs/EXPERIMENTS.md`).
    #[serde(rename = "16")]
    pub of_16: Cuts,
    /// For matrices of 8 x 8. The crate's have columns that 32 KiB of workgroup memory hold. Not measured.
    #[serde(rename = "8")]
    pub of_8: Cuts,
}

impl Cuts {
    /// Whether shaders can be made of all of them for matrices of `edge`, and a product finds one.
    ///
    /// # Errors
    /// The cut or the list, its field, what was expected and what stands there.
    pub fn check(&self, edge: u32) -> Result<(), String> {
        for (name, cuts, dense) in [("experts", &self.experts, false), ("dense", &self.dense, true)] {
            for (i, cut) in cuts.iter().enumerate() {
                cut.check(edge, dense).map_err(|e| format!("`{name}[{i}]`: {e}"))?;
            }
            let in_order = cuts.split_last().is_some_and(|(direct, staged)| {
                let ascending = staged.is_sorted_by(|a, b| a.height < b.height);
                direct.direct && !staged.is_empty() && ascending && !staged.iter().any(|cut| cut.direct)
            });
            if !in_order {
                return Err(format!("`{name}`: expected cuts of ascending `height` and a `direct` one last"));
            }
        }
        // Staged cuts ascend, so only the direct one can have the height of another.
        if let Some((direct, staged)) = self.experts.split_last()
            && staged.iter().any(|cut| cut.height == direct.height)
        {
            return Err(format!("`experts`: expected no two cuts of one `height`, got {}", direct.height));
        }
        Ok(())
    }
}

impl CutTable {
    /// Those for matrices of `edge`.
    pub fn of(&self, edge: u32) -> &Cuts {
        if edge == EDGE { &self.of_16 } else { &self.of_8 }
    }

    /// The same table with other cuts for matrices of `edge`.
    #[must_use]
    pub fn with(self, edge: u32, cuts: Cuts) -> Self {
        if edge == EDGE { Self { of_16: cuts, ..self } } else { Self { of_8: cuts, ..self } }
    }

    /// As [`Cuts::check`].
    ///
    /// # Errors
    /// The same, with the edge.
    pub fn check(&self) -> Result<(), String> {
        for (edge, _) in EDGES {
            self.of(edge).check(edge).map_err(|e| format!("`{edge}`: {e}"))?;
        }
        Ok(())
    }
}

impl MatrixTile {
    /// The cut of tiles of `height` pairs.
    pub fn of(caps: &Capabilities, height: usize) -> Option<Self> {
        caps.cuts.experts.iter().find(|t| t.height as usize == height).copied()
    }

    /// The same where it is the direct one.
    pub fn direct_of(caps: &Capabilities, height: usize) -> Option<Self> {
        Self::of(caps, height).filter(|cut| cut.direct)
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
    let (direct, staged) = caps.cuts.experts.split_last()?;
    let highest = staged.last()?;
    if mean > f64::from(highest.height) {
        return Some(direct.height as usize);
    }
    Some(staged.iter().find(|t| f64::from(t.height) >= most).unwrap_or(highest).height as usize)
}

/// The next lower tile through workgroup memory.
pub fn lower(caps: &Capabilities, height: usize) -> Option<usize> {
    caps.cuts.experts.iter().rev().filter(|t| !t.direct).map(|t| t.height as usize).find(|h| *h < height)
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

/// Parts of a product that must be as exact as f32 arithmetic: fewer where half of them make enough workgroups, which then start and end
/// half as often.
pub fn exact_parts(caps: &Capabilities, rows: usize, columns: usize) -> usize {
    let few = DEPTH_PARTS / 2;
    let enough = |cut: MatrixTile| cut.workgroups(rows, columns) * few >= caps.tuning.matrix_workgroups;
    if parted(caps, rows, columns).is_some_and(enough) { few } else { DEPTH_PARTS }
}

/// Whether a dense product should come in such parts: where no tile reads the weights once and makes enough workgroups, and the depth
/// has a few steps for each part.
pub fn parts(caps: &Capabilities, rows: usize, columns: usize, depth: usize) -> bool {
    let Some(whole) = dense(caps, rows, columns, false) else { return false };
    let once = whole.height as usize >= rows && whole.workgroups(rows, columns) >= caps.tuning.matrix_workgroups;
    let steps = depth / caps.cuts.dense.first().map_or(1, |cut| cut.depth) as usize;
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
    let fits = |t: &&MatrixTile| t.height as usize <= rows && enough(t, t.workgroups(rows, columns));
    let cuts = &caps.cuts.dense;
    cuts.iter().rev().find(fits).or(cuts.first()).filter(|_| rows > 8).copied()
}

/// Whether a product of `rows` rows that must be as exact as f32 arithmetic runs faster on matrices, which then multiply twice.
pub fn exact(caps: &Capabilities, rows: usize) -> bool {
    rows >= caps.tuning.exact_matrix_rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::classes::classes;
    use crate::plan::tuning::Tuning;

    fn device() -> Capabilities {
        classes().into_iter().find(|caps| caps.matrix).unwrap()
    }

    #[test]
    fn lists_are_in_order() {
        let own = device().cuts;
        assert_eq!(own.check(EDGE), Ok(()));
        let experts = |change: fn(&mut Vec<MatrixTile>)| {
            let mut cuts = (*own).clone();
            change(&mut cuts.experts);
            cuts.check(EDGE).unwrap_err()
        };
        let order = "`experts`: expected cuts of ascending `height` and a `direct` one last";
        assert_eq!(experts(Vec::clear), order);
        assert_eq!(experts(|cuts| cuts.truncate(5)), order);
        assert_eq!(experts(|cuts| cuts.retain(|cut| cut.direct)), order);
        assert_eq!(experts(|cuts| cuts.swap(0, 1)), order);
        assert_eq!(experts(|cuts| cuts.insert(0, cuts[5])), order);
        let twice = |cuts: &mut Vec<MatrixTile>| cuts[5] = MatrixTile { height: 32, sub_rows: 16, ..cuts[5] };
        assert_eq!(experts(twice), "`experts`: expected no two cuts of one `height`, got 32");
        assert!(experts(|cuts| cuts[2].depth = 1).starts_with("`experts[2]`: `depth`: expected"));
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
        // From 32 tiles of 128 rows on half as many parts make enough workgroups.
        assert_eq!([384, 2048, 3968, 4096].map(|rows| exact_parts(&own, rows, 128)), [8, 8, 8, 4]);
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
        assert_eq!([144, 128, 80].map(|height| lower(&caps, height)), [Some(80), Some(80), Some(48)]);
        assert_eq!(lower(&caps, 16), None);
    }
}
