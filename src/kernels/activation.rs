//! The gated non-linearity between the two expert products.

use crate::activation::Activation;
use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Recording, View, cover};

/// The shader.
pub static ACTIVATION: Kernel = Kernel { stem: "activation", reads: 2, writes: 1 };

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

/// The variables of one function.
pub fn vars(kind: Activation, dense: bool) -> Vars {
    let name = match kind {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::SwigluClamped { .. } => "swiglu_clamped",
        Activation::ReluSquared => "relu_squared",
    };
    vec![("kind", name.into()), ("dense", dense.into())]
}

impl Activate<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &ACTIVATION, vars(self.kind, self.ids.is_none()))?;
        let (alpha, limit) =
            if let Activation::SwigluClamped { alpha, limit } = self.kind { (alpha, limit) } else { (0.0, 0.0) };
        let params = ActivationParams { rows: self.rows as u32, quads: (self.width / 4) as u32, alpha, limit };
        let ids = self.ids.unwrap_or(self.gate_up);
        rec.dispatch(
            pass,
            &pipeline,
            bytemuck::bytes_of(&params),
            &[self.gate_up, ids, self.h],
            &cover(self.rows * self.width / 4),
        );
        Ok(())
    }
}
