//! What the arithmetic units do at best.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;

/// The shader.
pub static RATE: Kernel = Kernel { stem: "rate", reads: 0, writes: 1 };

params! {
    /// Length of one burst.
    RateParams {
        /// Rounds of 32 steps.
        rounds: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
    }
}

/// Invocations of a workgroup, and with a subgroup size its subgroups.
const LANES: u32 = 256;

/// The variables for a device.
pub fn vars(caps: &Capabilities) -> Vars {
    // Subgroups have one size where there are matrices.
    let subgroups = if caps.matrix { LANES / caps.row_lanes } else { 0 };
    let mut vars: Vars = vec![("lanes", LANES.into()), ("subgroups", subgroups.into()), ("matrix", caps.matrix.into())];
    if caps.matrix {
        vars.push(("edge", caps.edge.into()));
    }
    vars
}

/// A burst of multiply-accumulates in registers: on cooperative matrices where the device's tier has them, else in f32.
pub struct Rate<'a> {
    /// Workgroups.
    pub workgroups: u32,
    /// Rounds of each.
    pub rounds: u32,
    /// f32 `[workgroups, 256]`, written.
    pub out: &'a View,
}

impl Rate<'_> {
    /// Multiply-accumulates of the burst.
    pub fn macs(&self, caps: &Capabilities) -> f64 {
        let a_round = if caps.matrix { LANES / caps.row_lanes * 16 * 16 * 16 * 32 } else { LANES * 4 * 32 };
        f64::from(self.workgroups) * f64::from(self.rounds) * f64::from(a_round)
    }

    /// Records the burst.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let vars = vars(rec.gpu().capabilities());
        let pipeline = pipeline(rec.gpu(), &RATE, vars)?;
        let params = RateParams { rounds: self.rounds, pad0: 0, pad1: 0, pad2: 0 };
        let grid = Grid::Direct([self.workgroups, 1, 1]);
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &[self.out], &grid);
        Ok(())
    }
}
