//! Adapters of the matrix tier, in runs of pairs: packed rows to the rank on cooperative matrices, and from there to
//! products that lie in the order of the tiles of their experts.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::lora::{Factors, LoraSite, Spans};
use crate::kernels::pack::{BLOCKS_AHEAD, Blocks, Packed};
use crate::kernels::params::params;
use crate::kernels::runs::Runs;
use crate::kernels::{Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{EDGE, LIFT};

/// x to u.
pub static LORA_SHRINK_MATRIX: Kernel = Kernel { stem: "lora_shrink_matrix", reads: 4, writes: 1 };
/// x to u, and to blocks and their exponents.
pub static LORA_SHRINK_LEAVING: Kernel = Kernel { stem: "lora_shrink_matrix", reads: 4, writes: 3 };

/// u to y.
pub static LORA_EXPAND_TILES: Kernel = Kernel { stem: "lora_expand_tiles", reads: 4, writes: 1 };

/// Pairs of a run.
pub const RUN: usize = EDGE as usize;

/// Pairs of a long run, for a shrink that no expand follows: its workgroup reads A once for four times the pairs.
pub const LONG_RUN: usize = 4 * RUN;

/// Subgroups of a workgroup: each takes [`RUN`] pairs of a long run, or two share the depth. More of those would leave room
/// for fewer on a multiprocessor: each has 8 KiB of workgroup memory (`docs/EXPERIMENTS.md`, "What a multiprocessor holds").
fn subgroups(run: usize, x: InBlocks) -> u32 {
    // A run that begins within a block ends in one more.
    if run > RUN { (run / RUN) as u32 + u32::from(x == InBlocks::Read) } else { 2 }
}

/// What a shrink has to do with the blocks of a direct product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InBlocks {
    /// Nothing: it reads rows.
    No,
    /// It reads them in place of rows.
    Read,
    /// It reads rows, and leaves them as blocks.
    Leave,
}

impl InBlocks {
    /// All of them, and the blocks of a round.
    pub const ALL: [(Self, usize); 4] =
        [(Self::No, ROUNDS[0]), (Self::Read, ROUNDS[0]), (Self::Read, ROUNDS[1]), (Self::Leave, ROUNDS[0])];
}

/// Blocks of a row, or as many values, that a shrink takes in a round. What it reads in blocks it loads a round ahead, so that more of them
/// pass the time.
const ROUNDS: [usize; 2] = [4, BLOCKS_AHEAD];

/// Blocks of a round of a shrink of runs of `run` pairs that reads rows of `width` values in the `blocks` of a direct product, or leaves
/// them, if it can: long runs do, where rows of blocks end with a round.
fn round_of(run: usize, blocks: &Blocks, width: usize, way: InBlocks) -> Option<usize> {
    let whole = |round: &usize| blocks.per_row == width.div_ceil(round * EDGE as usize) * round;
    let rounds = if way == InBlocks::Read { &ROUNDS[..] } else { &ROUNDS[..1] };
    rounds.iter().rev().copied().find(|round| run > RUN && whole(round))
}

/// Whether a shrink of runs of `run` pairs can do so with the `blocks` of rows of `width` values.
pub fn by_blocks(run: usize, blocks: &Blocks, width: usize, way: InBlocks) -> bool {
    round_of(run, blocks, width, way).is_some()
}

/// Most pairs of the runs of a shrink: `pairs` of `buckets` virtual experts, and whether products add them (`folded`). Long runs must
/// leave enough workgroups, each of which walks whole rows.
pub fn shrink_run(caps: &Capabilities, pairs: usize, buckets: usize, folded: bool) -> usize {
    let enough = pairs.div_ceil(LONG_RUN) >= caps.tuning.matrix_workgroups;
    if folded && enough && 2 * pairs >= 3 * RUN * buckets { LONG_RUN } else { RUN }
}

params! {
    /// Sizes of one shrink.
    LoraShrinkMatrixParams {
        /// Pairs that share a row of x.
        row_div: u32,
        /// Groups of eight in a row of A, and of x.
        groups: u32,
        /// First entry of the site in the index.
        index_base: u32,
        /// Projections of the site.
        projections: u32,
        /// Rank that u has room for.
        max_rank: u32,
        /// Word of the runs.
        run_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// Where the exponents begin in x, in words of eight bytes.
        exponents: u32,
        /// Power of two of the base weights.
        w_scale: f32,
        /// Groups from a row of x to the next, or blocks of a row.
        x_stride: u32,
        /// Blocks of a row where they are left.
        blocks: u32,
        /// Padding.
        pad0: u32,
    }
}

/// Adapters that a product adds: `y[p] += B · u[p]` for each projection of the site, with the factors of the pair's expert and
/// its token's slot, none of which has a bias and all of which [`factor_folds`](crate::plan::matrix::factor_folds).
pub struct Folded<'a> {
    /// f16 `[P, projections, max_rank]`, from [`LoraShrinkMatrix`] or
    /// [`PairShrink::record_packed`](crate::kernels::pair_shrink::PairShrink::record_packed).
    pub u: View,
    /// Rank that u has room for: a multiple of 16.
    pub max_rank: usize,
    /// i32 `[T]`: slot of each token, negative for none; one past L counts as none.
    pub token_lora_mapping: &'a View,
    /// A; 1 when dense.
    pub top_k: usize,
    /// L, at most [`FOLDED_SLOTS`](crate::plan::matrix::FOLDED_SLOTS).
    pub slots: usize,
    /// Slots that occur in the mapping.
    pub used: usize,
    /// E_l.
    pub experts: usize,
    /// The site.
    pub site: &'a LoraSite,
    /// The layer's factors.
    pub factors: &'a Factors,
}

/// Semantics: `u[p] = s · A · x[p / row_div] · 2^e · w_scale` with the factors of virtual expert `id(p)` and the exponent e of
/// the packed row, as [`LoraExpandTiles`] adds it to products that keep both powers of two; with f16 operands and f32 sums.
/// Folded, u is f16 and divided by 2^[`LIFT`], as [`Folded`] takes it.
pub struct LoraShrinkMatrix<'a> {
    /// P.
    pub rows: usize,
    /// Pairs that share a row of x.
    pub row_div: usize,
    /// Of [`RUN`] pairs; folded also of [`LONG_RUN`].
    pub runs: &'a Runs,
    /// Rank that u has room for: a multiple of 8, folded of 16.
    pub max_rank: usize,
    /// Power of two of the base weights.
    pub w_scale: f32,
    /// The site.
    pub site: &'a LoraSite,
    /// The layer's factors.
    pub factors: &'a Factors,
    /// `[rows / row_div, in]`.
    pub x: &'a Packed,
    /// The same in the order of the pairs, and what of it: long runs alone, whose blocks they can [take](by_blocks). What is left is all
    /// of it where every pair has a run.
    pub blocks: Option<(&'a Blocks, InBlocks)>,
    /// u is for the product that adds it: f16.
    pub folded: bool,
}

/// Projections that a workgroup takes at most, which then share what it loads of x. Of a site of more it takes one.
pub const MOST_AT_ONCE: u32 = 3;

/// Projections of a site of `projections` that a workgroup takes: all or one.
fn at_once(projections: u32) -> u32 {
    if projections <= MOST_AT_ONCE { projections } else { 1 }
}

/// The variables on one device, for runs of `run` pairs, workgroups that take `per` projections, what becomes of x in blocks, and the
/// blocks of a round.
pub fn vars(caps: &Capabilities, folded: bool, run: usize, per: u32, (x, round): (InBlocks, usize)) -> Vars {
    vec![
        ("edge", caps.edge.into()),
        ("height", (run as u32).into()),
        ("tall", (run > RUN).into()),
        ("per", per.into()),
        ("blocks", (x == InBlocks::Read).into()),
        ("leaves", (x == InBlocks::Leave).into()),
        ("round", (round as u32).into()),
        ("subgroups", subgroups(run, x).into()),
        ("width", caps.row_lanes.into()),
        ("folded", folded.into()),
        ("lift", LIFT.into()),
    ]
}

fn other_runs(run: usize) -> Error {
    Error::new(ErrorKind::Unsupported, format!("adapters on matrices: expected runs of {RUN} pairs, got {run}"))
}

fn shrink_columns(site: &LoraSite, max_rank: usize) -> u32 {
    let projections = site.out_dims.len() as u32;
    projections / at_once(projections) * max_rank.next_multiple_of(8).div_ceil(RUN) as u32
}

/// Invocations of a workgroup of the expand, columns of each, and ranks that pass through workgroup memory at a time.
const EXPAND: [u32; 3] = [128, 2, 64];

/// The variables of the expand.
pub fn expand_vars() -> Vars {
    let [lanes, per_lane, chunk] = EXPAND;
    vec![("tile", EDGE.into()), ("lanes", lanes.into()), ("per_lane", per_lane.into()), ("chunk", chunk.into())]
}

/// Columns of a workgroup of the expand.
const EXPAND_COLUMNS: u32 = EXPAND[0] * EXPAND[1];

/// Column tiles of both halves, to announce to an alignment.
pub fn column_tiles(site: &LoraSite, max_rank: usize) -> [u32; 2] {
    [shrink_columns(site, max_rank), site.spans(EXPAND_COLUMNS).tiles]
}

impl LoraShrinkMatrix<'_> {
    /// Records the stage and returns u, f32 or folded f16 `[P, projections, max_rank]`.
    ///
    /// # Errors
    /// When the device refuses the shader or has no room for u; for runs of another length.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<View> {
        let run = self.runs.most;
        if run != RUN && !(self.folded && run == LONG_RUN) {
            return Err(other_runs(run));
        }
        let taken = self
            .blocks
            .filter(|_| self.folded)
            .and_then(|(blocks, way)| round_of(run, blocks, self.x.width, way).map(|round| (blocks, (way, round))));
        let in_blocks = taken.map_or((InBlocks::No, ROUNDS[0]), |(_, way)| way);
        let read = taken.filter(|(_, (way, _))| *way == InBlocks::Read).map(|(blocks, _)| blocks);
        let left = taken.filter(|(_, (way, _))| *way == InBlocks::Leave).map(|(blocks, _)| blocks);
        if left.is_none() && self.blocks.is_some_and(|(_, way)| way == InBlocks::Leave) {
            let message = format!("adapters on matrices: runs of {run} pairs leave no blocks of such rows");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        if read.is_none() && !self.x.by_row {
            return Err(Error::new(ErrorKind::Unsupported, "adapters on matrices: x is packed as blocks alone"));
        }
        let values = self.rows * self.site.out_dims.len() * self.max_rank;
        let u = rec.scratch("lora u", (values * if self.folded { 2 } else { 4 }) as u64)?;
        let caps = rec.gpu().capabilities().clone();
        let vars = vars(&caps, self.folded, run, at_once(self.site.out_dims.len() as u32), in_blocks);
        let kernel = if left.is_some() { &LORA_SHRINK_LEAVING } else { &LORA_SHRINK_MATRIX };
        let pipeline = pipeline(rec.gpu(), kernel, vars)?;
        let params = LoraShrinkMatrixParams {
            row_div: self.row_div as u32,
            groups: (self.site.in_dim / 8) as u32,
            index_base: self.site.index_base as u32,
            projections: self.site.out_dims.len() as u32,
            max_rank: self.max_rank as u32,
            run_base: self.runs.base,
            sorted_base: self.runs.aligned.sorted_base,
            exponents: self.x.exponents(),
            w_scale: self.w_scale,
            x_stride: read.map_or(self.x.stride() / 8, |blocks| blocks.per_row) as u32,
            blocks: left.map_or(0, |blocks| blocks.per_row as u32),
            pad0: 0,
        };
        let grid = self.runs.grid(shrink_columns(self.site, self.max_rank))?;
        let x = read.map_or(&self.x.view, |blocks| &blocks.view);
        let mut buffers = vec![x, self.factors.pool(self.site), &self.factors.index, &self.runs.aligned.view, &u];
        let left = left.map(Blocks::split);
        buffers.extend(left.iter().flatten());
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(u)
    }
}

params! {
    /// Sizes of one expand.
    LoraExpandTilesParams {
        /// First entry of the site in the index.
        index_base: u32,
        /// Projections of the site.
        projections: u32,
        /// Rank that u has room for.
        max_rank: u32,
        /// V.
        buckets: u32,
        /// Row of y in elements.
        y_stride: u32,
        /// Word of the runs.
        run_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// From a column of a projection to the next in y.
        step: u32,
        /// First column tile of each projection.
        tile_begin: [u32; 4],
        /// First column in y of each projection.
        out_begin: [u32; 4],
        /// Columns of each projection.
        out_rows: [u32; 4],
    }
}

/// Semantics: `y[place(p)] += B · u[p]` with the factors of virtual expert `id(p)`; nothing where rank is 0.
pub struct LoraExpandTiles<'a> {
    /// Of [`RUN`] pairs; y lies in the order of their alignment.
    pub runs: &'a Runs,
    /// V of the site.
    pub buckets: usize,
    /// Rank that u has room for: a multiple of 8.
    pub max_rank: usize,
    /// The site.
    pub site: &'a LoraSite,
    /// The layer's factors.
    pub factors: &'a Factors,
    /// f32 `[P, projections, max_rank]`, with the scale and the powers of two that y keeps.
    pub u: &'a View,
    /// f32 `[C, y_stride]`, added to.
    pub y: &'a View,
    /// Row of y in elements.
    pub y_stride: usize,
}

impl LoraExpandTiles<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader; for runs of another length.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        if self.runs.most != RUN {
            return Err(other_runs(self.runs.most));
        }
        let pipeline = pipeline(rec.gpu(), &LORA_EXPAND_TILES, expand_vars())?;
        let Spans { tile_begin, out_begin, out_rows, step, tiles } = self.site.spans(EXPAND_COLUMNS);
        let params = LoraExpandTilesParams {
            index_base: self.site.index_base as u32,
            projections: self.site.out_dims.len() as u32,
            max_rank: self.max_rank as u32,
            buckets: self.buckets as u32,
            y_stride: self.y_stride as u32,
            run_base: self.runs.base,
            sorted_base: self.runs.aligned.sorted_base,
            step,
            tile_begin,
            out_begin,
            out_rows,
        };
        let grid = self.runs.grid(tiles)?;
        let (pool, index) = (self.factors.pool(self.site), &self.factors.index);
        let buffers = [self.u, pool, index, &self.runs.aligned.view, self.y];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::classes::classes;
    use crate::plan::matrix::workgroup_bytes;

    #[test]
    fn long_runs_are_for_many_pairs_that_no_expand_takes_on() {
        let mut caps = classes().into_iter().find(|caps| caps.matrix).unwrap();
        caps.tuning.matrix_workgroups = 3;
        assert_eq!([23, 24].map(|pairs| shrink_run(&caps, 8 * pairs, 8, true)), [RUN, LONG_RUN]);
        assert_eq!([128, 129].map(|pairs| shrink_run(&caps, pairs, 1, true)), [RUN, LONG_RUN]);
        assert_eq!(shrink_run(&caps, 8 * 1000, 8, false), RUN);
    }

    #[test]
    fn workgroup_memory_holds_as_many_projections_as_are_taken_at_once() {
        // Rows of x of each subgroup and of each A, once in a long run, of 64 halves and eight more; sums of one projection.
        let bytes = |run: usize, copies: u32| {
            let rows = subgroups(run, InBlocks::No) * EDGE + copies * MOST_AT_ONCE * EDGE;
            rows * (64 + 8) * 2 + subgroups(run, InBlocks::No) * EDGE * EDGE * 4
        };
        let most = bytes(LONG_RUN, 1).max(bytes(RUN, subgroups(RUN, InBlocks::No)));
        assert!([16, 8].into_iter().all(|edge| most <= workgroup_bytes(edge)), "{most}");
        assert_eq!([1, 2, 3, 4].map(at_once), [1, 2, 3, 1]);
    }
}
