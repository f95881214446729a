//! The product of few rows with one matrix, adapters included.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::expert_gemm;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::lora::LoraSite;
use crate::kernels::operands::Weights;
use crate::kernels::pair_shrink::{PairShrink, Shrunk};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::pieces::Piece;
use crate::plan::rows;

/// The shader.
pub static DENSE_GEMM: Kernel = Kernel { stem: "dense_gemm", reads: 4, writes: 1 };
/// The same with the first half of the adapters beside the product.
pub static DENSE_GEMM_SHRINK: Kernel = Kernel { stem: "dense_gemm", reads: 5, writes: 3 };

params! {
    /// Sizes of one product with one piece of the weights.
    DenseGemmParams {
        /// T.
        rows: u32,
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
        /// 1: add to y.
        accumulate: u32,
        /// Projections of the site.
        projections: u32,
        /// Rank that u has room for.
        max_rank: u32,
        /// First entry of the site in the index.
        index_base: u32,
        /// L.
        slots: u32,
        /// Rows of workgroups that shrink.
        shrink_tiles: u32,
        /// First column of each projection; past every column where there is none.
        site_begin: [u32; 4],
    }
}

/// Semantics: `y[t] (+)= W · x[t] + B · u[t]`.
pub struct DenseGemm<'a> {
    /// T.
    pub rows: usize,
    /// How the work is cut: that of [`Cut::of`].
    pub cut: Cut,
    /// f32 `[T, in]`.
    pub x: &'a View,
    /// One matrix `[out, in]`.
    pub weights: &'a Weights,
    /// The adapters and their site, whose projections are the columns of y in order.
    pub adapters: Option<(&'a Shrunk, &'a LoraSite)>,
    /// f32 `[T, out]`, written or added to.
    pub y: &'a View,
    /// Add to y.
    pub accumulate: bool,
}

/// How a product of few rows is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cut {
    /// Rows that a weight is read for at once.
    pub tile: u32,
    /// Columns of a subgroup, which share the loads of x.
    pub per_lane: u32,
    /// Loads of each row of the weights that a lane has on the way at once.
    pub steps: u32,
}

/// Rows that are few at most.
pub const MOST_ROWS: usize = 8;
/// The tile height of more rows than one.
const TILE: u32 = 4;

/// Whether `rows` rows are so few that products of theirs may be cut in this way: only where a subgroup reads a row together.
pub fn few(caps: &Capabilities, rows: usize) -> bool {
    caps.along_depth && (1..=MOST_ROWS).contains(&rows)
}

impl Cut {
    /// The cut for `rows` rows and a matrix `[out_dim, in_dim]`; `None` where this stage is not for them.
    pub fn of(caps: &Capabilities, rows: usize, out_dim: usize, in_dim: usize) -> Option<Self> {
        // Columns of their own suit the highest tiles of a product that fills the device.
        if !few(caps, rows) || expert_gemm::dense_tile(caps, rows, out_dim) >= MOST_ROWS {
            return None;
        }
        // As many columns a subgroup as leave enough subgroups to fill the device.
        let wide = [caps.tuning.two_columns_from, caps.tuning.four_columns_from];
        let per_lane = 1 << wide.iter().filter(|n| out_dim >= **n).count();
        // A narrow product reads its weights out of the cache for each row: what counts is how many subgroups share the work.
        let tile = if rows == 1 || per_lane == 1 { 1 } else { TILE };
        // About eight loads of weights on the way.
        let steps = match (rows::steps(caps, in_dim), per_lane) {
            (steps, 1) => 2 * steps,
            (4, 4) => 2,
            (steps, _) => steps,
        };
        Some(Self { tile, per_lane, steps })
    }
}

/// What a product does about adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Adapters {
    /// Nothing.
    None,
    /// Adds the second half.
    Adds,
    /// Has the first half beside it.
    Shrinks,
}

/// The variables of one variant.
pub fn vars(caps: &Capabilities, dtype: DType, cut: Cut, adapters: Adapters) -> Vars {
    let shrinks = adapters == Adapters::Shrinks;
    // A row of A is all that a subgroup reads: as much of it at once as registers hold.
    let a_steps = if cut.steps.is_multiple_of(3) { 6 } else { 8 };
    vec![
        ("dtype", dtype.name().into()),
        ("tile", cut.tile.into()),
        ("per_lane", cut.per_lane.into()),
        ("steps", cut.steps.into()),
        ("lora", (adapters == Adapters::Adds).into()),
        ("shrinks", shrinks.into()),
        ("a_steps", if shrinks { a_steps } else { 0 }.into()),
        ("lanes", (rows::SUBGROUPS * caps.row_lanes).into()),
        ("depth_lanes", caps.row_lanes.into()),
    ]
}

impl DenseGemm<'_> {
    /// Records the stage: one dispatch for each piece of the weights.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let adapters = if self.adapters.is_some() { Adapters::Adds } else { Adapters::None };
        let vars = vars(rec.gpu().capabilities(), self.weights.dtype, self.cut, adapters);
        let pipeline = pipeline(rec.gpu(), &DENSE_GEMM, vars)?;
        let mut site_begin = [u32::MAX; 4];
        let (mut projections, mut max_rank, mut u, mut pool) = (0, 0, self.x, self.x);
        if let Some((shrunk, site)) = self.adapters {
            (projections, max_rank) = (site.out_dims.len() as u32, shrunk.max_rank as u32);
            (u, pool) = (&shrunk.u, &shrunk.pool);
            let mut begin = 0;
            for (at, columns) in site_begin.iter_mut().zip(&site.out_dims) {
                *at = begin;
                begin += *columns as u32;
            }
        }
        for (piece, view) in &self.weights.pieces {
            let params = DenseGemmParams { projections, max_rank, site_begin, ..self.params(piece) };
            let buffers = [self.x, view, u, pool, self.y];
            rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &self.grid(piece, 0));
        }
        Ok(())
    }

    /// Records the product alone and beside it the first half of the adapters of its rows, the whole tokens of `shrink`, into `u`:
    /// u32 `[T, projections, 4 + max_rank]` with room for that rank rounded up to 8. Whoever reads y has to add the second half.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record_shrink(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        shrink: &PairShrink<'_>,
        u: View,
    ) -> Result<Shrunk> {
        let vars = vars(rec.gpu().capabilities(), self.weights.dtype, self.cut, Adapters::Shrinks);
        let pipeline = pipeline(rec.gpu(), &DENSE_GEMM_SHRINK, vars)?;
        let PairShrink { site, factors, slots, .. } = *shrink;
        let (projections, max_rank) = (site.out_dims.len(), shrink.max_rank.next_multiple_of(8));
        let items = self.rows * (projections * max_rank).div_ceil(rows::SUBGROUPS as usize);
        for (i, (piece, view)) in self.weights.pieces.iter().enumerate() {
            let shrink_tiles = if i == 0 { items.div_ceil(self.tiles()) as u32 } else { 0 };
            let params = DenseGemmParams {
                projections: projections as u32,
                max_rank: max_rank as u32,
                index_base: site.index_base as u32,
                slots: slots as u32,
                shrink_tiles,
                ..self.params(piece)
            };
            let (pool, index, mapping) = (factors.pool(site), &factors.index, shrink.token_lora_mapping);
            let buffers = [self.x, view, pool, index, mapping, self.y, &u, shrink.status];
            rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &self.grid(piece, shrink_tiles));
        }
        Ok(Shrunk { u, max_rank, chunks: 1, pool: factors.pool(site).clone() })
    }

    /// Sizes of the product with one piece, without adapters.
    fn params(&self, piece: &Piece) -> DenseGemmParams {
        DenseGemmParams {
            rows: self.rows as u32,
            x_stride: (self.weights.in_dim / 4) as u32,
            groups: (self.weights.in_dim / 8) as u32,
            out_rows: piece.rows as u32,
            out_begin: piece.row_begin as u32,
            y_stride: self.weights.out_dim as u32,
            accumulate: u32::from(self.accumulate),
            projections: 0,
            max_rank: 0,
            index_base: 0,
            slots: 0,
            shrink_tiles: 0,
            site_begin: [u32::MAX; 4],
        }
    }

    fn tiles(&self) -> usize {
        self.rows.div_ceil(self.cut.tile as usize)
    }

    fn grid(&self, piece: &Piece, shrink_tiles: u32) -> Grid {
        let columns = piece.rows.div_ceil((rows::SUBGROUPS * self.cut.per_lane) as usize);
        Grid::Direct([self.tiles() as u32, shrink_tiles + columns as u32, 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_share_weights_and_wide_products_share_inputs() {
        for caps in crate::plan::classes::classes() {
            let of = |rows, out_dim| Cut::of(&caps, rows, out_dim, 4096).map(|cut| (cut.tile, cut.per_lane));
            let got = [of(1, 128), of(4, 128), of(1, 2048), of(4, 2048), of(1, 1 << 17)];
            if caps.along_depth {
                assert_eq!(got, [Some((1, 1)), Some((1, 1)), Some((1, 2)), Some((4, 2)), Some((1, 4))]);
            } else {
                assert_eq!(got, [None; 5]);
            }
            assert_eq!([of(0, 2048), of(9, 2048), of(8, 1 << 17)], [None; 3]);
        }
    }
}
