//! RMS norm of rows that still lack what their adapters add.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::pair_shrink::Shrunk;
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::rows::LongRow;

/// The shader.
pub static EXPAND_NORM: Kernel = Kernel { stem: "expand_norm", reads: 3, writes: 2 };

params! {
    /// Sizes of one norm.
    ExpandNormParams {
        /// T.
        rows: u32,
        /// D.
        width: u32,
        /// Rank that u has room for.
        max_rank: u32,
        /// Added to the mean square.
        eps: f32,
        /// 1 / D.
        scale: f32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
    }
}

/// Semantics: `x[t] += B · u[t]`, then `out[t] = x[t] / sqrt(mean(x[t]²) + eps) · weight`.
pub struct ExpandNorm<'a> {
    /// T.
    pub rows: usize,
    /// D.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f64,
    /// f32 `[T, D]`, added to.
    pub x: &'a View,
    /// f32 `[D]`.
    pub weight: &'a View,
    /// The adapters, of one projection whose columns are those of x.
    pub adapters: &'a Shrunk,
    /// f32 `[T, D]`, written.
    pub out: &'a View,
}

/// Columns of a lane that registers hold at most.
const MOST_LOADS: u32 = 16;
/// Ranks up to which one workgroup reads all of B: it takes as long as a shrink of its own would where they are higher.
const MOST_RANK: usize = 32;

/// Whether a norm adds adapters of `max_rank` ranks at most: where a subgroup reads a row together.
pub fn adds(caps: &Capabilities, max_rank: usize) -> bool {
    caps.along_depth && max_rank <= MOST_RANK
}

/// The variables on one device for rows of `width` columns.
pub fn vars(caps: &Capabilities, width: usize) -> Vars {
    let LongRow { lanes, subgroups, one_subgroup } = LongRow::of(caps);
    let loads = width.div_ceil(lanes as usize).next_power_of_two() as u32;
    let loads = if loads <= MOST_LOADS { loads } else { 0 };
    vec![
        ("loads", loads.into()),
        ("lanes", lanes.into()),
        ("subgroups", subgroups.into()),
        ("one_subgroup", one_subgroup.into()),
    ]
}

impl ExpandNorm<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &EXPAND_NORM, vars(rec.gpu().capabilities(), self.width))?;
        let params = ExpandNormParams {
            rows: self.rows as u32,
            width: self.width as u32,
            max_rank: self.adapters.max_rank as u32,
            eps: self.eps as f32,
            scale: 1.0 / self.width as f32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let buffers = [self.weight, &self.adapters.u, &self.adapters.pool, self.x, self.out];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, self.rows as u32));
        Ok(())
    }
}
