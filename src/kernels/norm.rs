//! RMS norm of rows.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;

/// The shader.
pub static NORM: Kernel = Kernel { stem: "norm", reads: 3, writes: 1 };

params! {
    /// Sizes of one norm.
    NormParams {
        /// Rows written.
        rows: u32,
        /// D / 4.
        quads: u32,
        /// Added to the mean square.
        eps: f32,
        /// 1 / D.
        scale: f32,
    }
}

/// Semantics: `out[i] = x[r] / sqrt(mean(x[r]²) + eps) · weight`, r = i or `gather[i]`.
pub struct Norm<'a> {
    /// Rows written.
    pub rows: usize,
    /// D: a multiple of 4.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f64,
    /// f32 `[T, D]`.
    pub x: &'a View,
    /// f32 `[D]`.
    pub weight: &'a View,
    /// u32 `[rows]`: the row of x for each row of out.
    pub gather: Option<&'a View>,
    /// f32 `[rows, D]`, written.
    pub out: &'a View,
}

/// The variables on one device.
pub fn vars(caps: &Capabilities, gathered: bool) -> Vars {
    vec![("gathered", gathered.into()), ("lanes", caps.row_lanes.into()), ("one_subgroup", caps.one_subgroup.into())]
}

impl Norm<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let vars = vars(rec.gpu().capabilities(), self.gather.is_some());
        let pipeline = pipeline(rec.gpu(), &NORM, vars)?;
        let params = NormParams {
            rows: self.rows as u32,
            quads: (self.width / 4) as u32,
            eps: self.eps as f32,
            scale: 1.0 / self.width as f32,
        };
        let gather = self.gather.unwrap_or(self.x);
        let buffers = [self.x, self.weight, gather, self.out];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, self.rows as u32));
        Ok(())
    }
}
