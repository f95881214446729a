//! Sequences in one continuous batch: they join, leave and are cancelled between steps.
//!
//! [`Engine::begin_step`] records and submits one step and returns; [`Engine::poll`] collects what has finished.
//! Neither waits for the device. Sampled ids stay on the device and feed the next step, so two steps can be on the way; a stop id is
//! therefore seen one step late, and the step already begun is discarded for that sequence.
//!
//! Over several ranks, rank 0 has the engine and tells its [`Worker`]s the rows of each step. Where tokens are dispatched, each
//! rank computes the rows of its own sequences, and what comes out of them goes to rank 0.

mod request;
mod sequence;
mod schedule;
mod routing;
mod runner;
mod in_flight;
mod message;
mod places;
mod results;
mod worker;

pub use crate::adapter::pool::AdapterId;
pub use request::{EngineOptions, Event, FinishReason, Request, Sampling, SequenceId};
pub use worker::Worker;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::adapter::Adapter;
use crate::checkpoint::ModelConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::exchange::{self, Exchange, Ranks};
use crate::gpu::Gpu;
use crate::model::Model;
use crate::placement::RoutingCounts;
use crate::plan::exchange::ExchangeWay;
use in_flight::InFlight;
use places::Places;
use runner::Runner;
use sequence::Sequence;
use worker::{check_adapter, tell};

/// Steps that may be on the device at a time.
const DEPTH: usize = 2;

/// Runs one model for many sequences.
pub struct Engine {
    runner: Runner,
    /// `None`: this rank is the only one.
    ranks: Option<Ranks>,
    options: EngineOptions,
    adapters: HashMap<AdapterId, Arc<Adapter>>,
    names: HashMap<String, AdapterId>,
    /// Every sequence that has not ended, by id: also the order of service.
    sequences: BTreeMap<SequenceId, Sequence>,
    places: Places,
    /// Cache blocks that the other ranks have not heard of.
    new_blocks: Vec<(u32, Vec<u32>)>,
    in_flight: VecDeque<InFlight>,
    events: Vec<Event>,
    next_sequence: u64,
    next_adapter: u64,
}

impl Engine {
    /// An engine on `gpu` for `model`. Sizes in `options` that are 0 are chosen.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] or [`ErrorKind::OutOfMemory`] when the device has no room for the cache;
    /// [`ErrorKind::Unsupported`] for a model that is one of several ranks' shares.
    pub fn new(gpu: &Gpu, model: Model, options: EngineOptions) -> Result<Self> {
        let world = model.topology().world();
        if world > 1 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the model is the share of one of {world} ranks: it needs a line to the others"),
            ));
        }
        Self::on(gpu, model, options, None)
    }

    /// Rank 0 of several: it schedules, and its steps are run by all. The other ranks are
    /// [`Worker`]s and take these options. [`Engine::begin_step`] then blocks while ranks exchange, and
    /// [`Engine::end`] must be called at the end. Blocks until all ranks are there.
    ///
    /// # Errors
    /// As [`Engine::new`]; [`ErrorKind::Rank`] when ranks do not agree on model or placement, [`ErrorKind::Config`] when they cannot
    /// exchange as `options` want it.
    pub fn with_ranks(gpu: &Gpu, model: Model, options: EngineOptions, line: Box<dyn Exchange>) -> Result<Self> {
        Self::on(gpu, model, options, Some(Ranks::new(line)))
    }

    fn on(gpu: &Gpu, model: Model, mut options: EngineOptions, mut ranks: Option<Ranks>) -> Result<Self> {
        // Where tokens are dispatched, no rank sees all choices.
        if options.count_routing && *options.exchange.get_or_insert(ExchangeWay::Sums) == ExchangeWay::Dispatch {
            let e = Error::new(ErrorKind::Unsupported, "count_routing: expected sums, got an exchange by dispatch");
            return Err(ranks.as_mut().map_or(e.clone(), |ranks| tell(ranks, e)));
        }
        let runner = match (Runner::new(gpu, model, &mut options, ranks.as_mut()), &mut ranks) {
            (Err(e), Some(ranks)) => return Err(tell(ranks, e)),
            (runner, _) => runner?,
        };
        let homes = match runner.way {
            ExchangeWay::Sums => 1,
            ExchangeWay::Dispatch => runner.model.topology().world(),
        };
        let places = Places::new(options.max_sequences, runner.blocks, homes);
        Ok(Self {
            runner,
            ranks,
            options,
            adapters: HashMap::new(),
            names: HashMap::new(),
            sequences: BTreeMap::new(),
            places,
            new_blocks: Vec::new(),
            in_flight: VecDeque::new(),
            events: Vec::new(),
            next_sequence: 1,
            next_adapter: 1,
        })
    }

    /// Ends the job: tells the other ranks that nothing more comes. With one rank it does nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Rank`] when another rank failed meanwhile.
    pub fn end(self) -> Result<()> {
        if let Some(mut ranks) = self.ranks {
            exchange::broadcast(ranks.line(), &[])?;
            ranks.end();
        }
        Ok(())
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.runner.model.config()
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.runner.model
    }

    /// From now on the n-th dispatch of this rank leaves a timestamp in query n, as
    /// [`Recording::profile`](crate::kernels::Recording::profile) says: for benchmarks.
    pub fn profile(&mut self, queries: &wgpu::QuerySet, capacity: usize) {
        self.runner.rec.profile(queries, capacity);
    }

    /// The labels of the dispatches that were profiled, in order; those to come are not.
    pub fn profiled(&mut self) -> Vec<String> {
        self.runner.rec.profiled()
    }

    /// Keeps the labels of what this rank dispatches from now on, and gives those kept so far, as
    /// [`Recording::labels`](crate::kernels::Recording::labels) says.
    pub fn labels(&mut self) -> Vec<String> {
        self.runner.rec.labels()
    }

    /// Bytes of adapters on this rank's device.
    pub fn adapter_bytes(&self) -> u64 {
        self.runner.pool.bytes()
    }

    /// Longest prompt and answer together, in tokens.
    pub fn max_context(&self) -> usize {
        self.options.max_context
    }

    /// The options in force, after they were fitted to the model and the device.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// How often each expert was chosen in the steps begun so far, and waits for them; `None` without
    /// [`EngineOptions::count_routing`]. Over several ranks these are the choices for all tokens, for rank 0 routes all.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] when the device was lost.
    pub fn routing_counts(&mut self) -> Result<Option<RoutingCounts>> {
        let Runner { counter, gpu, .. } = &mut self.runner;
        counter.as_mut().map(|counter| counter.read(gpu)).transpose()
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
        let id = AdapterId(self.next_adapter);
        match &mut self.ranks {
            None => self.runner.pool.check(adapter).map_err(|e| e.within(format!("adapter `{name}`")))?,
            Some(ranks) => {
                check_adapter(&self.runner, ranks, name, id, adapter).map_err(|e| tell(ranks, e))?;
            }
        }
        self.next_adapter += 1;
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
            self.runner.pool.unload(id);
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
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
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
            self.places.give(place.row, place.blocks);
            if let Some(slot) = place.slot {
                self.runner.pool.unpin(slot);
            }
        }
        if let Some(adapter) = sequence.request.adapter {
            self.drop_adapter(adapter);
        }
    }
}
