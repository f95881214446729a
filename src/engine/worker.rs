//! A rank that runs the steps another one schedules, and the message that tells it what they are.

use std::collections::HashMap;
use std::sync::Arc;

use crate::adapter::Adapter;
use crate::engine::runner::{Rows, Runner};
use crate::engine::{AdapterId, EngineOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::exchange::{self, Exchange, Ranks};
use crate::gpu::Gpu;
use crate::model::{Commands, Model};

/// One step as rank 0 tells it to the others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct StepMessage {
    /// Token, position, sequence row, and place in `adapters` or -1. Slots are a rank's own affair.
    pub rows: Vec<[i32; 4]>,
    /// Adapters of the step: ids are the same on every rank.
    pub adapters: Vec<u64>,
    /// Cache blocks of sequences that are new in this step, by sequence row.
    pub blocks: Vec<(u32, Vec<u32>)>,
}

impl StepMessage {
    /// As bytes; never empty, for no bytes at all mean the end.
    pub fn encode(&self) -> Vec<u8> {
        let mut words = vec![self.rows.len() as u32, self.adapters.len() as u32, self.blocks.len() as u32];
        words.extend(self.rows.as_flattened().iter().map(|n| *n as u32));
        words.extend(self.adapters.iter().flat_map(|id| [*id as u32, (*id >> 32) as u32]));
        for (row, blocks) in &self.blocks {
            words.extend([*row, blocks.len() as u32]);
            words.extend(blocks);
        }
        bytemuck::cast_slice(&words).to_vec()
    }

    /// The inverse; `None` for other bytes.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if !bytes.len().is_multiple_of(4) {
            return None;
        }
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(bytes);
        let mut rest = &words[..];
        let mut take = |n: usize| {
            let (taken, left) = rest.split_at_checked(n)?;
            rest = left;
            Some(taken)
        };
        let &[n_rows, n_adapters, n_blocks] = take(3)? else { return None };
        let rows = take((n_rows as usize).checked_mul(4)?)?.as_chunks::<4>().0;
        let rows = rows.iter().map(|row| row.map(|n| n as i32)).collect();
        let ids = take((n_adapters as usize).checked_mul(2)?)?.as_chunks::<2>().0;
        let adapters = ids.iter().map(|[low, high]| u64::from(*low) | u64::from(*high) << 32).collect();
        let mut blocks = Vec::new();
        for _ in 0..n_blocks {
            let &[row, n] = take(2)? else { return None };
            blocks.push((row, take(n as usize)?.to_vec()));
        }
        rest.is_empty().then_some(Self { rows, adapters, blocks })
    }
}

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
        let runner = &mut self.runner;
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
        let slot_of = |place: i32| usize::try_from(place).ok().and_then(|i| slots.get(i)).map_or(-1, |s| *s as i32);
        let rows: Vec<[i32; 4]> = message.rows.iter().map(|[t, p, r, a]| [*t, *p, *r, slot_of(*a)]).collect();
        let mapping: Vec<i32> = rows.iter().map(|row| row[3]).collect();
        runner.rec.reset();
        let mut commands = Commands::new(&runner.gpu.clone(), Some(&mut self.ranks));
        runner.layers(&mut commands, &Rows { rows: &rows, mapping: &mapping, gather: &[] })?;
        commands.submit(&mut runner.rec)?;
        // Factors are replaced by queue writes, which come after this step.
        slots.iter().for_each(|slot| runner.pool.unpin(*slot));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_way_and_broken_ones_are_noticed() {
        let message = StepMessage {
            rows: vec![[5, 0, 1, -1], [7, 3, 0, 1]],
            adapters: vec![1, u64::MAX - 3],
            blocks: vec![(1, vec![4, 9]), (0, vec![])],
        };
        let bytes = message.encode();
        assert_eq!(StepMessage::decode(&bytes), Some(message));
        assert!(!StepMessage::default().encode().is_empty());
        for n in 0..bytes.len() {
            assert_eq!(StepMessage::decode(&bytes[..n]), None, "{n}");
        }
        let endless = bytemuck::cast_slice(&[u32::MAX; 8]).to_vec();
        assert_eq!(StepMessage::decode(&endless), None);
    }
}
