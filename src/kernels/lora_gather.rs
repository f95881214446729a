//! The first half of an adapter of the embedding: what `lora_shrink` is for rows, for tokens.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::lora::{Factors, LoraSite};
use crate::kernels::params::params;
use crate::kernels::{Recording, View, cover};

/// The shader.
pub static LORA_GATHER: Kernel = Kernel { stem: "lora_gather", reads: 4, writes: 1 };

params! {
    /// Sizes of one gather.
    LoraGatherParams {
        /// T.
        rows: u32,
        /// Entry of slot 0.
        index_base: u32,
        /// L.
        slots: u32,
        /// Rank that u has room for.
        max_rank: u32,
    }
}

/// Semantics: `u[t] = s · A[:, token(t)]` with the factors of row t's slot; rows without any are left alone. The token is
/// `rows[t].token`, or `last_ids[rows[t].sequence]` where that is negative.
pub struct LoraGather<'a> {
    /// T.
    pub rows: usize,
    /// i32 `[T, 4]`: token, position, sequence, slot.
    pub row_table: &'a View,
    /// i32 `[sequences]`: the last sampled ids.
    pub last_ids: &'a View,
    /// L.
    pub slots: usize,
    /// Largest rank among the adapters of this batch.
    pub max_rank: usize,
    /// The site of the embedding, one projection.
    pub site: &'a LoraSite,
    /// Its factors; A is stored transposed, `[vocab, R]`.
    pub factors: &'a Factors,
    /// f32 `[T, max_rank]` with `max_rank` rounded up to 8; each row is written up to its own rank, likewise rounded up.
    pub u: &'a View,
}

impl LoraGather<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &LORA_GATHER, Vars::new())?;
        let max_rank = self.max_rank.next_multiple_of(8);
        let params = LoraGatherParams {
            rows: self.rows as u32,
            index_base: self.site.index_base as u32,
            slots: self.slots as u32,
            max_rank: max_rank as u32,
        };
        let buffers = [self.row_table, self.last_ids, self.factors.pool(self.site), &self.factors.index, self.u];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &cover(self.rows * max_rank / 8));
        Ok(())
    }
}
