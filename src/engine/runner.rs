//! What runs a step on one rank: the model with its cache, adapters and tables, without any idea of requests.

use crate::adapter::pool::{AdapterId, AdapterPool, PoolOptions};
use crate::adapter::{Adapter, Site};
use crate::checkpoint::MlpKind;
use crate::engine::EngineOptions;
use crate::engine::message::StepMessage;
use crate::engine::results::Results;
use crate::engine::routing::RoutingCounter;
use crate::error::{Error, ErrorKind, Result};
use crate::exchange::{self, Dispatch, Ranks};
use crate::gpu::Gpu;
use crate::kernels::rope::{AttentionShape, rotary_table};
use crate::kernels::sample::Sample;
use crate::kernels::{Recording, View};
use crate::layer::{LoraBatch, distinct};
use crate::model::cache::BLOCK_SIZE;
use crate::model::{Commands, KvCache, Model, StepDispatch, StepTensors};
use crate::placement::Copies;
use crate::plan::attention::AttentionWork;
use crate::plan::exchange::{ExchangeWay, can_dispatch, way};
use crate::plan::memory::{EngineSizes, engine_sizes};

/// One rank's model and everything that a step works on.
pub(crate) struct Runner {
    pub gpu: Gpu,
    pub model: Model,
    pub pool: AdapterPool,
    /// Whether this rank has every row of a step, or those of its own sequences.
    pub way: ExchangeWay,
    pub max_logit_rows: usize,
    /// Where choices are counted; each rank counts for the rows that it routes.
    pub counter: Option<RoutingCounter>,
    /// Cache blocks on each rank.
    pub blocks: usize,
    attention: AttentionShape,
    cache: KvCache,
    pub rec: Recording,
    last_ids: View,
    status: View,
    rotary: View,
    block_table: View,
    readback: Vec<wgpu::Buffer>,
}

/// The results of a submitted step, on their way to a buffer that can be mapped.
pub(crate) struct Readback {
    pub submission: wgpu::SubmissionIndex,
    pub staging: wgpu::Buffer,
    pub results: Results,
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
        let sizes_for =
            |sequences| engine_sizes(config, heads, limit, sequences, max_context, max_step_tokens, BLOCK_SIZE);
        let mut sizes = sizes_for(max_sequences);
        let way = match &mut ranks {
            Some(ranks) => exchange_way(gpu, &model, options.exchange, sizes.sequences, ranks)?,
            None => ExchangeWay::Sums,
        };
        if way == ExchangeWay::Dispatch {
            // The cache holds this rank's sequences alone.
            let own = sizes_for(sizes.sequences.div_ceil(model.topology().world()));
            sizes = EngineSizes { blocks: own.blocks, max_context: own.max_context, ..sizes };
        }
        if let Some(ranks) = ranks {
            sizes = smallest(ranks, sizes)?;
        }
        options.exchange = Some(way);
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
            pool,
            way,
            max_logit_rows: sizes.logit_rows,
            blocks: sizes.blocks,
            attention,
            cache,
            rec: Recording::new(gpu),
            last_ids,
            status,
            counter,
            rotary,
            block_table,
            readback: Vec::new(),
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

    /// Runs this rank's part of a step, with the slots of the step's adapters: records and submits. With several ranks it blocks
    /// while they exchange.
    pub fn step(&mut self, ranks: Option<&mut Ranks>, step: &StepMessage, slots: &[usize]) -> Result<Readback> {
        self.rec.reset();
        // What the device refuses must not look like a result: the step's buffers would hold those of an earlier one.
        let scope = self.gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
        let mut commands = Commands::new(&self.gpu, ranks);
        let logits = self.layers(&mut commands, step, slots)?;
        let results = Results::of(step, self.model.config().vocab);
        let staging = self.read_back(&mut commands, step, results, logits.as_ref())?;
        let submission = commands.submit(&mut self.rec)?;
        match pollster::block_on(scope.pop()) {
            Some(e) => Err(Error::new(ErrorKind::Device, format!("step refused: {e}"))),
            None => Ok(Readback { submission, staging, results }),
        }
    }

    /// Takes back the buffer of results that have been read, or that nobody wants.
    pub fn recycle(&mut self, staging: wgpu::Buffer) {
        self.readback.push(staging);
    }

    /// Records all layers, and the head for the rows whose logits are wanted: f32 `[gather, vocab]`.
    fn layers(&mut self, commands: &mut Commands<'_>, step: &StepMessage, slots: &[usize]) -> Result<Option<View>> {
        if let Some(counter) = &mut self.counter {
            counter.begin(&self.gpu, step.rows.len())?;
        }
        let slot_of = |place: i32| usize::try_from(place).ok().and_then(|i| slots.get(i)).map_or(-1, |s| *s as i32);
        let rows: Vec<[i32; 4]> = step.rows.iter().map(|[t, p, r, a]| [*t, *p, *r, slot_of(*a)]).collect();
        let slot_of_row: Vec<i32> = rows.iter().map(|row| row[3]).collect();
        let row_table = self.upload("row table", bytemuck::cast_slice(&rows))?;
        let gather = self.upload("logit rows", bytemuck::cast_slice(&step.gather))?;
        let mapping = self.upload("token_lora_mapping", bytemuck::cast_slice(&slot_of_row))?;
        self.gpu.queue().write_buffer(&self.status.buffer, 0, &[0; 4]);
        let lora_embedding = distinct(&slot_of_row).iter().any(|s| self.pool.changes(*s, Site::Embedding));
        let lora = LoraBatch::of(&self.pool, &slot_of_row, mapping);
        let head_slots: Vec<i32> = step.gather.iter().map(|row| slot_of_row[*row as usize]).collect();
        let lora_head = if distinct(&head_slots).iter().any(|s| self.pool.changes(*s, Site::LmHead)) {
            let mapping = self.upload("logit slots", bytemuck::cast_slice(&head_slots))?;
            LoraBatch::of(&self.pool, &head_slots, mapping)
        } else {
            None
        };
        let dispatch = match self.way {
            ExchangeWay::Sums => None,
            ExchangeWay::Dispatch => Some(StepDispatch {
                adapters: step.rows.iter().map(|row| step.adapter_of(row).unwrap_or(0)).collect(),
                slots: step.adapters.iter().copied().zip(slots.iter().copied()).collect(),
                ones: self.upload("ones", bytemuck::cast_slice(&vec![1.0f32; rows.len()]))?,
                zeros: self.upload("zeros", bytemuck::cast_slice(&vec![0i32; rows.len()]))?,
            }),
        };
        let work = AttentionWork::new(self.gpu.capabilities(), &self.attention, &rows);
        let attention_items = self.upload("attention items", bytemuck::cast_slice(&work.table))?;
        let tensors = StepTensors {
            rows: rows.len(),
            row_table: &row_table,
            last_ids: &self.last_ids,
            blocks: &self.block_table,
            rotary: &self.rotary,
            attention: self.attention,
            logit_gather: &gather,
            logit_rows: step.gather.len(),
            status: &self.status,
            lora,
            lora_embedding,
            lora_head,
            routing_counts: self.counter.as_ref().map(|counter| &counter.counts),
            work: &work,
            attention_items: &attention_items,
            attended: rows.iter().map(|r| r[1] as u64 + 1).sum(),
            dispatch,
        };
        self.model.record(commands, &mut self.rec, &self.cache, &self.pool, tensors)
    }

    /// Records sampling, and the copy of all results to a buffer that can be mapped.
    fn read_back(
        &mut self,
        commands: &mut Commands<'_>,
        step: &StepMessage,
        results: Results,
        logits: Option<&View>,
    ) -> Result<wgpu::Buffer> {
        let (n_picks, vocab) = (results.picks, results.vocab);
        let picks = self.upload("picks", bytemuck::cast_slice(&step.picks))?;
        let sampled = self.rec.scratch("sampled", (n_picks.max(1) * 4) as u64)?;
        if let Some(logits) = logits
            && n_picks > 0
        {
            let sample =
                Sample { rows: n_picks, vocab, logits, picks: &picks, sampled: &sampled, last_ids: &self.last_ids };
            commands.pass(&mut self.rec, "sample", 0, |rec, pass| sample.record(rec, pass))?;
        }
        let staging = self.gpu.readable(&mut self.readback, "readback", results.bytes() as u64)?;
        let encoder = commands.encoder();
        encoder.copy_buffer_to_buffer(&self.status.buffer, 0, &staging, 0, 4);
        if n_picks > 0 {
            encoder.copy_buffer_to_buffer(&sampled.buffer, 0, &staging, 4, (n_picks * 4) as u64);
        }
        if let Some(logits) = logits {
            let mut at = results.logit_base() as u64;
            for [first, count] in &step.wanted {
                let row = (vocab * 4) as u64;
                let (from, size) = (u64::from(*first) * row, u64::from(*count) * row);
                encoder.copy_buffer_to_buffer(&logits.buffer, from, &staging, at, size);
                at += size;
            }
        }
        Ok(staging)
    }

    /// A scratch buffer with these bytes.
    fn upload(&mut self, label: &'static str, bytes: &[u8]) -> Result<View> {
        let view = self.rec.scratch(label, bytes.len() as u64)?;
        if !bytes.is_empty() {
            self.gpu.queue().write_buffer(&view.buffer, 0, bytes);
        }
        Ok(view)
    }
}

/// The way that ranks exchange, as `asked` or as the plan has it, and what they need for it.
///
/// With sums every rank routes every token, and a close call that two ranks decide otherwise would leave a pair to nobody, or
/// to both. So their devices must compute alike; where each token is routed once they need not.
fn exchange_way(
    gpu: &Gpu,
    model: &Model,
    asked: Option<ExchangeWay>,
    sequences: usize,
    ranks: &mut Ranks,
) -> Result<ExchangeWay> {
    let (world, moe) = (model.topology(), &model.config().moe);
    let info = gpu.info();
    let own = format!("{}, {} tier, {} {}", info.name, gpu.tier(), info.driver, info.driver_info);
    let devices = exchange::gather(ranks.line(), own.as_bytes())?;
    let other = devices.iter().position(|device| *device != devices[0]);
    let way = asked.unwrap_or(match other {
        Some(_) if can_dispatch(world) => ExchangeWay::Dispatch,
        _ => way(world, moe, sequences),
    });
    if let (ExchangeWay::Sums, Some(other)) = (way, other) {
        let [zero, this] = [0, other].map(|rank| String::from_utf8_lossy(&devices[rank]));
        let message = format!(
            "exchange `sums`: every rank routes every token, so their devices must compute alike, but rank 0 has `{zero}` and rank \
             {other} `{this}`; exchange `dispatch` (with `ep` alone) takes different ones"
        );
        return Err(Error::new(ErrorKind::Rank, message));
    }
    if way == ExchangeWay::Dispatch {
        if !can_dispatch(world) {
            let (n, ep) = (world.world(), world.ep());
            return Err(Error::new(
                ErrorKind::Config,
                format!(
                    "exchange `dispatch` with `tp` {n} and `ep` {ep}: it shares out whole sequences, and `tp` \
                     each of them; leave out `tp` (`ep` {n} alone), or exchange `sums`"
                ),
            ));
        }
        let copies = Copies::new(model.placement(), moe.experts, world)?;
        ranks.dispatch_with(Dispatch::new(moe.hidden, moe.top_k, copies));
    }
    Ok(way)
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
    // Where choices are counted, every rank routes every row: what a rank counts is its own affair.
    let EngineOptions {
        max_sequences,
        max_context,
        max_step_tokens,
        adapter_slots,
        adapter_memory,
        count_routing,
        exchange,
    } = *options;
    let [sequences, context, tokens, slots] =
        [max_sequences, max_context, max_step_tokens, adapter_slots].map(|n| n as u64);
    let way = match exchange {
        None => 0,
        Some(ExchangeWay::Sums) => 1,
        Some(ExchangeWay::Dispatch) => 2,
    };
    let (limited, memory) = (u64::from(adapter_memory.is_some()), adapter_memory.unwrap_or(0));
    let own = [sequences, context, tokens, slots, limited, memory, way];
    let words: Vec<u64> = bytemuck::pod_collect_to_vec(&exchange::broadcast(ranks.line(), bytemuck::cast_slice(&own))?);
    let &[max_sequences, max_context, max_step_tokens, adapter_slots, limited, memory, way] = &words[..] else {
        return Err(Error::new(ErrorKind::Rank, "rank 0 sent options that cannot be read"));
    };
    Ok(EngineOptions {
        max_sequences: max_sequences as usize,
        max_context: max_context as usize,
        max_step_tokens: max_step_tokens as usize,
        adapter_slots: adapter_slots as usize,
        adapter_memory: (limited == 1).then_some(memory),
        count_routing,
        exchange: match way {
            0 => None,
            1 => Some(ExchangeWay::Sums),
            _ => Some(ExchangeWay::Dispatch),
        },
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
