//! What a device does with subgroups and matrices, for those whose back end does not tell
//! ([`asks_subgroups`](crate::plan::matrix::asks_subgroups)).

use half::f16;

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::matrix::{self, EDGE};

/// The shader.
pub static MATRIX_PROBE: Kernel = Kernel { stem: "matrix_probe", reads: 0, writes: 1 };

params! {
    /// What the operands are made of.
    MatrixProbeParams {
        /// They are small multiples of it.
        unit: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
    }
}

/// Invocations of the workgroup: two subgroups of the size that is hoped for.
const LANES: usize = 64;
/// Products that are kept: one of each of these subgroups.
const PRODUCTS: usize = 2;
/// Values of a block.
const BLOCK: usize = (EDGE * EDGE) as usize;
/// Words that each invocation leaves: the size of its subgroup, the number of it, and its own place in it.
const TOLD: usize = 3;
/// Words of the result.
pub const WORDS: usize = LANES * TOLD + PRODUCTS * BLOCK;

/// The variables for matrices of `edge`.
pub fn vars(edge: u32) -> Vars {
    let [lanes, products] = [LANES, PRODUCTS].map(|n| n as u32);
    vec![("edge", edge.into()), ("lanes", lanes.into()), ("products", products.into())]
}

/// Semantics: `out` holds what each invocation knows of its subgroup, u32 `[64, 3]`, and behind it one product of two blocks for each
/// of two subgroups, f32 `[2, 16, 16]`.
pub struct MatrixProbe<'a> {
    /// Rows of the matrices.
    pub edge: u32,
    /// [`WORDS`], written.
    pub out: &'a View,
}

impl MatrixProbe<'_> {
    /// Records the one workgroup.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &MATRIX_PROBE, vars(self.edge))?;
        let params = MatrixProbeParams { unit: 1, pad0: 0, pad1: 0, pad2: 0 };
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &[self.out], &Grid::Direct([1, 1, 1]));
        Ok(())
    }
}

/// An element of the operands, as the shader makes it: exact, and different along rows and columns.
fn operand(i: usize) -> f32 {
    f16::from_f32(((i * 5 + i / 16 * 3) % 11) as f32).to_f32()
}

/// What the product must be: of a block by rows and one by columns.
pub fn product(row: usize, column: usize) -> f32 {
    (0..16).map(|k| operand(row * 16 + k) * operand(BLOCK + column * 16 + k)).sum()
}

/// The size of the device's subgroups by what the probe left, if it is one that this tier takes, if subgroups are runs of consecutive
/// invocations, as its shaders take for granted, and if their products are right.
pub fn subgroup_size(words: &[u32]) -> Option<u32> {
    let (told, products) = words.split_at_checked(LANES * TOLD)?;
    let size = told[0];
    if products.len() < PRODUCTS * BLOCK || !matrix::takes_subgroups(size, size) {
        return None;
    }
    let own = |lane: usize| [size, lane as u32 / size, lane as u32 % size];
    let runs = told.chunks_exact(TOLD).enumerate().all(|(lane, words)| words == own(lane));
    let mut values = products.chunks_exact(BLOCK).take(PRODUCTS).flat_map(|block| block.iter().enumerate());
    let right = values.all(|(at, bits)| f32::from_bits(*bits) == product(at / 16, at % 16));
    (runs && right).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left_by(size: u32) -> Vec<u32> {
        let told = (0..LANES as u32).flat_map(|lane| [size, lane / size, lane % size]);
        let products = (0..PRODUCTS * BLOCK).map(|i| product(i % BLOCK / 16, i % 16).to_bits());
        told.chain(products).collect()
    }

    #[test]
    fn only_a_device_that_does_all_as_the_shaders_want_it_has_a_size() {
        assert_eq!(subgroup_size(&left_by(32)), Some(32));
        for size in [4, 16, 64] {
            assert_eq!(subgroup_size(&left_by(size)), None);
        }
        // Nothing ran; other invocations share a subgroup; a product is wrong, also by its sign alone.
        assert_eq!(subgroup_size(&vec![0; WORDS]), None);
        for (at, xor) in [(TOLD * 40 + 1, 1), (TOLD * 5 + 2, 8), (WORDS - 1, 1 << 31), (LANES * TOLD + 17, 1 << 23)] {
            let mut words = left_by(32);
            words[at] ^= xor;
            assert_eq!(subgroup_size(&words), None, "{at}");
        }
        assert_eq!(subgroup_size(&left_by(32)[..WORDS - 1]), None);
    }
}
