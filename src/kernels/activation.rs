//! The gated non-linearity between the two expert products.

use crate::activation::Activation;
use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::pack::{self, Packed};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View, cover};

/// f32 to f32.
pub static ACTIVATION: Kernel = Kernel { stem: "activation", reads: 2, writes: 1 };
/// f32 to packed rows.
pub static ACTIVATION_PACK: Kernel = Kernel { stem: "activation_pack", reads: 2, writes: 1 };

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

/// Where h goes.
#[derive(Clone, Copy)]
pub enum Hidden<'a> {
    /// f32 `[P, F]`.
    Plain(&'a View),
    /// For a product of the matrix tier.
    Packed(&'a Packed),
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
    /// `[P, F]`, written.
    pub h: Hidden<'a>,
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

/// The variables of one function that packs its result.
pub fn pack_vars(kind: Activation, dense: bool) -> Vars {
    let mut all = vars(kind, dense);
    all.extend(pack::vars());
    all
}

impl Activate<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let dense = self.ids.is_none();
        let (pipeline, h, grid) = match self.h {
            Hidden::Plain(h) => {
                (pipeline(rec.gpu(), &ACTIVATION, vars(self.kind, dense))?, h, cover(self.rows * self.width / 4))
            }
            Hidden::Packed(h) => {
                let pipeline = pipeline(rec.gpu(), &ACTIVATION_PACK, pack_vars(self.kind, dense))?;
                (pipeline, &h.view, Grid::folded(1, self.rows as u32))
            }
        };
        let (alpha, limit) =
            if let Activation::SwigluClamped { alpha, limit } = self.kind { (alpha, limit) } else { (0.0, 0.0) };
        let params = ActivationParams { rows: self.rows as u32, quads: (self.width / 4) as u32, alpha, limit };
        let ids = self.ids.unwrap_or(self.gate_up);
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &[self.gate_up, ids, h], &grid);
        Ok(())
    }
}
