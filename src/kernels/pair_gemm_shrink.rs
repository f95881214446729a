//! Gate and up of few pairs without what stands between them, and the first half of their adapters beside it.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::choice::{self, Choice, Numbers};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::lora::LoraSite;
use crate::kernels::operands::{Rows, Weights};
use crate::kernels::pair_shrink::PairShrink;
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::rows;

/// The shader.
pub static PAIR_GEMM_SHRINK: Kernel = Kernel { stem: "pair_gemm_shrink", reads: 7, writes: 1 };
/// The same shader, which chooses the experts, too.
pub static PAIR_GEMM_SHRINK_CHOOSING: Kernel = Kernel { stem: "pair_gemm_shrink", reads: 6, writes: 2 };

params! {
    /// Sizes of one product with one piece of the weights, and of the shrink beside the first of them.
    PairGemmShrinkParams {
        /// P.
        rows: u32,
        /// Pairs that share a row of x.
        row_div: u32,
        /// Row of x in vec4.
        x_stride: u32,
        /// Groups of eight in a row of W, and of A.
        groups: u32,
        /// Columns of y in this piece.
        out_rows: u32,
        /// First column of y.
        out_begin: u32,
        /// Row of y in elements.
        y_stride: u32,
        /// First matrix of this piece.
        first: u32,
        /// Matrices of this piece.
        count: u32,
        /// Word of `expert_ids`.
        expert_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// Word of y.
        y_base: u32,
        /// Rows of workgroups that shrink.
        shrink_tiles: u32,
        /// First entry of the site in the index.
        index_base: u32,
        /// First entry of the site of down.
        down_base: u32,
        /// Projections of the site.
        projections: u32,
        /// Rank that u has room for.
        max_rank: u32,
        /// A.
        top_k: u32,
        /// E_l.
        experts: u32,
        /// L.
        slots: u32,
        /// 1: the weights of a token are divided by their sum.
        renormalise: u32,
        /// Factor on every weight, after that.
        scale: f32,
        /// Word of the weights behind the ids.
        weights_base: u32,
        /// Padding.
        pad0: u32,
    }
}

/// Semantics: `y[p] = W[id(p)] · x[p / row_div]` and `u[p] = s · A · x[p / row_div]` for gate and up, with the factors of pair p's
/// expert and its token's slot. Beside u stand where B is and the entry of down's factor. Rows of y of ids that are no expert are left
/// alone; what the status has to say of them, and of slots, is left for the next stage.
pub struct PairGemmShrink<'a> {
    /// Which rows meet which matrix; never dense.
    pub select: Rows<'a>,
    /// The ids of single pairs are not chosen yet: this product does it. Its status is left for the next stage.
    pub choice: Option<&'a Choice<'a>>,
    /// `[E_l, out, in]`.
    pub weights: &'a Weights,
    /// The shrink of the two projections, and what it has in common with the product.
    pub shrink: PairShrink<'a>,
    /// The site of down in the same layer.
    pub down: &'a LoraSite,
}

/// What a [`PairGemmShrink`] leaves for the next stage.
#[derive(Debug, Clone)]
pub struct Sums {
    /// f32 `[P, out]`.
    pub y: View,
    /// u32 `[P]` of the entry of down `[4]`, where B is `[2, 4]` and u `[2, max_rank]`.
    pub u: View,
    /// Rank that u has room for: a multiple of 8.
    pub max_rank: usize,
}

/// The variables of one variant; `in_dim` is the length of a row.
pub fn vars(caps: &Capabilities, dtype: DType, rows: &'static str, tile: usize, in_dim: usize) -> Vars {
    let steps = rows::steps(caps, in_dim);
    vec![
        ("dtype", dtype.name().into()),
        ("rows", rows.into()),
        ("tile", (tile as u32).into()),
        ("per_lane", PER_LANE.into()),
        ("steps", steps.into()),
        // A row of A is all that a subgroup reads: as much of it at once as registers hold.
        ("a_steps", (2 * steps).into()),
        ("lanes", (rows::SUBGROUPS * caps.row_lanes).into()),
        ("depth_lanes", caps.row_lanes.into()),
    ]
}

/// Columns of a subgroup.
const PER_LANE: u32 = 2;
/// Projections of the site: gate and up.
const PROJECTIONS: usize = 2;

/// Byte at which y begins, for `pairs` pairs of rank `max_rank`: behind an entry of down, and B and u of each projection.
fn y_begin(pairs: usize, max_rank: usize) -> u64 {
    let words = 4 + PROJECTIONS * (4 + max_rank);
    ((pairs * words * 4) as u64).next_multiple_of(View::ALIGN)
}

/// Bytes of what this stage leaves of `pairs` pairs, `out` columns and rank `max_rank`.
pub fn bytes(pairs: usize, out: usize, max_rank: usize) -> u64 {
    y_begin(pairs, max_rank.next_multiple_of(8)) + (pairs * out * 4) as u64
}

impl PairGemmShrink<'_> {
    /// Records the stage: one dispatch for each piece of the weights.
    ///
    /// # Errors
    /// When the device refuses the shader or has no room for the sums.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<Sums> {
        let tile = if let Rows::Tiles(aligned) = self.select { aligned.tile } else { 1 };
        let Weights { dtype, out_dim, in_dim, .. } = *self.weights;
        let PairShrink { rows, row_div, top_k, experts, slots, site, factors, x, .. } = self.shrink;
        let pair_ids = self.shrink.ids.unwrap_or(x);
        debug_assert_eq!(site.out_dims.len(), PROJECTIONS);
        let max_rank = self.shrink.max_rank.next_multiple_of(8);
        let caps = rec.gpu().capabilities();
        let mut vars = vars(caps, dtype, choice::rows(&self.select, self.choice), tile, in_dim);
        vars.extend(self.choice.iter().flat_map(|c| choice::vars(caps, c.options, c.experts)));
        let kernel = if self.choice.is_some() { &PAIR_GEMM_SHRINK_CHOOSING } else { &PAIR_GEMM_SHRINK };
        let pipeline = pipeline(rec.gpu(), kernel, vars)?;
        let (ids, expert_base, sorted_base) = self.select.ids(x);
        let Numbers { renormalise, scale, weights_base, .. } = Numbers::of(self.choice);
        let y_begin = y_begin(rows, max_rank);
        let sums = rec.scratch("pair sums", bytes(rows, out_dim, max_rank))?;
        for (i, (piece, view)) in self.weights.pieces.iter().enumerate() {
            let shrink_tiles = if i == 0 { (PROJECTIONS * max_rank).div_ceil(rows::SUBGROUPS as usize) } else { 0 };
            let params = PairGemmShrinkParams {
                rows: rows as u32,
                row_div: row_div as u32,
                x_stride: (in_dim / 4) as u32,
                groups: (in_dim / 8) as u32,
                out_rows: piece.rows as u32,
                out_begin: piece.row_begin as u32,
                y_stride: out_dim as u32,
                first: piece.first as u32,
                count: piece.count as u32,
                expert_base,
                sorted_base,
                y_base: (y_begin / 4) as u32,
                shrink_tiles: shrink_tiles as u32,
                index_base: site.index_base as u32,
                down_base: self.down.index_base as u32,
                projections: PROJECTIONS as u32,
                max_rank: max_rank as u32,
                top_k: top_k as u32,
                experts: experts as u32,
                slots: slots as u32,
                renormalise,
                scale,
                weights_base,
                pad0: 0,
            };
            let columns = piece.rows.div_ceil((rows::SUBGROUPS * PER_LANE) as usize);
            // No more tiles than pairs; those that are not there end at once.
            let writers = usize::from(self.choice.is_some());
            let grid = Grid::Direct([rows as u32, (shrink_tiles + writers + columns) as u32, 1]);
            let (pool, index, mapping) = (factors.pool(site), &factors.index, self.shrink.token_lora_mapping);
            let buffers = match self.choice {
                Some(c) => [x, view, c.logits, pool, index, mapping, &sums, c.topk.view()],
                None => [x, view, ids, pair_ids, pool, index, mapping, &sums],
            };
            rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        }
        Ok(Sums { y: sums.part(y_begin, sums.size - y_begin), u: sums.part(0, y_begin), max_rank })
    }
}
