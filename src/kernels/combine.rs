//! The weighted sum of the experts of each token.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Recording, View, cover};

/// The shader.
pub static COMBINE: Kernel = Kernel { stem: "combine", reads: 3, writes: 1 };

params! {
    /// Sizes of one combination.
    CombineParams {
        /// T.
        tokens: u32,
        /// A.
        top_k: u32,
        /// D / 4.
        quads: u32,
        /// 1: add to out.
        accumulate: u32,
    }
}

/// Semantics: `out[t] (+)= Σ_k w[t,k] · y[t·A + k]` over the pairs with an id of 0 or more.
pub struct Combine<'a> {
    /// T.
    pub tokens: usize,
    /// A.
    pub top_k: usize,
    /// D: a multiple of 4.
    pub hidden: usize,
    /// f32 `[P, D]`.
    pub y: &'a View,
    /// f32 `[T, A]`.
    pub topk_weights: &'a View,
    /// i32 `[T, A]`, local.
    pub ids: &'a View,
    /// f32 `[T, D]`, written or added to.
    pub out: &'a View,
    /// Add to out.
    pub accumulate: bool,
}

impl Combine<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &COMBINE, Vars::new())?;
        let params = CombineParams {
            tokens: self.tokens as u32,
            top_k: self.top_k as u32,
            quads: (self.hidden / 4) as u32,
            accumulate: u32::from(self.accumulate),
        };
        let buffers = [self.y, self.topk_weights, self.ids, self.out];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &cover(self.tokens * self.hidden / 4));
        Ok(())
    }
}
