//! Rows of packed x as blocks in the order of the tiles: what matrices load straight from memory.

use crate::error::Result;
use crate::kernels::Recording;
use crate::kernels::align::Aligned;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::pack::{Blocks, Packed};
use crate::kernels::params::params;
use crate::plan::matrix::{EDGE, MatrixTile};

/// The shader.
pub static TILE_ROWS: Kernel = Kernel { stem: "tile_rows", reads: 2, writes: 1 };

params! {
    /// Sizes of one rearrangement.
    TileRowsParams {
        /// P.
        rows: u32,
        /// Pairs that share a row of x.
        row_div: u32,
        /// Groups of eight in a row of x.
        groups: u32,
        /// Blocks in a row of the result.
        blocks: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// Groups from a row of x to the next.
        x_stride: u32,
        /// Where the exponents begin in x, in words of eight bytes.
        exponents: u32,
        /// Where they begin behind the blocks.
        block_exponents: u32,
    }
}

/// Semantics: row r of the result is `x[sorted_token_ids[r] / row_div]` with zeros behind; a row of padding holds anything. Exponents,
/// and what stands beside them, follow in the same order.
pub struct TileRows<'a> {
    /// P.
    pub rows: usize,
    /// Pairs that share a row of x.
    pub row_div: usize,
    /// The order.
    pub aligned: &'a Aligned,
    /// The cut of the product, whose height the alignment has.
    pub cut: MatrixTile,
    /// `[rows / row_div, K]`.
    pub x: &'a Packed,
}

/// The variables of one variant.
pub fn vars(cut: &MatrixTile) -> Vars {
    vec![("height", cut.height.into())]
}

/// Workgroups of a tile of `height` pairs: each takes 16.
pub(crate) fn columns(height: u32) -> u32 {
    height / EDGE
}

impl TileRows<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader or a buffer of that size.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<Blocks> {
        let blocks = Blocks::scratch(rec, "x in blocks", self.aligned.capacity, self.x.width, &self.cut)?;
        let pipeline = pipeline(rec.gpu(), &TILE_ROWS, vars(&self.cut))?;
        let params = TileRowsParams {
            rows: self.rows as u32,
            row_div: self.row_div as u32,
            groups: (self.x.width / 8) as u32,
            blocks: blocks.per_row as u32,
            sorted_base: self.aligned.sorted_base,
            x_stride: (self.x.stride() / 8) as u32,
            exponents: self.x.exponents(),
            block_exponents: blocks.exponents,
        };
        let buffers = [&self.x.view, &self.aligned.view, &blocks.view];
        let grid = self.aligned.grid(columns(self.cut.height))?;
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(blocks)
    }
}
