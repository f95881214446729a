//! What memory does at best.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};

/// The shader.
pub static STREAM: Kernel = Kernel { stem: "stream", reads: 1, writes: 1 };

params! {
    /// Size of one copy.
    StreamParams {
        /// Groups of four words.
        quads: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
    }
}

/// Copies one buffer to another of the same size, a multiple of 16 bytes.
pub struct Stream<'a> {
    /// Read.
    pub from: &'a View,
    /// Written.
    pub to: &'a View,
}

impl Stream<'_> {
    /// Records the copy.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &STREAM, Vars::new())?;
        let quads = (self.from.size.min(self.to.size) / 16) as u32;
        let params = StreamParams { quads, pad0: 0, pad1: 0, pad2: 0 };
        let grid = Grid::folded(1, quads.div_ceil(256));
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &[self.from, self.to], &grid);
        Ok(())
    }
}
