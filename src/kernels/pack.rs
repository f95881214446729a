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

/// Packed rows: f16 `[rows, width]`, then for each row its exponent, as f16 at the start of eight bytes. With `twice`, what
/// rounding to f16 took from the values of a row lies behind them as f16, too, and `width` counts both.
#[derive(Debug, Clone)]
pub struct Packed {
    /// Both parts.
    pub view: View,
    /// Rows.
    pub rows: usize,
    /// K or 2K: a multiple of 8.
    pub width: usize,
    /// Whether it is 2K.
    pub twice: bool,
}

impl Packed {
    /// Room for `rows` rows of `width` values, rounded to f16.
    ///
    /// # Errors
    /// Those of [`Recording::scratch`].
    pub fn scratch(rec: &mut Recording, label: &'static str, rows: usize, width: usize) -> Result<Self> {
        // Shaders read it in words of 16 bytes.
        let view = rec.scratch(label, (rows * (width / 4 + 1) * 8).next_multiple_of(16) as u64)?;
        Ok(Self { view, rows, width, twice: false })
    }

    /// The same with what rounding takes from them.
    ///
    /// # Errors
    /// Those of [`Recording::scratch`].
    pub fn scratch_twice(rec: &mut Recording, label: &'static str, rows: usize, width: usize) -> Result<Self> {
        Ok(Self { twice: true, ..Self::scratch(rec, label, rows, 2 * width)? })
    }

    /// Where the exponents begin, in words of eight bytes.
    pub fn exponents(&self) -> u32 {
        (self.rows * self.width / 4) as u32
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
pub(crate) fn row_vars() -> Vars {
    vec![("lanes", LANES.into()), ("one_subgroup", false.into())]
}

/// The variables of one variant.
pub fn vars(twice: bool) -> Vars {
    let mut all = row_vars();
    all.push(("twice", twice.into()));
    all
}

impl Pack<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let Packed { rows, width, twice, .. } = *self.packed;
        let pipeline = pipeline(rec.gpu(), &PACK, vars(twice))?;
        let quads = width / if twice { 8 } else { 4 };
        let rows = rows as u32;
        let params = PackParams { rows, quads: quads as u32, pad0: 0, pad1: 0 };
        let buffers = [self.x, &self.packed.view];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, rows));
        Ok(())
    }
}
