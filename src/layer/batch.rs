//! The adapters of a batch and their stages on whole tokens.

use crate::adapter::pool::AdapterPool;
use crate::error::Result;
use crate::kernels::align::{Align, Aligned};
use crate::kernels::dense_gemm;
use crate::kernels::fold_blocks;
use crate::kernels::lora::{self, Factors, Lora, LoraSite};
use crate::kernels::lora_gather::LoraGather;
use crate::kernels::lora_matrix;
use crate::kernels::operands::{Rows, Weights};
use crate::kernels::runs::{AlignRuns, Runs, TokenChunks};
use crate::kernels::{Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::MatrixTile;
use crate::plan::{matrix, rows};

/// The adapters of a batch, the same for every layer.
#[derive(Debug, Clone)]
pub struct LoraBatch {
    /// i32 `[T]`: slot of each token, negative for none.
    pub token_lora_mapping: View,
    /// L.
    pub slots: usize,
    /// Slots of the adapters that occur in the batch, ascending.
    pub used: Vec<usize>,
    /// Largest rank among them, a bias counted.
    pub max_rank: usize,
    /// Products on cooperative matrices can add them: [`AdapterPool::folds`] holds for all.
    pub folds: bool,
    /// How far they [reach](AdapterPool::reach) at most.
    pub reach: f32,
    /// Every token has one of them.
    pub everyone: bool,
    /// Tokens sorted by slot, where there are enough of them.
    pub aligned: Option<Aligned>,
    /// The same in chunks, from which pairs are sorted for cooperative matrices.
    pub chunks: Option<TokenChunks>,
    /// And in runs for these.
    pub matrix_runs: Option<Runs>,
}

impl LoraBatch {
    /// The adapters in `slots`, one slot or a negative number for each token of `token_lora_mapping`; `None` when they add
    /// nothing. Slots past those of the pool count as none.
    pub fn of(pool: &AdapterPool, slots: &[i32], token_lora_mapping: View) -> Option<Self> {
        let used: Vec<usize> = distinct(slots).into_iter().filter(|slot| *slot < pool.slots()).collect();
        let max_rank = used.iter().map(|slot| pool.max_rank(*slot)).max().unwrap_or(0);
        (max_rank > 0).then(|| Self {
            token_lora_mapping,
            slots: pool.slots(),
            max_rank: max_rank.next_multiple_of(8),
            folds: used.iter().all(|slot| pool.folds(*slot)),
            reach: used.iter().map(|slot| pool.reach(*slot)).fold(0.0, matrix::larger),
            everyone: slots.iter().all(|slot| usize::try_from(*slot).is_ok_and(|slot| slot < pool.slots())),
            used,
            aligned: None,
            chunks: None,
            matrix_runs: None,
        })
    }

    /// Whether an adapter of the batch may change what `site` computes; `factors` are those of its layer.
    pub(crate) fn adapts(&self, site: &LoraSite, factors: &Factors) -> bool {
        self.max_rank > 0 && factors.any(site)
    }

    /// Adapters that occur in the batch, at least 1.
    pub(super) fn adapters(&self) -> usize {
        self.used.len().max(1)
    }

    /// Prepares the adapters of `tokens` tokens; `sites` are those that work on whole tokens (attention, router, dense). Few
    /// tokens are taken one by one where their adapters are part of the products ([`Dense`](super::Dense)). `status` is u32 `[1]`:
    /// bit 1 is set for a slot past L.
    ///
    /// # Errors
    /// Those of the align stage.
    pub fn prepare<'a>(
        mut self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        tokens: usize,
        sites: impl Iterator<Item = &'a LoraSite>,
        status: &View,
    ) -> Result<Self> {
        let caps = rec.gpu().capabilities().clone();
        if dense_gemm::few(&caps, tokens) {
            return Ok(self);
        }
        let sites: Vec<&LoraSite> = sites.collect();
        let slots = self.slots;
        if caps.matrix {
            self.chunks = Some(self.sorted(rec, pass, "adapter chunks", tokens)?);
        }
        if let Some(chunks) = &self.chunks
            && self.folds
            && !rows::tokens_apart(&caps, tokens)
        {
            // Only the shrink reads it: products add the rest.
            let columns: Vec<u32> = sites.iter().map(|s| lora_matrix::column_tiles(s, self.max_rank)[0]).collect();
            let runs = AlignRuns {
                chunks,
                top_k: 1,
                experts: 1,
                tile: lora_matrix::RUN,
                label: "adapter runs",
                ids: None,
                status,
                run: lora_matrix::shrink_run(&caps, tokens, self.adapters(), true),
                columns: &[],
                run_columns: &columns,
            };
            self.matrix_runs = Some(runs.record(rec, pass)?);
        }
        if let Some(tile) = rows::adapter_tile(&caps, tokens, self.adapters()) {
            let columns = sites.iter().flat_map(|s| lora::column_tiles(&caps, s, self.max_rank, tile));
            let (label, ids, columns) = ("adapter tiles", &self.token_lora_mapping, &columns.collect::<Vec<u32>>());
            let align = Align { pairs: tokens, buckets: slots, tile, label, ids, columns };
            self.aligned = Some(align.record_used(rec, pass, &self.used, 1)?);
        }
        Ok(self)
    }

    /// Sorts `tokens` tokens by slot.
    ///
    /// # Errors
    /// Those of the align stage.
    pub(super) fn sorted(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        label: &'static str,
        tokens: usize,
    ) -> Result<TokenChunks> {
        TokenChunks::record(rec, pass, label, (tokens, &self.token_lora_mapping), (self.slots, &self.used))
    }

    /// Whether a product of `rows` rows on cooperative matrices with `weights` adds these adapters itself: their factors keep
    /// within the range of f16, and what a tile meets of them, `most` at most, is not longer than a row of the weights.
    pub(super) fn folded(&self, weights: &Weights, most: usize, rows: usize) -> bool {
        weights.magnitude.exponent() == Some(0)
            && self.folds
            && self.slots <= matrix::FOLDED_SLOTS
            && rows < matrix::FOLDED_ROWS
            && matrix::folds(self.adapters().min(most), self.max_rank, weights.in_dim)
    }

    /// Whether a buffer has room for the blocks of u that a product of `rows` rows with a direct `cut` loads.
    pub(super) fn has_room(&self, caps: &Capabilities, cut: Option<MatrixTile>, rows: usize) -> bool {
        cut.is_none_or(|cut| {
            let (rows, room) =
                (rows.next_multiple_of(cut.height as usize), fold_blocks::room(&cut, self.adapters(), self.max_rank));
            fold_blocks::bytes(rows, lora::MOST_PROJECTIONS, room) <= caps.max_binding_bytes
        })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::classes::classes;

    /// A batch with the adapters of four slots; what its view shows is not read.
    fn batch(max_rank: usize) -> LoraBatch {
        let mut desc = wgpu::InstanceDescriptor::new_without_display_handle();
        desc.backends = wgpu::Backends::NOOP;
        desc.backend_options.noop.enable = true;
        let adapters = pollster::block_on(wgpu::Instance::new(desc).enumerate_adapters(wgpu::Backends::NOOP));
        let (device, _) = pollster::block_on(adapters[0].request_device(&Default::default())).unwrap();
        let (label, usage) = (Some("mapping"), wgpu::BufferUsages::STORAGE);
        let buffer = device.create_buffer(&wgpu::BufferDescriptor { label, size: 4, usage, mapped_at_creation: false });
        LoraBatch {
            token_lora_mapping: View::whole(&buffer),
            slots: 9,
            used: vec![0, 3, 4, 8],
            max_rank,
            folds: true,
            reach: 0.0,
            everyone: false,
            aligned: None,
            chunks: None,
            matrix_runs: None,
        }
    }

    #[test]
    fn blocks_of_u_have_room_up_to_the_largest_binding() {
        let class = classes().into_iter().find(|class| class.matrix).unwrap();
        let direct = MatrixTile::direct_of(&class, 128).unwrap();
        let holds = |bytes: u64, max_rank: usize, cut: Option<MatrixTile>, rows: usize| {
            batch(max_rank).has_room(&Capabilities { max_binding_bytes: bytes, ..class.clone() }, cut, rows)
        };
        // 300 rows are three tiles of eight blocks of 16 rows; each has two blocks of 16 ranks for each of four adapters, of
        // four projections at most, in two bytes.
        let bytes = (3 * 8) * (2 * 4) * 4 * (16 * 16 * 2);
        assert!(holds(bytes, 24, Some(direct), 300) && !holds(bytes - 1, 24, Some(direct), 300));
        // To the end of the last tile and block, and not beyond.
        assert!(holds(bytes, 32, Some(direct), 384) && !holds(bytes - 1, 17, Some(direct), 257));
        assert!(!holds(bytes, 24, Some(direct), 385) && !holds(bytes, 40, Some(direct), 300));
        // Only a direct cut loads blocks.
        assert!(holds(1, 24, None, 300));
    }
}
