//! How often each expert is chosen.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Recording, View, cover};

/// The shader.
pub static COUNT: Kernel = Kernel { stem: "count", reads: 1, writes: 1 };

params! {
    /// Sizes of one count.
    CountParams {
        /// Pairs of real tokens; the rest does not count.
        valid_pairs: u32,
        /// E.
        experts: u32,
        /// First count of the layer.
        base: u32,
        /// Padding.
        pad0: u32,
    }
}

/// Semantics: `counts[layer, ids[p]] += 1` for p below `valid_pairs`; ids that are no expert count nowhere.
pub struct Count<'a> {
    /// Pairs of real tokens.
    pub valid_pairs: usize,
    /// E.
    pub experts: usize,
    /// Row of `counts`.
    pub layer: usize,
    /// i32 `[P]`, global.
    pub topk_ids: &'a View,
    /// u32 `[layers, E]`, added to.
    pub counts: &'a View,
}

impl Count<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &COUNT, Vars::new())?;
        let params = CountParams {
            valid_pairs: self.valid_pairs as u32,
            experts: self.experts as u32,
            base: (self.layer * self.experts) as u32,
            pad0: 0,
        };
        let buffers = [self.topk_ids, self.counts];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &cover(self.valid_pairs));
        Ok(())
    }
}
