//! What runs a step on one rank: the model with its cache, adapters and tables, without any idea of requests.

use crate::adapter::pool::{AdapterId, AdapterPool, PoolOptions};
use crate::adapter::{Adapter, Site};
use crate::checkpoint::MlpKind;
use crate::engine::EngineOptions;
use crate::engine::routing::RoutingCounter;
use crate::error::{Error, ErrorKind, Result};
use crate::exchange::{self, Ranks};
use crate::gpu::Gpu;
use crate::kernels::rope::{AttentionShape, rotary_table};
use crate::kernels::{Recording, View};
use crate::layer::LoraBatch;
use crate::model::cache::BLOCK_SIZE;
use crate::model::{Commands, KvCache, Model, StepTensors};
use crate::plan::memory::{EngineSizes, engine_sizes};

/// One rank's model and everything that a step works on.
pub(crate) struct Runner {
    pub gpu: Gpu,
    pub model: Model,
    pub attention: AttentionShape,
    pub cache: KvCache,
    pub pool: AdapterPool,
    pub rec: Recording,
    pub last_ids: View,
    pub status: View,
    pub max_logit_rows: usize,
    /// Where choices are counted; each rank counts for the rows that it routes.
    pub counter: Option<RoutingCounter>,
    rotary: View,
    block_table: View,
}

/// The rows of one step, the same on every rank but for the slots.
pub(crate) struct Rows<'a> {
    /// Token or -1, position, sequence row, slot.
    pub rows: &'a [[i32; 4]],
    /// Slot of each row, -1 for none.
    pub mapping: &'a [i32],
    /// Rows whose logits are computed.
    pub gather: &'a [u32],
}

impl Runner {
    /// Makes room on `gpu`; `options` become what is in force. With several ranks those of rank 0 count, and of the sizes
    /// that come of them the smallest of all ranks.
    pub fn new(gpu: &Gpu, model: Model, options: &mut EngineOptions, mut ranks: Option<&mut Ranks>) -> Result<Self> {
        if let Some(ranks) = &mut ranks {
            exchange::agree(ranks.line(), &facts(&model))?;
            *options = of_rank_0(ranks, options)?;
        }
        let config = model.config();
        let limit = gpu.capabilities().max_binding_bytes;
        let EngineOptions { max_sequences, max_context, max_step_tokens, .. } = *options;
        let heads = &model.share.heads;
        let mut sizes = engine_sizes(config, heads, limit, max_sequences, max_context, max_step_tokens, BLOCK_SIZE);
        if let Some(ranks) = ranks {
            sizes = smallest(ranks, sizes)?;
        }
        options.max_sequences = sizes.sequences;
        options.max_context = sizes.max_context;
        options.max_step_tokens = sizes.step_tokens;
        let max_blocks = KvCache::blocks_for(options.max_context);
        let attention = AttentionShape {
            heads: heads.heads().len(),
            kv_heads: heads.kv_heads().len(),
            head_dim: config.head_dim,
            block_size: BLOCK_SIZE,
            max_blocks,
        };
        let cache = KvCache::new(gpu, heads, config.layers.len(), sizes.blocks)?;
        let storage = |label: &str, bytes: usize| {
            gpu.buffer(label, bytes as u64, wgpu::BufferUsages::empty()).map(|b| View::whole(&b))
        };
        let rotary = storage("rotary", options.max_context * config.head_dim * 4)?;
        let table = rotary_table(options.max_context, config.head_dim, config.rope_theta);
        gpu.queue().write_buffer(&rotary.buffer, 0, bytemuck::cast_slice(&table));
        let last_ids = storage("last ids", options.max_sequences * 4)?;
        let block_table = storage("block table", options.max_sequences * max_blocks * 4)?;
        let status = storage("status", 4)?;
        let layers = model
            .sites(options.adapter_slots)
            .into_iter()
            .zip(&config.layers)
            .map(|(sites, kind)| (sites, (*kind == MlpKind::Experts).then(|| model.share.experts.clone())))
            .collect();
        let (slots, budget) = (options.adapter_slots, options.adapter_memory);
        let pool =
            AdapterPool::with_options(gpu, PoolOptions { layers, ends: Some(model.end_sites(slots)), slots, budget })?;
        let counter = options.count_routing.then(|| RoutingCounter::new(gpu, config)).transpose()?;
        Ok(Self {
            gpu: gpu.clone(),
            model,
            attention,
            cache,
            pool,
            rec: Recording::new(gpu),
            last_ids,
            status,
            max_logit_rows: sizes.logit_rows,
            counter,
            rotary,
            block_table,
        })
    }

    /// The cache blocks of a sequence row.
    pub fn write_blocks(&self, row: u32, blocks: &[u32]) {
        let at = u64::from(row) * self.attention.max_blocks as u64 * 4;
        self.gpu.queue().write_buffer(&self.block_table.buffer, at, bytemuck::cast_slice(blocks));
    }

    /// Makes an adapter resident and pins it; `None` when it has to wait.
    pub fn pin(&mut self, id: AdapterId, adapter: &Adapter) -> Result<Option<usize>> {
        let before = self.pool.growths();
        let slot = self.pool.pin(id, adapter)?;
        if self.pool.growths() != before {
            // Bind groups would keep the outgrown buffers alive.
            self.rec.forget_bindings();
        }
        Ok(slot)
    }

    /// Records all layers, and the head for the rows whose logits are wanted: f32 `[gather, vocab]`.
    pub fn layers(&mut self, commands: &mut Commands<'_>, rows: &Rows<'_>) -> Result<Option<View>> {
        if let Some(counter) = &mut self.counter {
            counter.begin(&self.gpu, rows.rows.len())?;
        }
        let row_table = self.upload("row table", bytemuck::cast_slice(rows.rows))?;
        let gather = self.upload("logit rows", bytemuck::cast_slice(rows.gather))?;
        let mapping = self.upload("token_lora_mapping", bytemuck::cast_slice(rows.mapping))?;
        self.gpu.queue().write_buffer(&self.status.buffer, 0, &[0; 4]);
        let slots = distinct(rows.mapping);
        let lora_embedding = slots.iter().any(|s| self.pool.changes(*s, Site::Embedding));
        let lora = self.lora(&slots, mapping);
        let head_slots: Vec<i32> = rows.gather.iter().map(|row| rows.mapping[*row as usize]).collect();
        let slots = distinct(&head_slots);
        let lora_head = if slots.iter().any(|s| self.pool.changes(*s, Site::LmHead)) {
            let mapping = self.upload("logit slots", bytemuck::cast_slice(&head_slots))?;
            self.lora(&slots, mapping)
        } else {
            None
        };
        let tensors = StepTensors {
            rows: rows.rows.len(),
            row_table: &row_table,
            last_ids: &self.last_ids,
            blocks: &self.block_table,
            rotary: &self.rotary,
            attention: self.attention,
            logit_gather: &gather,
            logit_rows: rows.gather.len(),
            status: &self.status,
            lora,
            lora_embedding,
            lora_head,
            routing_counts: self.counter.as_ref().map(|counter| &counter.counts),
            attended: rows.rows.iter().map(|r| r[1] as u64 + 1).sum(),
        };
        self.model.record(commands, &mut self.rec, &self.cache, &self.pool, tensors)
    }

    /// The adapters in `slots` and the slot of each row; `None` when there is nothing to add.
    fn lora(&self, slots: &[usize], token_lora_mapping: View) -> Option<LoraBatch> {
        let max_rank = slots.iter().map(|s| self.pool.max_rank(*s)).max().unwrap_or(0);
        (max_rank > 0).then(|| LoraBatch {
            token_lora_mapping,
            slots: self.pool.slots(),
            adapters: slots.len(),
            max_rank: max_rank.next_multiple_of(8),
            aligned: None,
        })
    }

    /// A scratch buffer with these bytes.
    pub fn upload(&mut self, label: &'static str, bytes: &[u8]) -> Result<View> {
        let view = self.rec.scratch(label, bytes.len() as u64)?;
        if !bytes.is_empty() {
            self.gpu.queue().write_buffer(&view.buffer, 0, bytes);
        }
        Ok(view)
    }
}

/// The slots that occur in a mapping, ascending.
fn distinct(mapping: &[i32]) -> Vec<usize> {
    let mut slots: Vec<usize> = mapping.iter().filter_map(|s| usize::try_from(*s).ok()).collect();
    slots.sort_unstable();
    slots.dedup();
    slots
}

/// What all ranks must have in common, a line each.
fn facts(model: &Model) -> String {
    let world = model.topology();
    format!(
        "wgmoe {}\nmodel {:?}\nranks {}, ep {}, attention {}\nplacement {:?}",
        env!("CARGO_PKG_VERSION"),
        model.config(),
        world.world(),
        world.ep(),
        world.attention_tp(),
        model.placement(),
    )
}

/// The options of rank 0.
fn of_rank_0(ranks: &mut Ranks, options: &EngineOptions) -> Result<EngineOptions> {
    // Every rank routes every row, so what a rank counts is its own affair.
    let EngineOptions { max_sequences, max_context, max_step_tokens, adapter_slots, adapter_memory, count_routing } =
        *options;
    let sizes = [max_sequences, max_context, max_step_tokens, adapter_slots].map(|n| n as u64);
    let own =
        [sizes[0], sizes[1], sizes[2], sizes[3], u64::from(adapter_memory.is_some()), adapter_memory.unwrap_or(0)];
    let words: Vec<u64> = bytemuck::pod_collect_to_vec(&exchange::broadcast(ranks.line(), bytemuck::cast_slice(&own))?);
    let &[max_sequences, max_context, max_step_tokens, adapter_slots, limited, memory] = &words[..] else {
        return Err(Error::new(ErrorKind::Rank, "rank 0 sent options that cannot be read"));
    };
    Ok(EngineOptions {
        max_sequences: max_sequences as usize,
        max_context: max_context as usize,
        max_step_tokens: max_step_tokens as usize,
        adapter_slots: adapter_slots as usize,
        adapter_memory: (limited == 1).then_some(memory),
        count_routing,
    })
}

/// The smallest sizes of all ranks: a step must fit everywhere.
fn smallest(ranks: &mut Ranks, sizes: EngineSizes) -> Result<EngineSizes> {
    let own = [sizes.blocks, sizes.max_context, sizes.step_tokens, sizes.logit_rows, sizes.sequences];
    let own = own.map(|n| n as u64);
    let mut least = own;
    for (rank, bytes) in exchange::gather(ranks.line(), bytemuck::cast_slice(&own))?.iter().enumerate() {
        let theirs: Vec<u64> = bytemuck::pod_collect_to_vec(bytes);
        if theirs.len() != least.len() {
            return Err(Error::new(ErrorKind::Rank, format!("rank {rank}: expected {} sizes", least.len())));
        }
        least.iter_mut().zip(theirs).for_each(|(least, n)| *least = n.min(*least));
    }
    let [blocks, max_context, step_tokens, logit_rows, sequences] = least.map(|n| n as usize);
    Ok(EngineSizes { blocks, max_context, step_tokens, logit_rows, sequences })
}
