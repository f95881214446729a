//! The activation of narrow experts in front of a direct product, which takes h as blocks in the order of the tiles.

use crate::activation::Activation;
use crate::error::Result;
use crate::kernels::activation::{ActivatePack, constants, name};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::pack::Blocks;
use crate::kernels::params::params;
use crate::kernels::{Recording, tile_rows};
use crate::plan::capabilities::Capabilities;

/// The shader.
pub static ACTIVATION_BLOCKS: Kernel = Kernel { stem: "activation_blocks", reads: 3, writes: 2 };

params! {
    /// Sizes of one activation.
    ActivationBlocksParams {
        /// P.
        rows: u32,
        /// F / 4.
        quads: u32,
        /// Slope of the clamped swiglu.
        alpha: f32,
        /// Clamp of the clamped swiglu.
        limit: f32,
        /// Pairs that share a row of x.
        row_div: u32,
        /// Where the exponents begin in x, in words of eight bytes.
        exponents: u32,
        /// The inverse power of two of the weights.
        w_unscale: f32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// Blocks in a row of h.
        blocks: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
    }
}

/// Lanes of a row, and values that one keeps at most.
const LANES: usize = 16;
const MOST_VALUES: usize = 64;

/// Whether experts of `width` columns are narrow enough for it; those of wider ones are taken by
/// [`activation_pack`](crate::kernels::activation).
pub fn takes(width: usize) -> bool {
    width <= LANES * MOST_VALUES
}

/// The variables of one function, for tiles of `height` pairs of experts of `width` columns, and whether rows are written as well.
pub fn vars(caps: &Capabilities, kind: Activation, height: u32, width: usize, by_row: bool) -> Vars {
    let quads = (width / 4).div_ceil(LANES) as u32;
    vec![
        ("kind", name(kind).into()),
        ("height", height.into()),
        ("quads", quads.into()),
        ("width", caps.row_lanes.into()),
        ("by_row", by_row.into()),
    ]
}

impl ActivatePack<'_> {
    /// The same with `blocks` of narrow experts.
    pub(super) fn record_blocks(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        blocks: &Blocks,
    ) -> Result<()> {
        let height = self.aligned.tile as u32;
        let pipeline = pipeline(
            rec.gpu(),
            &ACTIVATION_BLOCKS,
            vars(rec.gpu().capabilities(), self.kind, height, self.width, self.h.by_row),
        )?;
        let (alpha, limit) = constants(self.kind);
        let params = ActivationBlocksParams {
            rows: self.rows as u32,
            quads: (self.width / 4) as u32,
            alpha,
            limit,
            row_div: self.row_div as u32,
            exponents: self.x.exponents(),
            w_unscale: self.w_unscale,
            sorted_base: self.aligned.sorted_base,
            blocks: blocks.per_row as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let buffers = [self.gate_up, &self.aligned.view, &self.x.view, &self.h.view, &blocks.view];
        let grid = self.aligned.grid(tile_rows::columns(height))?;
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(())
    }
}
