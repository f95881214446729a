//! The weighted sum of the experts of each token.

use crate::error::Result;
use crate::kernels::align::Aligned;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::pack::Packed;
use crate::kernels::params::params;
use crate::kernels::{Recording, View, cover};

/// The shader.
pub static COMBINE: Kernel = Kernel { stem: "combine", reads: 3, writes: 1 };
/// The same for products of the matrix tier.
pub static COMBINE_TILES: Kernel = Kernel { stem: "combine_tiles", reads: 5, writes: 1 };

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

params! {
    /// Sizes of one combination of products of the matrix tier.
    CombineTilesParams {
        /// T.
        tokens: u32,
        /// A.
        top_k: u32,
        /// D / 4.
        quads: u32,
        /// Row of y in vec4.
        y_quads: u32,
        /// 1: add to out.
        accumulate: u32,
        /// Where the exponents begin in h, in words of eight bytes.
        exponents: u32,
        /// Inverse of the powers of two of all of y.
        unscale: f32,
        /// Word of the places of the pairs.
        places_base: u32,
    }
}

/// The same where y lies in the order of the tiles and keeps the powers of two of its operands.
pub struct CombineTiles<'a> {
    /// T.
    pub tokens: usize,
    /// A.
    pub top_k: usize,
    /// D: a multiple of 4.
    pub hidden: usize,
    /// f32 `[C, y_stride]`, or f16.
    pub y: &'a View,
    /// It is f16, times 2 to this power.
    pub halves: Option<i32>,
    /// Row of y in elements: a multiple of 4.
    pub y_stride: usize,
    /// f32 `[T, A]`.
    pub topk_weights: &'a View,
    /// i32 `[T, A]`, local.
    pub ids: &'a View,
    /// The order of y.
    pub aligned: &'a Aligned,
    /// What it was made from: a row a pair, with exponents.
    pub h: &'a Packed,
    /// The inverse power of two of the weights.
    pub w_unscale: f32,
    /// f32 `[T, D]`, written or added to.
    pub out: &'a View,
    /// Add to out.
    pub accumulate: bool,
}

/// The variables where y is in the order of the tiles, and of f16.
pub fn tiles_vars(halves: bool) -> Vars {
    vec![("halves", halves.into())]
}

impl CombineTiles<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &COMBINE_TILES, tiles_vars(self.halves.is_some()))?;
        let params = CombineTilesParams {
            tokens: self.tokens as u32,
            top_k: self.top_k as u32,
            quads: (self.hidden / 4) as u32,
            y_quads: (self.y_stride / 4) as u32,
            accumulate: u32::from(self.accumulate),
            exponents: self.h.exponents(),
            unscale: self.w_unscale * 2f32.powi(-self.halves.unwrap_or(0)),
            places_base: self.aligned.places_base,
        };
        let buffers = [self.y, self.topk_weights, self.ids, &self.aligned.view, &self.h.view, self.out];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &cover(self.tokens * self.hidden / 4));
        Ok(())
    }
}
