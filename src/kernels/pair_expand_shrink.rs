//! Between the two products of few pairs with adapters: the second half of those of gate and up, the activation, and the first half
//! of those of down.

use crate::activation::Activation;
use crate::error::Result;
use crate::kernels::activation;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::pair_gemm_shrink::Sums;
use crate::kernels::pair_shrink::Shrunk;
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;

/// The shader.
pub static PAIR_EXPAND_SHRINK: Kernel = Kernel { stem: "pair_expand_shrink", reads: 4, writes: 3 };

params! {
    /// Sizes of one stage, and constants of its activation.
    PairExpandShrinkParams {
        /// P.
        rows: u32,
        /// F.
        width: u32,
        /// Rank that both u have room for.
        max_rank: u32,
        /// Workgroups of a pair.
        chunks: u32,
        /// Slope of the clamped swiglu.
        alpha: f32,
        /// Clamp of the clamped swiglu.
        limit: f32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
    }
}

/// Semantics: `h[p] = act(gate[p] + B · u[p]) · (up[p] + B · u[p])`, or what the activation makes of the two, and `u[p] = s · A · h[p]`
/// of down, in parts. Pairs of ids that are no expert are left alone.
pub struct PairExpandShrink<'a> {
    /// P.
    pub rows: usize,
    /// F: a multiple of 8.
    pub width: usize,
    /// Between gate and up; one that has both.
    pub activation: Activation,
    /// Of gate and up.
    pub sums: &'a Sums,
    /// The factors of gate and up.
    pub pool: &'a View,
    /// Those of down.
    pub down_pool: &'a View,
    /// f32 `[P, F]`, written.
    pub h: &'a View,
    /// u32 `[1]`: bit 1 for a slot past L, bit 2 for an id past E_l.
    pub status: &'a View,
}

/// Invocations of a workgroup.
const LANES: u32 = 256;
/// Parts of u that are no burden to who adds them up.
const FEW_CHUNKS: usize = 4;
/// Groups of eight columns of a lane at most: what registers and workgroup memory hold.
pub const MOST_STEPS: u32 = 8;

/// Groups of eight columns of a row of A that a lane takes, for a width of F: so many that chunks are few.
fn steps(caps: &Capabilities, width: usize) -> u32 {
    let loads = width.div_ceil(8 * caps.row_lanes as usize);
    (loads.div_ceil(FEW_CHUNKS).next_power_of_two() as u32).min(MOST_STEPS)
}

/// Columns of a workgroup.
fn chunk(caps: &Capabilities, width: usize) -> usize {
    (8 * caps.row_lanes * steps(caps, width)) as usize
}

/// The variables of one variant; `width` is F.
pub fn vars(caps: &Capabilities, kind: Activation, width: usize) -> Vars {
    let steps = steps(caps, width);
    // A rank of 16 in one round, where registers hold what a lane then loads.
    let ahead = (16 * caps.row_lanes / LANES / steps).max(1);
    vec![
        ("kind", activation::name(kind).into()),
        ("chunk", (chunk(caps, width) as u32).into()),
        ("steps", steps.into()),
        ("ahead", ahead.into()),
        ("lanes", LANES.into()),
        ("depth_lanes", caps.row_lanes.into()),
    ]
}

impl PairExpandShrink<'_> {
    /// Records the stage. What it returns is for a product that adds the adapters of down.
    ///
    /// # Errors
    /// When the device refuses the shader or has no room for u.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<Shrunk> {
        let caps = rec.gpu().capabilities().clone();
        let chunks = self.width.div_ceil(chunk(&caps, self.width));
        let Sums { ref y, ref u, max_rank } = *self.sums;
        let (alpha, limit) = activation::constants(self.activation);
        let pipeline = pipeline(rec.gpu(), &PAIR_EXPAND_SHRINK, vars(&caps, self.activation, self.width))?;
        let down_u = rec.scratch("lora u", (self.rows * (4 + chunks * max_rank) * 4) as u64)?;
        let params = PairExpandShrinkParams {
            rows: self.rows as u32,
            width: self.width as u32,
            max_rank: max_rank as u32,
            chunks: chunks as u32,
            alpha,
            limit,
            pad0: 0,
            pad1: 0,
        };
        let buffers = [y, u, self.pool, self.down_pool, self.h, &down_u, self.status];
        let grid = Grid::Direct([self.rows as u32, chunks as u32, 1]);
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(Shrunk { u: down_u, max_rank, chunks, pool: self.down_pool.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_few_and_fit_workgroup_memory() {
        for caps in crate::plan::classes::classes().iter().filter(|caps| caps.along_depth) {
            for width in [8, 768, 1024, 1536, 2048, 14_336] {
                let chunk = chunk(caps, width);
                assert!(chunk * 4 <= 16 << 10 && chunk.is_multiple_of(8));
                let most = (MOST_STEPS * 8 * caps.row_lanes) as usize;
                assert!(width.div_ceil(chunk) <= FEW_CHUNKS.max(width.div_ceil(most)));
            }
            if caps.row_lanes == 32 {
                assert_eq!([768, 1536].map(|width| chunk(caps, width)), [256, 512]);
            }
        }
    }
}
