//! Rows of f32 as f16, each times a power of two of its own: the left operand of the matrix tier.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};

/// The shader.
pub static PACK: Kernel = Kernel { stem: "pack", reads: 1, writes: 1 };

params! {
    /// Sizes of one packing.
    PackParams {
        /// Rows.
        rows: u32,
        /// K / 4.
        quads: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
    }
}

/// Invocations of a workgroup, which packs a row.
const LANES: u32 = 128;

/// Packed rows: f16 `[rows, width]`, then for each row its exponent, as f16 at the start of eight bytes.
#[derive(Debug, Clone)]
pub struct Packed {
    /// Both parts.
    pub view: View,
    /// Rows.
    pub rows: usize,
    /// K: a multiple of 8.
    pub width: usize,
}

impl Packed {
    /// Room for `rows` rows of `width` values.
    ///
    /// # Errors
    /// Those of [`Recording::scratch`].
    pub fn scratch(rec: &mut Recording, label: &'static str, rows: usize, width: usize) -> Result<Self> {
        let view = rec.scratch(label, (rows * (width / 4 + 1) * 8) as u64)?;
        Ok(Self { view, rows, width })
    }
}

/// Semantics: `packed[r] = f16(x[r] · 2^e[r])` with e such that the largest magnitude of the row lies below 2^15.
pub struct Pack<'a> {
    /// f32 `[rows, width]`.
    pub x: &'a View,
    /// Written.
    pub packed: &'a Packed,
}

/// The variables of the shaders that pack a row a workgroup.
pub fn vars() -> Vars {
    vec![("lanes", LANES.into()), ("one_subgroup", false.into())]
}

impl Pack<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &PACK, vars())?;
        let rows = self.packed.rows as u32;
        let params = PackParams { rows, quads: (self.packed.width / 4) as u32, pad0: 0, pad1: 0 };
        let buffers = [self.x, &self.packed.view];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, rows));
        Ok(())
    }
}
