//! The gated non-linearity between the two expert products.

use crate::activation::Activation;
use crate::error::Result;
use crate::kernels::align::Aligned;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::pack::{self, Packed};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View, activation_blocks, cover};

/// f32 to f32.
pub static ACTIVATION: Kernel = Kernel { stem: "activation", reads: 2, writes: 1 };
/// Products of the matrix tier to packed rows.
pub static ACTIVATION_PACK: Kernel = Kernel { stem: "activation_pack", reads: 4, writes: 1 };
/// The same with blocks.
pub static ACTIVATION_PACK_BLOCKS: Kernel = Kernel { stem: "activation_pack", reads: 4, writes: 2 };

params! {
    /// Sizes and constants of one activation.
    ActivationParams {
        /// P, or T when dense.
        rows: u32,
        /// F / 4.
        quads: u32,
        /// Slope of the clamped swiglu.
        alpha: f32,
        /// Clamp of the clamped swiglu.
        limit: f32,
    }
}

params! {
    /// Sizes and constants of one activation that packs.
    ActivationPackParams {
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
        /// Inverse power of two of the weights.
        w_unscale: f32,
        /// Word of the places of the pairs.
        places_base: u32,
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

/// Semantics: `h[p] = act(gate[p]) · up[p]`; rows of negative ids are left alone.
pub struct Activate<'a> {
    /// P, or T when dense.
    pub rows: usize,
    /// F: a multiple of 4.
    pub width: usize,
    /// Which function.
    pub kind: Activation,
    /// f32 `[P, 2F]`, or `[P, F]` without a gate.
    pub gate_up: &'a View,
    /// i32 `[P]`; `None` when dense.
    pub ids: Option<&'a View>,
    /// f32 `[P, F]`, written.
    pub h: &'a View,
}

/// The same for the matrix tier: gate and up lie in the order of the tiles and keep the powers of two of their operands, h is
/// packed.
pub struct ActivatePack<'a> {
    /// P.
    pub rows: usize,
    /// F: a multiple of 8.
    pub width: usize,
    /// Which function.
    pub kind: Activation,
    /// f32 `[C, 2F]`, or `[C, F]` without a gate.
    pub gate_up: &'a View,
    /// i32 `[P]`.
    pub ids: &'a View,
    /// The order of gate and up.
    pub aligned: &'a Aligned,
    /// What they were made from: rows with exponents.
    pub x: &'a Packed,
    /// Pairs that share a row of x.
    pub row_div: usize,
    /// The inverse power of two of the weights.
    pub w_unscale: f32,
    /// `[P, F]`, written; blocks in the order of gate and up.
    pub h: &'a Packed,
}

/// Its word in shaders.
pub(crate) fn name(kind: Activation) -> &'static str {
    match kind {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::SwigluClamped { .. } => "swiglu_clamped",
        Activation::ReluSquared => "relu_squared",
    }
}

/// Slope and clamp; 0 where there are none.
pub(crate) fn constants(kind: Activation) -> (f32, f32) {
    if let Activation::SwigluClamped { alpha, limit } = kind { (alpha, limit) } else { (0.0, 0.0) }
}

/// The variables of one function.
pub fn vars(kind: Activation, dense: bool) -> Vars {
    vec![("kind", name(kind).into()), ("dense", dense.into())]
}

/// The variables of one function that packs its result.
pub fn pack_vars(kind: Activation, [by_row, blocks]: [bool; 2]) -> Vars {
    let mut all = pack::row_vars();
    all.extend([("kind", name(kind).into()), ("by_row", by_row.into()), ("blocks", blocks.into())]);
    all
}

impl Activate<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &ACTIVATION, vars(self.kind, self.ids.is_none()))?;
        let (alpha, limit) = constants(self.kind);
        let params = ActivationParams { rows: self.rows as u32, quads: (self.width / 4) as u32, alpha, limit };
        let ids = self.ids.unwrap_or(self.gate_up);
        let grid = cover(self.rows * self.width / 4);
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &[self.gate_up, ids, self.h], &grid);
        Ok(())
    }
}

impl ActivatePack<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        if let Some(blocks) = self.h.blocks.as_ref().filter(|_| activation_blocks::takes(self.width)) {
            return self.record_blocks(rec, pass, blocks);
        }
        let Packed { by_row, ref blocks, .. } = *self.h;
        let kernel = if blocks.is_some() { &ACTIVATION_PACK_BLOCKS } else { &ACTIVATION_PACK };
        let pipeline = pipeline(rec.gpu(), kernel, pack_vars(self.kind, [by_row, blocks.is_some()]))?;
        let (alpha, limit) = constants(self.kind);
        let params = ActivationPackParams {
            rows: self.rows as u32,
            quads: (self.width / 4) as u32,
            alpha,
            limit,
            row_div: self.row_div as u32,
            exponents: self.x.exponents(),
            w_unscale: self.w_unscale,
            places_base: self.aligned.places_base,
            blocks: blocks.as_ref().map_or(0, |b| b.per_row as u32),
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let mut buffers = vec![self.gate_up, self.ids, &self.aligned.view, &self.x.view, &self.h.view];
        buffers.extend(blocks.as_ref().map(|b| &b.view));
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, self.rows as u32));
        Ok(())
    }
}
