//! The down projection of few tokens with the weighted sum over each token's experts.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::operands::Weights;
use crate::kernels::pair_shrink::Shrunk;
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::rows;

/// The shader.
pub static DOWN_COMBINE: Kernel = Kernel { stem: "down_combine", reads: 6, writes: 1 };

params! {
    /// Sizes of one combination with one piece of the weights.
    DownCombineParams {
        /// T.
        tokens: u32,
        /// A.
        top_k: u32,
        /// Groups of eight in a row of W.
        groups: u32,
        /// Rows of W of this piece.
        out_rows: u32,
        /// First of them in out.
        out_begin: u32,
        /// D.
        hidden: u32,
        /// First matrix of this piece.
        first: u32,
        /// Matrices of this piece.
        count: u32,
        /// 1: add to out.
        accumulate: u32,
        /// Rank that u has room for.
        max_rank: u32,
        /// Parts whose sum u is.
        chunks: u32,
        /// Padding.
        pad0: u32,
    }
}

/// Semantics: `out[t] (+)= Σ_k w[t,k] · (W[id] · h[t·A + k] + B · u[t·A + k])` over the pairs with an id of an expert.
pub struct DownCombine<'a> {
    /// T.
    pub tokens: usize,
    /// A.
    pub top_k: usize,
    /// f32 `[P, F]`.
    pub h: &'a View,
    /// `[E_l, D, F]`.
    pub weights: &'a Weights,
    /// i32 `[T, A]`, local.
    pub ids: &'a View,
    /// f32 `[T, A]`.
    pub topk_weights: &'a View,
    /// The adapters.
    pub adapters: Option<&'a Shrunk>,
    /// f32 `[T, D]`, written or added to.
    pub out: &'a View,
    /// Add to out.
    pub accumulate: bool,
}

/// Columns of a workgroup.
const PER_LANE: u32 = 2;

/// Subgroups of a workgroup: as many as a token has experts, where lanes allow.
fn subgroups(caps: &Capabilities) -> u32 {
    (256 / caps.row_lanes).min(8)
}

/// The variables of one variant; `in_dim` is F.
pub fn vars(caps: &Capabilities, dtype: DType, lora: bool, in_dim: usize) -> Vars {
    vec![
        ("dtype", dtype.name().into()),
        ("per_lane", PER_LANE.into()),
        ("steps", rows::steps(caps, in_dim).into()),
        ("lora", lora.into()),
        ("lanes", (subgroups(caps) * caps.row_lanes).into()),
        ("depth_lanes", caps.row_lanes.into()),
    ]
}

impl DownCombine<'_> {
    /// Records the stage: one dispatch for each piece of the weights.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let Weights { dtype, out_dim, in_dim, .. } = *self.weights;
        let vars = vars(rec.gpu().capabilities(), dtype, self.adapters.is_some(), in_dim);
        let pipeline = pipeline(rec.gpu(), &DOWN_COMBINE, vars)?;
        let (u, pool) = self.adapters.map_or((self.h, self.h), |shrunk| (&shrunk.u, &shrunk.pool));
        for (piece, view) in &self.weights.pieces {
            let params = DownCombineParams {
                tokens: self.tokens as u32,
                top_k: self.top_k as u32,
                groups: (in_dim / 8) as u32,
                out_rows: piece.rows as u32,
                out_begin: piece.row_begin as u32,
                hidden: out_dim as u32,
                first: piece.first as u32,
                count: piece.count as u32,
                // The pieces of the first experts come first, and cover every column.
                accumulate: u32::from(self.accumulate || piece.first > 0),
                max_rank: self.adapters.map_or(0, |shrunk| shrunk.max_rank as u32),
                chunks: self.adapters.map_or(0, |shrunk| shrunk.chunks as u32),
                pad0: 0,
            };
            let columns = piece.rows.div_ceil(PER_LANE as usize);
            let buffers = [self.h, view, self.ids, self.topk_weights, u, pool, self.out];
            let grid = Grid::Direct([self.tokens as u32, columns as u32, 1]);
            rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        }
        Ok(())
    }
}
