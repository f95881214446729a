//! Sequences in one continuous batch: they join, leave and are cancelled between steps.
//!
//! [`Engine::begin_step`] records and submits one step and returns; [`Engine::poll`] collects what has finished.
//! Neither waits for the device. Sampled ids stay on the device and feed the next step, so two steps can be on the way; a stop id is
//! therefore seen one step late, and the step already begun is discarded for that sequence.

mod in_flight;
mod request;
mod schedule;
mod sequence;

pub use crate::adapter::pool::AdapterId;
pub use request::{EngineOptions, Event, FinishReason, Request, Sampling, SequenceId};

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::adapter::Adapter;
use crate::adapter::pool::{AdapterPool, PoolOptions};
use crate::checkpoint::{MlpKind, ModelConfig};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::rope::{AttentionShape, rotary_table};
use crate::kernels::{Recording, View};
use crate::model::cache::BLOCK_SIZE;
use crate::model::{KvCache, Model};
use crate::plan::memory::engine_sizes;
use in_flight::InFlight;
use sequence::Sequence;

/// Steps that may be on the device at a time.
const DEPTH: usize = 2;
/// Runs one model for many sequences.
pub struct Engine {
    gpu: Gpu,
    model: Model,
    options: EngineOptions,
    attention: AttentionShape,
    cache: KvCache,
    pool: AdapterPool,
    rec: Recording,
    rotary: View,
    last_ids: View,
    block_table: View,
    status: View,
    max_logit_rows: usize,
    adapters: HashMap<AdapterId, Arc<Adapter>>,
    names: HashMap<String, AdapterId>,
    /// Every sequence that has not ended, by id: also the order of service.
    sequences: BTreeMap<SequenceId, Sequence>,
    free_rows: Vec<u32>,
    in_flight: VecDeque<InFlight>,
    readback: Vec<wgpu::Buffer>,
    events: Vec<Event>,
    next_id: u64,
}

impl Engine {
    /// An engine on `gpu` for `model`. Sizes in `options` that are 0 are chosen.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] or [`ErrorKind::OutOfMemory`] when the device has no room for the cache.
    pub fn new(gpu: &Gpu, model: Model, mut options: EngineOptions) -> Result<Self> {
        let config = model.config();
        let limit = gpu.capabilities().max_binding_bytes;
        let EngineOptions { max_sequences, max_context, max_step_tokens, .. } = options;
        let sizes = engine_sizes(config, limit, max_sequences, max_context, max_step_tokens, BLOCK_SIZE);
        options.max_sequences = sizes.sequences;
        options.max_context = sizes.max_context;
        options.max_step_tokens = sizes.step_tokens;
        let max_blocks = KvCache::blocks_for(options.max_context);
        let attention = AttentionShape {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            block_size: BLOCK_SIZE,
            max_blocks,
        };
        let cache = KvCache::new(gpu, config, sizes.blocks)?;
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
            .map(|(sites, kind)| (sites, (*kind == MlpKind::Experts).then(|| model.share.clone())))
            .collect();
        let (slots, budget) = (options.adapter_slots, options.adapter_memory);
        let pool = AdapterPool::with_options(gpu, PoolOptions { layers, slots, budget })?;
        let free_rows = (0..options.max_sequences as u32).rev().collect();
        Ok(Self {
            gpu: gpu.clone(),
            model,
            options,
            attention,
            cache,
            pool,
            rec: Recording::new(gpu),
            rotary,
            last_ids,
            block_table,
            status,
            max_logit_rows: sizes.logit_rows,
            adapters: HashMap::new(),
            names: HashMap::new(),
            sequences: BTreeMap::new(),
            free_rows,
            in_flight: VecDeque::new(),
            readback: Vec::new(),
            events: Vec::new(),
            next_id: 1,
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Longest prompt and answer together, in tokens.
    pub fn max_context(&self) -> usize {
        self.options.max_context
    }

    /// The options in force, after they were fitted to the model and the device.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Registers an adapter under `name` and returns its id; it goes to the device when a sequence needs it. A name that
    /// is taken passes to the new adapter; sequences already submitted keep the old one.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] when the engine has no adapter slots, or the adapter exceeds the adapter memory or a binding of
    /// the device; [`ErrorKind::Adapter`] when it was made for another model, or cut for another rank.
    pub fn load_adapter(&mut self, name: &str, adapter: &Adapter) -> Result<AdapterId> {
        if self.options.adapter_slots == 0 {
            return Err(Error::new(
                ErrorKind::Limit,
                format!("adapter `{name}`: the engine was made with 0 adapter slots"),
            ));
        }
        self.pool.check(adapter).map_err(|e| e.within(format!("adapter `{name}`")))?;
        let id = AdapterId(self.next_id);
        self.next_id += 1;
        if let Some(old) = self.names.insert(name.to_owned(), id) {
            self.drop_adapter(old);
        }
        self.adapters.insert(id, Arc::new(adapter.clone()));
        Ok(id)
    }

    /// The adapter that has `name` now.
    pub fn adapter(&self, name: &str) -> Option<AdapterId> {
        self.names.get(name).copied()
    }

    /// Forgets an adapter. Sequences already submitted finish with it.
    ///
    /// # Errors
    /// [`ErrorKind::Adapter`] when it is not loaded.
    pub fn unload_adapter(&mut self, id: AdapterId) -> Result<()> {
        let before = self.names.len();
        self.names.retain(|_, known| *known != id);
        if self.names.len() == before {
            return Err(Error::new(ErrorKind::Adapter, "unload: the adapter is not loaded"));
        }
        self.drop_adapter(id);
        Ok(())
    }

    /// Drops an adapter that has no name any more, once no sequence uses it.
    fn drop_adapter(&mut self, id: AdapterId) {
        let named = self.names.values().any(|known| *known == id);
        let used = self.sequences.values().any(|s| s.request.adapter == Some(id));
        if !named && !used {
            self.adapters.remove(&id);
            self.pool.unload(id);
        }
    }

    /// The checks of [`Engine::submit`], without submitting.
    ///
    /// # Errors
    /// [`ErrorKind::Request`] for an empty prompt, an id outside the vocabulary, a prompt longer than the context or a
    /// bad sampling option, [`ErrorKind::Adapter`] for an adapter that is not loaded.
    pub fn check(&self, request: &Request) -> Result<()> {
        request.check(self.config(), self.options.max_context)?;
        match request.adapter {
            Some(id) if !self.names.values().any(|known| *known == id) => {
                Err(Error::new(ErrorKind::Adapter, "the adapter is not loaded"))
            }
            _ => Ok(()),
        }
    }

    /// Queues a request. It starts when a place, cache blocks and its adapter's slot are free, in order of submission. An
    /// answer is cut where the context ends.
    ///
    /// # Errors
    /// Those of [`Engine::check`].
    pub fn submit(&mut self, request: Request) -> Result<SequenceId> {
        self.check(&request)?;
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, Sequence::new(request, self.options.max_context));
        Ok(id)
    }

    /// Ends a sequence now: [`Event::Finished`] with [`FinishReason::Cancelled`] follows. Unknown ids are ignored.
    pub fn cancel(&mut self, sequence: SequenceId) {
        if self.sequences.contains_key(&sequence) {
            self.finish(sequence, FinishReason::Cancelled);
        }
    }

    /// True when no sequence waits or runs and nothing is on the device.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.in_flight.is_empty() && self.events.is_empty()
    }

    fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        self.remove(id);
        self.events.push(Event::Finished { sequence: id, reason });
    }

    fn fail(&mut self, id: SequenceId, error: Error) {
        self.remove(id);
        self.events.push(Event::Failed { sequence: id, error });
    }

    /// Gives back all that a sequence holds. Steps on the device may still use it: whoever gets it next is recorded
    /// later, and the queue runs in order.
    fn remove(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.remove(&id) else { return };
        if let Some(place) = sequence.place {
            self.free_rows.push(place.row);
            self.cache.give(place.blocks);
            if let Some(slot) = place.slot {
                self.pool.unpin(slot);
            }
        }
        if let Some(adapter) = sequence.request.adapter {
            self.drop_adapter(adapter);
        }
    }
}
