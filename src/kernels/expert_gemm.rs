//! Matrix products with resident weights: one matrix for all rows, or one of many chosen by expert id.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::expert_gemm_matrix::{ExpertGemmMatrix, Leaves};
use crate::kernels::lanes::{along_depth, carriers, lanes, per_lane};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::operands::{DENSE, Rows, TILES, Weights};
use crate::kernels::pack::{Form, Packed, pack};
use crate::kernels::params::params;
use crate::kernels::tile_rows;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{self, MatrixTile};
use crate::plan::rows::SUBGROUPS;

/// The shader.
pub static EXPERT_GEMM: Kernel = Kernel { stem: "expert_gemm", reads: 3, writes: 1 };

params! {
    /// Sizes of one product with one piece of the weights.
    ExpertGemmParams {
        /// P, or T when dense.
        rows: u32,
        /// Pairs that share a row of x.
        row_div: u32,
        /// Row of x in vec4.
        x_stride: u32,
        /// Groups of eight in a row of W.
        groups: u32,
        /// Rows of W in this piece.
        out_rows: u32,
        /// First column of y.
        out_begin: u32,
        /// Row of y in elements.
        y_stride: u32,
        /// First matrix of this piece.
        first: u32,
        /// Matrices of this piece.
        count: u32,
        /// 1: add to y.
        accumulate: u32,
        /// Word of `expert_ids`.
        expert_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
    }
}

/// Semantics: `y[p] (+)= W[id(p)] · x[p / row_div]`; rows of negative ids are left alone.
pub struct ExpertGemm<'a> {
    /// P, or T when dense.
    pub rows: usize,
    /// Pairs that share a row of x.
    pub row_div: usize,
    /// Which rows meet which matrix.
    pub select: Rows<'a>,
    /// f32 `[rows / row_div, in]`.
    pub x: &'a View,
    /// The matrices.
    pub weights: &'a Weights,
    /// f32 `[rows, y_stride]`, written or added to.
    pub y: &'a View,
    /// Row of y in elements.
    pub y_stride: usize,
    /// Add to y.
    pub accumulate: bool,
    /// As exact as f32 arithmetic on every tier: for the router, whose logits decide ids.
    pub exact: bool,
}

/// Tile height of a dense product of `rows` rows with `out_rows` columns.
pub fn dense_tile(caps: &Capabilities, rows: usize, out_rows: usize) -> usize {
    // High tiles with columns of their own make few workgroups of a narrow product: a router would leave a GPU idle.
    let workgroups = rows.div_ceil(8) * column_tiles(caps, DENSE, out_rows, 8) as usize;
    // A narrow product reads its weights out of the cache for each row: what counts is how many subgroups share the work.
    let single = rows * column_tiles(caps, DENSE, out_rows, 1) as usize;
    match rows {
        0..=1 => 1,
        _ if caps.along_depth && single <= caps.tuning.dense_single_workgroups => 1,
        2..=5 => 4,
        _ if caps.along_depth && workgroups < caps.tuning.dense_tile_workgroups => 4,
        _ => 8,
    }
}

/// The variables of one variant.
pub fn vars(caps: &Capabilities, dtype: DType, rows: &'static str, tile: usize) -> Vars {
    vec![
        ("dtype", dtype.name().into()),
        ("rows", rows.into()),
        ("tile", (tile as u32).into()),
        ("per_lane", per_lane(caps, rows, tile).into()),
        ("lanes", lanes(caps, tile)[0].into()),
        ("depth_lanes", lanes(caps, tile)[1].into()),
        ("carriers", carriers(caps).into()),
    ]
}

/// Column tiles of a product with `out_rows` rows of weights for `rows` at tile height `tile`.
fn column_tiles(caps: &Capabilities, rows: &str, out_rows: usize, tile: usize) -> u32 {
    if let Some(cut) = MatrixTile::of(caps, tile) {
        return (out_rows as u32).div_ceil(cut.columns);
    }
    let owners = if along_depth(caps, tile) { SUBGROUPS } else { caps.gemm_lanes };
    out_rows.div_ceil((owners * per_lane(caps, rows, tile)) as usize) as u32
}

impl Weights {
    /// Column tiles of every piece, and what goes before them, to announce to an alignment.
    pub fn columns(&self, caps: &Capabilities, tile: usize) -> impl Iterator<Item = u32> {
        let pieces = self.pieces.iter().map(|(p, _)| column_tiles(caps, TILES, p.rows, tile));
        // Of a direct cut the blocks of x, and those of u, of which a workgroup makes a tile's.
        let blocks = MatrixTile::direct_of(caps, tile).into_iter().flat_map(|cut| [tile_rows::columns(cut.height), 1]);
        pieces.chain(blocks).collect::<Vec<_>>().into_iter()
    }
}

/// How a dense product of `rows` rows is cut on cooperative matrices; `None` where it does not run on them.
pub(crate) fn dense_on_matrices(
    caps: &Capabilities,
    rows: usize,
    weights: &Weights,
    exact: bool,
) -> Option<MatrixTile> {
    let possible = caps.matrix && weights.magnitude.exponent().is_some() && (!exact || matrix::exact(caps, rows));
    let cut = if exact { matrix::parted } else { |caps: &_, rows, columns| matrix::dense(caps, rows, columns, false) };
    cut(caps, rows, weights.out_dim).filter(|_| possible)
}

/// In which form such a product without adapters reads x.
pub(crate) fn dense_form(tile: MatrixTile, exact: bool) -> Form {
    let cut = Some(tile).filter(|tile| tile.direct);
    if exact { Form::TWICE } else { Form { by_row: cut.is_none(), cut, ..Form::ROWS } }
}

impl ExpertGemm<'_> {
    /// Records the stage: one dispatch for each piece of the weights.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let caps = rec.gpu().capabilities().clone();
        if matches!(self.select, Rows::Dense)
            && let Some(tile) = dense_on_matrices(&caps, self.rows, self.weights, self.exact)
        {
            // No row of blocks is shared.
            let form = Some(dense_form(tile, self.exact)).filter(|form| form.cut.is_none() || self.row_div == 1);
            let form = form.unwrap_or(Form::ROWS);
            let size = [self.rows.div_ceil(self.row_div), self.weights.in_dim];
            let packed = pack(rec, pass, ["packed", "packed blocks"], self.x, size, &form)?;
            return self.record_packed(rec, pass, &packed, 1);
        }
        let tile = match self.select {
            Rows::Dense => dense_tile(&caps, self.rows, self.weights.out_dim),
            Rows::Pairs(_) => 1,
            Rows::Tiles(aligned) => aligned.tile,
        };
        let pipeline = pipeline(rec.gpu(), &EXPERT_GEMM, vars(&caps, self.weights.dtype, self.select.name(), tile))?;
        let (ids, expert_base, sorted_base) = self.select.ids(self.x);
        for (piece, view) in &self.weights.pieces {
            let params = ExpertGemmParams {
                rows: self.rows as u32,
                row_div: self.row_div as u32,
                x_stride: (self.weights.in_dim / 4) as u32,
                groups: (self.weights.in_dim / 8) as u32,
                out_rows: piece.rows as u32,
                out_begin: piece.row_begin as u32,
                y_stride: self.y_stride as u32,
                first: piece.first as u32,
                count: piece.count as u32,
                accumulate: u32::from(self.accumulate),
                expert_base,
                sorted_base,
            };
            let columns = column_tiles(&caps, self.select.name(), piece.rows, tile);
            let grid = match self.select {
                Rows::Tiles(aligned) => aligned.grid(columns)?,
                _ => Grid::folded(columns, self.rows.div_ceil(tile) as u32),
            };
            rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &[self.x, view, ids, self.y], &grid);
        }
        Ok(())
    }

    /// Records a dense product on cooperative matrices for rows that are packed in the form of [`dense_form`], in so many `parts` of its
    /// depth.
    pub(crate) fn record_packed(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        x: &Packed,
        parts: usize,
    ) -> Result<()> {
        let Self { rows, row_div, select, weights, y, y_stride, accumulate, .. } = *self;
        let adapters = None;
        let leaves = Leaves::Sums;
        ExpertGemmMatrix { rows, row_div, select, x, weights, y, y_stride, accumulate, parts, adapters, leaves }
            .record(rec, pass)
    }
}
