//! A rank that runs the steps another one schedules.

use std::collections::HashMap;
use std::sync::Arc;

use crate::adapter::Adapter;
use crate::engine::message::StepMessage;
use crate::engine::runner::Runner;
use crate::engine::{AdapterId, EngineOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::exchange::{self, Exchange, Ranks};
use crate::gpu::Gpu;
use crate::model::Model;
use crate::plan::exchange::ExchangeWay;

/// A rank other than 0. It holds its share of the model and of every adapter, and follows.
pub struct Worker {
    runner: Runner,
    ranks: Ranks,
    adapters: HashMap<AdapterId, Arc<Adapter>>,
}

impl Worker {
    /// A worker on `gpu` for its share of the model, with the options that rank 0 was given. Blocks until all ranks are there.
    ///
    /// # Errors
    /// Those of [`Engine::with_ranks`](crate::Engine::with_ranks).
    pub fn new(gpu: &Gpu, model: Model, line: Box<dyn Exchange>) -> Result<Self> {
        let (mut ranks, mut options) = (Ranks::new(line), EngineOptions::default());
        match Runner::new(gpu, model, &mut options, Some(&mut ranks)) {
            Ok(runner) => Ok(Self { runner, ranks, adapters: HashMap::new() }),
            Err(e) => Err(tell(&mut ranks, e)),
        }
    }

    /// Takes this rank's share of an adapter. Every rank loads the same adapters in the same order.
    ///
    /// # Errors
    /// [`ErrorKind::Adapter`] when it was made for another model or another share; [`ErrorKind::Rank`].
    pub fn load_adapter(&mut self, name: &str, adapter: &Adapter) -> Result<AdapterId> {
        let id = AdapterId(self.adapters.len() as u64 + 1);
        let checked = check_adapter(&self.runner, &mut self.ranks, name, id, adapter);
        checked.map_err(|e| tell(&mut self.ranks, e))?;
        self.adapters.insert(id, Arc::new(adapter.clone()));
        Ok(id)
    }

    /// Runs steps until rank 0 ends.
    ///
    /// # Errors
    /// Those of a step; [`ErrorKind::Rank`] when another rank failed. All other ranks are told.
    pub fn run(mut self) -> Result<()> {
        loop {
            match self.step() {
                Ok(true) => {}
                Ok(false) => {
                    self.ranks.end();
                    return Ok(());
                }
                Err(e) => return Err(tell(&mut self.ranks, e)),
            }
        }
    }

    fn step(&mut self) -> Result<bool> {
        let bytes = exchange::broadcast(self.ranks.line(), &[])?;
        if bytes.is_empty() {
            return Ok(false);
        }
        let message = StepMessage::decode(&bytes)
            .ok_or_else(|| Error::new(ErrorKind::Format, "rank 0 sent a step that cannot be read"))?;
        let (rank, ranks, runner) = (self.ranks.line().rank(), self.ranks.line().ranks(), &mut self.runner);
        let message = message.part(runner.way, rank, ranks);
        for (row, blocks) in &message.blocks {
            runner.write_blocks(*row, blocks);
        }
        let mut slots = Vec::new();
        for id in &message.adapters {
            let id = AdapterId(*id);
            let unknown = || Error::new(ErrorKind::Adapter, "rank 0 uses an adapter that this rank has not loaded");
            let adapter = self.adapters.get(&id).ok_or_else(unknown)?;
            let slot = runner.pin(id, adapter)?;
            slots.push(slot.ok_or_else(|| {
                let n = message.adapters.len();
                Error::new(
                    ErrorKind::Limit,
                    format!("no room for the {n} adapters of one step; give less or more memory"),
                )
            })?);
        }
        let readback = runner.step(Some(&mut self.ranks), &message, &slots)?;
        // Factors are replaced by queue writes, which come after this step.
        slots.iter().for_each(|slot| runner.pool.unpin(*slot));
        match runner.way {
            ExchangeWay::Sums => runner.recycle(readback.staging),
            ExchangeWay::Dispatch => {
                let results = runner.results(readback)?;
                exchange::collect(self.ranks.line(), &results)?;
            }
        }
        Ok(true)
    }
}

/// Checks that `adapter` fits this rank and that all ranks load the same.
pub(crate) fn check_adapter(
    runner: &Runner,
    ranks: &mut Ranks,
    name: &str,
    id: AdapterId,
    adapter: &Adapter,
) -> Result<()> {
    runner.pool.check(adapter).map_err(|e| e.within(format!("adapter `{name}`")))?;
    exchange::agree(ranks.line(), &format!("adapter {} {name}", id.0))
}

/// Tells the other ranks of an error, unless it came from them.
pub(crate) fn tell(ranks: &mut Ranks, error: Error) -> Error {
    if error.kind() != ErrorKind::Rank {
        ranks.line().fail(&error.to_string());
    }
    error
}
