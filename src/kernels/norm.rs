//! RMS norm of rows.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::rows::LongRow;

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

/// Loads of a lane that registers hold at most.
const MOST_LOADS: u32 = 8;

/// The variables on one device for rows of `width` columns.
pub fn vars(caps: &Capabilities, gathered: bool, width: usize) -> Vars {
    [vec![("gathered", gathered.into())], row_vars(caps, width)].concat()
}

/// What a lane loads of such a row and keeps, in vec4; 0 where it does not keep it.
pub(crate) fn loads(caps: &Capabilities, width: usize) -> u32 {
    let LongRow { lanes, subgroups, .. } = LongRow::of(caps);
    let loads = (width / 4).div_ceil(lanes as usize).next_power_of_two() as u32;
    if subgroups > 1 && loads <= MOST_LOADS { loads } else { 0 }
}

/// Those of every shader that norms such rows.
pub(crate) fn row_vars(caps: &Capabilities, width: usize) -> Vars {
    let LongRow { lanes, subgroups, one_subgroup } = LongRow::of(caps);
    vec![
        ("loads", loads(caps, width).into()),
        ("lanes", lanes.into()),
        ("subgroups", subgroups.into()),
        ("one_subgroup", one_subgroup.into()),
    ]
}

impl Norm<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let vars = vars(rec.gpu().capabilities(), self.gather.is_some(), self.width);
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
