//! The first half of the adapters of few pairs, or of few whole tokens, one by one.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Pipeline, Vars, pipeline};
use crate::kernels::lora::{Factors, LoraSite};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{EDGE, LIFT};
use crate::plan::rows;

/// The shader.
pub static PAIR_SHRINK: Kernel = Kernel { stem: "pair_shrink", reads: 5, writes: 2 };
/// The shader for packed rows.
pub static PAIR_SHRINK_PACKED: Kernel = Kernel { stem: "pair_shrink_packed", reads: 5, writes: 2 };

params! {
    /// Sizes of one shrink.
    PairShrinkParams {
        /// P.
        rows: u32,
        /// Pairs that share a row of x.
        row_div: u32,
        /// Row of x in vec4.
        x_stride: u32,
        /// Groups of eight in a row of A.
        groups: u32,
        /// First entry of the site in the index.
        index_base: u32,
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
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
    }
}

/// Semantics: `u[p] = s · A · x[p / row_div]` for each projection, with the factors of pair p's expert and its token's slot,
/// and beside it where B is. Pairs without factors are marked as such. Whole tokens are pairs with the only expert.
pub struct PairShrink<'a> {
    /// P.
    pub rows: usize,
    /// Pairs that share a row of x.
    pub row_div: usize,
    /// A: pairs of a token; 1 for whole tokens.
    pub top_k: usize,
    /// E_l; 1 for whole tokens.
    pub experts: usize,
    /// L.
    pub slots: usize,
    /// Largest rank among the adapters of this batch, a bias counted.
    pub max_rank: usize,
    /// The site.
    pub site: &'a LoraSite,
    /// The layer's factors.
    pub factors: &'a Factors,
    /// f32 `[rows / row_div, in]`.
    pub x: &'a View,
    /// i32 `[P]`, local; `None` for whole tokens.
    pub ids: Option<&'a View>,
    /// i32 `[T]`: slot, negative for none.
    pub token_lora_mapping: &'a View,
    /// u32 `[1]`: bit 1 for a slot past L, bit 2 for an id past E_l.
    pub status: &'a View,
}

/// What a [`PairShrink`] leaves for the products, or a [`PairExpandShrink`](super::pair_expand_shrink::PairExpandShrink).
#[derive(Debug, Clone)]
pub struct Shrunk {
    /// u32 `[P, projections, 4 + chunks · max_rank]`.
    pub u: View,
    /// Rank that u has room for: a multiple of 8.
    pub max_rank: usize,
    /// Parts whose sum u is.
    pub chunks: usize,
    /// The factors of the site.
    pub pool: View,
}

/// The variables for rows of `in_dim` columns; `dense` for whole tokens.
pub fn vars(caps: &Capabilities, dense: bool, in_dim: usize) -> Vars {
    vec![
        ("dense", dense.into()),
        // A row of A is all that a subgroup reads: as much of it at once as registers hold.
        ("steps", (2 * rows::steps(caps, in_dim)).into()),
        ("lanes", (rows::SUBGROUPS * caps.row_lanes).into()),
        ("depth_lanes", caps.row_lanes.into()),
    ]
}

/// The variables of the shader for packed rows.
pub fn packed_vars(caps: &Capabilities, dense: bool, in_dim: usize) -> Vars {
    vec![
        ("dense", dense.into()),
        ("steps", rows::steps(caps, in_dim).into()),
        ("lanes", (rows::SUBGROUPS * caps.row_lanes).into()),
        ("depth_lanes", caps.row_lanes.into()),
        ("lift", LIFT.into()),
    ]
}

impl PairShrink<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader or has no room for u.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<Shrunk> {
        let projections = self.site.out_dims.len();
        let max_rank = self.max_rank.next_multiple_of(8);
        let u = rec.scratch("lora u", (self.rows * projections * (max_rank + 4) * 4) as u64)?;
        let vars = vars(rec.gpu().capabilities(), self.ids.is_none(), self.site.in_dim);
        let pipeline = pipeline(rec.gpu(), &PAIR_SHRINK, vars)?;
        self.dispatch(rec, pass, &pipeline, &u, max_rank, [self.site.in_dim / 4, 1]);
        Ok(Shrunk { u, max_rank, chunks: 1, pool: self.factors.pool(self.site).clone() })
    }

    /// Records the stage for rows that are packed, `[rows / row_div, in]` in the place of x and `stride` values apart. Returns u for a product that adds it:
    /// f16 `[P, projections, max_rank]`, with the rows' powers of two and divided by 2^[`LIFT`]. No factor has a bias.
    ///
    /// # Errors
    /// When the device refuses the shader or has no room for u.
    pub fn record_packed(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, stride: usize) -> Result<View> {
        let max_rank = self.max_rank.next_multiple_of(EDGE as usize);
        let u = rec.scratch("lora u", (self.rows * self.site.out_dims.len() * max_rank * 2) as u64)?;
        let vars = packed_vars(rec.gpu().capabilities(), self.ids.is_none(), self.site.in_dim);
        let pipeline = pipeline(rec.gpu(), &PAIR_SHRINK_PACKED, vars)?;
        self.dispatch(rec, pass, &pipeline, &u, max_rank, [stride / 8, 2]);
        Ok(u)
    }

    /// A dispatch that writes `u` with room for `max_rank`, for rows of x of `x_stride` words and `per_subgroup` rows of A a
    /// subgroup.
    fn dispatch(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        pipeline: &Pipeline,
        u: &View,
        max_rank: usize,
        [x_stride, per_subgroup]: [usize; 2],
    ) {
        let projections = self.site.out_dims.len();
        let params = PairShrinkParams {
            rows: self.rows as u32,
            row_div: self.row_div as u32,
            x_stride: x_stride as u32,
            groups: (self.site.in_dim / 8) as u32,
            index_base: self.site.index_base as u32,
            projections: projections as u32,
            max_rank: max_rank as u32,
            top_k: self.top_k as u32,
            experts: self.experts as u32,
            slots: self.slots as u32,
            pad0: 0,
            pad1: 0,
        };
        let (pool, index) = (self.factors.pool(self.site), &self.factors.index);
        let buffers = [self.x, pool, index, self.ids.unwrap_or(self.x), self.token_lora_mapping, u, self.status];
        let row_tiles = (projections * max_rank).div_ceil(rows::SUBGROUPS as usize * per_subgroup);
        let grid = Grid::Direct([self.rows as u32, row_tiles as u32, 1]);
        rec.dispatch(pass, pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
    }
}
