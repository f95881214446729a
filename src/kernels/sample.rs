//! Logits to the next token.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::rows::LongRow;

/// The shader.
pub static SAMPLE: Kernel = Kernel { stem: "sample", reads: 2, writes: 2 };

params! {
    /// Sizes of one sampling.
    SampleParams {
        /// Rows to sample.
        rows: u32,
        /// Vocabulary entries.
        vocab: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
    }
}

params! {
    /// How one row is sampled; an element of a storage buffer.
    Pick {
        /// Row of logits.
        row: u32,
        /// Sequence the id belongs to.
        sequence: u32,
        /// 0: greedy.
        temperature: f32,
        /// 1: off.
        top_p: f32,
        /// 0: off.
        top_k: u32,
        /// Uniform number in [0, 1).
        u: f32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
    }
}

/// Semantics: `sampled[i] = last_ids[picks[i].sequence] = draw(logits[picks[i].row])`; -1 without a finite logit.
pub struct Sample<'a> {
    /// Rows to sample.
    pub rows: usize,
    /// Vocabulary entries.
    pub vocab: usize,
    /// f32 `[logit rows, vocab]`.
    pub logits: &'a View,
    /// `[rows]` of [`Pick`].
    pub picks: &'a View,
    /// i32 `[rows]`, written.
    pub sampled: &'a View,
    /// i32 `[sequences]`, written for the sequences sampled.
    pub last_ids: &'a View,
}

/// The variables on one device.
pub fn vars(caps: &Capabilities) -> Vars {
    let LongRow { lanes, subgroups, one_subgroup } = LongRow::of(caps);
    vec![("lanes", lanes.into()), ("subgroups", subgroups.into()), ("one_subgroup", one_subgroup.into())]
}

impl Sample<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let vars = vars(rec.gpu().capabilities());
        let pipeline = pipeline(rec.gpu(), &SAMPLE, vars)?;
        let params = SampleParams { rows: self.rows as u32, vocab: self.vocab as u32, pad0: 0, pad1: 0 };
        let buffers = [self.logits, self.picks, self.sampled, self.last_ids];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, self.rows as u32));
        Ok(())
    }
}
