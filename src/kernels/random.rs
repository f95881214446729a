//! Random weights made on the device, and the same values on the host.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Recording, View, cover};
use crate::plan::matrix::{Magnitude, Norms, weight_exponent};

/// The shader.
pub static RANDOM: Kernel = Kernel { stem: "random", reads: 0, writes: 1 };

params! {
    /// One binding to fill.
    RandomParams {
        /// Groups of eight weights.
        groups: u32,
        /// Seed.
        seed: u32,
        /// A power of two: magnitudes lie below it.
        scale: f32,
        /// The number of the first weight.
        first: u32,
    }
}

/// Values in (-2^exponent, 2^exponent), odd multiples of 2^(exponent-8): exact in f32, f16 and bf16, never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Random {
    /// Storage type: f32, f16 or bf16.
    pub dtype: DType,
    /// From -6 to 7, so that f16 holds every value.
    pub exponent: i32,
    /// Stacks with other seeds are other weights.
    pub seed: u32,
}

/// The variables for one storage type.
pub fn vars(dtype: DType) -> Vars {
    vec![("dtype", dtype.name().into())]
}

impl Random {
    /// Weights whose products with rows of `in_dim` values neither grow nor vanish: their variance is near 1 / (3·in).
    pub fn for_rows(dtype: DType, in_dim: usize, seed: u32) -> Self {
        let exponent = -((in_dim.max(1) as f32).log2() / 2.0) as i32;
        Self { dtype, exponent: exponent.max(-6), seed }
    }

    /// The weight number `at` of a stack, counted through its matrices, row by row.
    pub fn value(&self, at: u32) -> f32 {
        let mixed = |mut v: u32| {
            v = (v ^ (v >> 16)).wrapping_mul(0x7feb_352d);
            v = (v ^ (v >> 15)).wrapping_mul(0x846c_a68b);
            v ^ (v >> 16)
        };
        let steps = (mixed(at.wrapping_add(mixed(self.seed))) >> 24) as i32;
        (2 * steps - 255) as f32 * self.scale() / 256.0
    }

    fn scale(&self) -> f32 {
        (self.exponent as f32).exp2()
    }

    /// What a stack of these weights with rows of `in_dim` has as its magnitude on the matrix tier.
    pub fn magnitude(&self, in_dim: usize) -> Magnitude {
        let exponent = weight_exponent(self.dtype, &[self.scale() * (255.0 / 256.0)]);
        let longest = self.scale() * (in_dim as f32).sqrt();
        // Of values that are spread evenly the mean square is a third of the largest.
        Magnitude::known(exponent, Some(Norms { longest, typical: longest / 3f32.sqrt() }))
    }

    /// Records `n` weights, a multiple of 8, from number `first` on.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn fill(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        to: &View,
        first: u32,
        n: usize,
    ) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &RANDOM, vars(self.dtype))?;
        let params = RandomParams { groups: (n / 8) as u32, seed: self.seed, scale: self.scale(), first };
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &[to], &cover(n / 8));
        Ok(())
    }
}
