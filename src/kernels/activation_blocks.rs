//! The activation in front of a direct product, which takes h as blocks in the order of the tiles.

use crate::activation::Activation;
use crate::error::Result;
use crate::kernels::Recording;
use crate::kernels::activation::{ActivatePack, constants, name};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::pack::Blocks;
use crate::kernels::params::params;
use crate::plan::matrix::EDGE;

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

/// Groups of four columns that a lane loads at a time: experts of 768 columns take two rounds.
const AT_ONCE: u32 = 6;

/// The variables of one function, for tiles of `height` pairs, and whether rows are written as well.
pub fn vars(kind: Activation, height: u32, by_row: bool) -> Vars {
    vec![("kind", name(kind).into()), ("height", height.into()), ("by_row", by_row.into()), ("at_once", AT_ONCE.into())]
}

impl ActivatePack<'_> {
    /// The same with `blocks`.
    pub(super) fn record_blocks(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        blocks: &Blocks,
    ) -> Result<()> {
        let height = self.aligned.tile as u32;
        let pipeline = pipeline(rec.gpu(), &ACTIVATION_BLOCKS, vars(self.kind, height, self.h.by_row))?;
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
        let grid = self.aligned.grid(height / EDGE)?;
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(())
    }
}
