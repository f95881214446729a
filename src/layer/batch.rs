//! The adapters of a batch and their stages on whole tokens.

use crate::adapter::pool::AdapterPool;
use crate::error::Result;
use crate::kernels::align::{Align, Aligned};
use crate::kernels::dense_gemm;
use crate::kernels::expert_gemm::Rows;
use crate::kernels::lora::{self, Factors, Lora, LoraSite};
use crate::kernels::lora_gather::LoraGather;
use crate::kernels::{Recording, View};
use crate::plan::rows;

/// The adapters of a batch, the same for every layer.
#[derive(Debug, Clone)]
pub struct LoraBatch {
    /// i32 `[T]`: slot of each token, negative for none.
    pub token_lora_mapping: View,
    /// L.
    pub slots: usize,
    /// Adapters that occur in the batch, at least 1.
    pub adapters: usize,
    /// Largest rank among them, a bias counted.
    pub max_rank: usize,
    /// Products on cooperative matrices can add them: [`AdapterPool::folds`] holds for all.
    pub folds: bool,
    /// Tokens sorted by slot, where there are enough of them.
    pub aligned: Option<Aligned>,
}

impl LoraBatch {
    /// The adapters in `slots`, one slot or a negative number for each token of `token_lora_mapping`; `None` when they add nothing.
    pub(crate) fn of(pool: &AdapterPool, slots: &[i32], token_lora_mapping: View) -> Option<Self> {
        let slots = distinct(slots);
        let max_rank = slots.iter().map(|s| pool.max_rank(*s)).max().unwrap_or(0);
        (max_rank > 0).then(|| Self {
            token_lora_mapping,
            slots: pool.slots(),
            adapters: slots.len(),
            max_rank: max_rank.next_multiple_of(8),
            folds: slots.iter().all(|s| pool.folds(*s)),
            aligned: None,
        })
    }

    /// Prepares the adapters of `tokens` tokens; `sites` are those that work on whole tokens (attention, router, dense). Few
    /// tokens are taken one by one where their adapters are part of the products ([`Dense`](super::Dense)).
    ///
    /// # Errors
    /// Those of the align stage.
    pub fn prepare<'a>(
        mut self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        tokens: usize,
        sites: impl Iterator<Item = &'a LoraSite>,
    ) -> Result<Self> {
        let caps = rec.gpu().capabilities().clone();
        if dense_gemm::few(&caps, tokens) {
            return Ok(self);
        }
        let Some(tile) = rows::adapter_tile(&caps, tokens, self.adapters) else { return Ok(self) };
        let columns: Vec<u32> = sites.flat_map(|s| lora::column_tiles(&caps, s, self.max_rank, tile)).collect();
        let align = Align {
            pairs: tokens,
            buckets: self.slots,
            tile,
            label: "adapter tiles",
            work_label: "align work",
            ids: &self.token_lora_mapping,
            columns: &columns,
        };
        self.aligned = Some(align.record(rec, pass)?);
        Ok(self)
    }

    /// Records the adapters of a site that works on whole tokens, after its product.
    ///
    /// # Errors
    /// Those of the LoRA stages.
    #[allow(clippy::too_many_arguments, reason = "the arguments are the site's operands")]
    pub(super) fn record_dense(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        site: &LoraSite,
        factors: &Factors,
        tokens: usize,
        x: &View,
        y: &View,
    ) -> Result<()> {
        self.dense(site, factors, tokens, x, y).record(rec, pass)
    }

    /// The stage of a site that works on whole tokens.
    fn dense<'a>(
        &'a self,
        site: &'a LoraSite,
        factors: &'a Factors,
        tokens: usize,
        x: &'a View,
        y: &'a View,
    ) -> Lora<'a> {
        let select = match &self.aligned {
            Some(aligned) => Rows::Tiles(aligned),
            None => Rows::Pairs(&self.token_lora_mapping),
        };
        Lora {
            rows: tokens,
            row_div: 1,
            select,
            buckets: self.slots,
            max_rank: self.max_rank,
            site,
            factors,
            x,
            y,
            y_stride: site.out_dims.iter().sum(),
        }
    }

    /// Records the adapters of the embedding: `hidden`, f32 `[T, D]`, is added to. `row_table` and `last_ids` are those of
    /// [`Embed`](crate::kernels::embed::Embed).
    ///
    /// # Errors
    /// Those of the LoRA stages.
    #[allow(clippy::too_many_arguments, reason = "the arguments are the site's operands")]
    pub fn record_embedding(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        site: &LoraSite,
        factors: &Factors,
        tokens: usize,
        [row_table, last_ids]: [&View; 2],
        hidden: &View,
    ) -> Result<()> {
        let u = rec.scratch("lora u", (tokens * self.max_rank.next_multiple_of(8) * 4) as u64)?;
        let (slots, max_rank) = (self.slots, self.max_rank);
        LoraGather { rows: tokens, row_table, last_ids, slots, max_rank, site, factors, u: &u }.record(rec, pass)?;
        self.dense(site, factors, tokens, &u, hidden).record_expand(rec, pass, &u)
    }
}

/// The slots that occur in a mapping, ascending.
pub(crate) fn distinct(mapping: &[i32]) -> Vec<usize> {
    let mut slots: Vec<usize> = mapping.iter().filter_map(|s| usize::try_from(*s).ok()).collect();
    slots.sort_unstable();
    slots.dedup();
    slots
}
