//! The product of few pairs with their experts, adapters and activation included.

use crate::activation::Activation;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::activation;
use crate::kernels::choice::{self, Choice, Numbers};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::operands::{Rows, Weights};
use crate::kernels::pair_shrink::Shrunk;
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::rows;

/// The shader.
pub static PAIR_GEMM: Kernel = Kernel { stem: "pair_gemm", reads: 5, writes: 1 };
/// The same shader, which chooses the experts, too.
pub static PAIR_GEMM_CHOOSING: Kernel = Kernel { stem: "pair_gemm", reads: 5, writes: 3 };

params! {
    /// Sizes of one product with one piece of the weights.
    PairGemmParams {
        /// P.
        rows: u32,
        /// Pairs that share a row of x.
        row_div: u32,
        /// Row of x in vec4.
        x_stride: u32,
        /// Groups of eight in a row of W.
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
        /// Rank that u has room for.
        max_rank: u32,
        /// Word of `expert_ids`.
        expert_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// Slope of the clamped swiglu.
        alpha: f32,
        /// Clamp of the clamped swiglu.
        limit: f32,
        /// Parts whose sum u is.
        chunks: u32,
        /// E.
        experts: u32,
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

/// Semantics: `y[p] = W[id(p)] · x[p / row_div] + B · u[p]`; with an activation W holds gate and up, and
/// `y[p] = act(gate[p]) · up[p]`. Rows of ids that are no expert are left alone.
pub struct PairGemm<'a> {
    /// P.
    pub rows: usize,
    /// Pairs that share a row of x.
    pub row_div: usize,
    /// Which rows meet which matrix; never dense.
    pub select: Rows<'a>,
    /// The ids of single pairs are not chosen yet: this product does it.
    pub choice: Option<&'a Choice<'a>>,
    /// f32 `[rows / row_div, in]`.
    pub x: &'a View,
    /// `[E_l, out, in]`, or gate and up `[E_l, 2 out, in]`, which [`gated`] takes.
    pub weights: &'a Weights,
    /// Between gate and up; `None` for a plain product.
    pub activation: Option<Activation>,
    /// The adapters.
    pub adapters: Option<&'a Shrunk>,
    /// f32 `[P, out]`, written.
    pub y: &'a View,
}

/// Whether gate and up of an expert are always in one piece.
pub fn gated(weights: &Weights) -> bool {
    weights.pieces.iter().all(|(p, _)| p.rows == weights.out_dim)
}

/// The variables of one variant; `in_dim` is the length of a row.
pub fn vars(
    caps: &Capabilities,
    dtype: DType,
    rows: &'static str,
    tile: usize,
    kind: Option<Activation>,
    lora: bool,
    in_dim: usize,
) -> Vars {
    vec![
        ("dtype", dtype.name().into()),
        ("rows", rows.into()),
        ("tile", (tile as u32).into()),
        ("per_lane", per_lane(kind.is_some()).into()),
        ("steps", rows::steps(caps, in_dim).into()),
        ("kind", kind.map_or("none", activation::name).into()),
        ("lora", lora.into()),
        ("lanes", (rows::SUBGROUPS * caps.row_lanes).into()),
        ("depth_lanes", caps.row_lanes.into()),
    ]
}

/// Columns of a subgroup: a gated one has two rows of weights.
fn per_lane(gated: bool) -> u32 {
    if gated { 1 } else { 4 }
}

impl PairGemm<'_> {
    /// Records the stage: one dispatch for each piece of the weights.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let tile = if let Rows::Tiles(aligned) = self.select { aligned.tile } else { 1 };
        let Weights { dtype, out_dim, in_dim, .. } = *self.weights;
        let (lora, kind) = (self.adapters.is_some(), self.activation);
        let caps = rec.gpu().capabilities();
        let mut vars = vars(caps, dtype, choice::rows(&self.select, self.choice), tile, kind, lora, in_dim);
        vars.extend(self.choice.iter().flat_map(|c| choice::vars(caps, c.options, c.experts)));
        let kernel = if self.choice.is_some() { &PAIR_GEMM_CHOOSING } else { &PAIR_GEMM };
        let pipeline = pipeline(rec.gpu(), kernel, vars)?;
        let (ids, expert_base, sorted_base) = self.select.ids(self.x);
        let Numbers { experts, renormalise, scale, weights_base } = Numbers::of(self.choice);
        let (alpha, limit) = kind.map_or((0.0, 0.0), activation::constants);
        let matrices = if kind.is_some() { 2 } else { 1 };
        let (u, pool) = self.adapters.map_or((self.x, self.x), |shrunk| (&shrunk.u, &shrunk.pool));
        for (piece, view) in &self.weights.pieces {
            let params = PairGemmParams {
                rows: self.rows as u32,
                row_div: self.row_div as u32,
                x_stride: (in_dim / 4) as u32,
                groups: (in_dim / 8) as u32,
                out_rows: (piece.rows / matrices) as u32,
                out_begin: piece.row_begin as u32,
                y_stride: (out_dim / matrices) as u32,
                first: piece.first as u32,
                count: piece.count as u32,
                max_rank: self.adapters.map_or(0, |shrunk| shrunk.max_rank as u32),
                expert_base,
                sorted_base,
                alpha,
                limit,
                chunks: self.adapters.map_or(0, |shrunk| shrunk.chunks as u32),
                experts,
                renormalise,
                scale,
                weights_base,
                pad0: 0,
            };
            let columns = (piece.rows / matrices).div_ceil((rows::SUBGROUPS * per_lane(kind.is_some())) as usize);
            // No more tiles than pairs; those that are not there end at once.
            let grid = Grid::Direct([self.rows as u32, columns as u32 + u32::from(self.choice.is_some()), 1]);
            let ids = self.choice.map_or(ids, |c| c.logits);
            let mut buffers = vec![self.x, view, ids, u, pool, self.y];
            buffers.extend(self.choice.iter().flat_map(|c| [c.topk.view(), c.status]));
            rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        }
        Ok(())
    }
}
