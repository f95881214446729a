//! Which rows a step has, and its recording.

use crate::engine::in_flight::{Arrival, InFlight, LogitRows, Mapped};
use crate::engine::message::StepMessage;
use crate::engine::results::{Results, merge};
use crate::engine::runner::Readback;
use crate::engine::sequence::Place;
use crate::engine::worker::tell;
use crate::engine::{DEPTH, Engine, SequenceId};
use crate::error::{Error, Result};
use crate::exchange;
use crate::kernels::sample::Pick;
use crate::model::KvCache;
use crate::plan::exchange::ExchangeWay;

/// The rows of one step.
#[derive(Default)]
struct Batch {
    /// Token or -1, position, sequence row, slot.
    rows: Vec<[i32; 4]>,
    /// Rows whose logits are computed.
    gather: Vec<u32>,
    picks: Vec<Pick>,
    picked: Vec<SequenceId>,
    /// Sequences whose prompt ends here and that want no token.
    read_out: Vec<SequenceId>,
    logits: Vec<LogitRows>,
    members: Vec<SequenceId>,
}

impl Engine {
    /// Begins one step: admits waiting sequences, records and submits. Never waits for the device; the first steps compile
    /// shaders, and a step that admits an adapter copies its factors. Returns false when there was
    /// nothing to begin, or enough is on the way.
    ///
    /// # Errors
    /// When the device was lost, refuses a shader or has no memory left; the engine should be dropped then.
    pub fn begin_step(&mut self) -> Result<bool> {
        if let Err(e) = self.runner.gpu.check() {
            return Err(self.told(e));
        }
        // Several ranks: the others are told tokens, so the step before must have arrived.
        let depth = if self.ranks.is_some() { 1 } else { DEPTH };
        if self.in_flight.len() >= depth {
            return Ok(false);
        }
        self.admit();
        let batch = self.batch();
        if batch.rows.is_empty() {
            return Ok(false);
        }
        if let Err(e) = self.record(batch) {
            return Err(self.told(e));
        }
        Ok(true)
    }

    /// The error, of which the other ranks have been told.
    fn told(&mut self, e: Error) -> Error {
        match &mut self.ranks {
            Some(ranks) => tell(ranks, e),
            None => e,
        }
    }

    /// Gives waiting sequences a place, in order; the first that does not fit holds back those behind it.
    fn admit(&mut self) {
        let waiting: Vec<SequenceId> =
            self.sequences.iter().filter(|(_, s)| s.place.is_none()).map(|(id, _)| *id).collect();
        for id in waiting {
            if self.places.is_full() {
                return;
            }
            let (adapter, positions) = (self.sequences[&id].request.adapter, self.sequences[&id].positions());
            let slot = match adapter {
                None => None,
                Some(adapter) => match self.runner.pin(adapter, &self.adapters[&adapter]) {
                    Ok(Some(slot)) => Some(slot),
                    Ok(None) => return,
                    Err(e) => {
                        self.fail(id, e);
                        continue;
                    }
                },
            };
            let Some((row, blocks)) = self.places.take(KvCache::blocks_for(positions)) else {
                if let Some(slot) = slot {
                    self.runner.pool.unpin(slot);
                }
                return;
            };
            self.runner.write_blocks(row, &blocks);
            if self.ranks.is_some() {
                self.new_blocks.push((row, blocks.clone()));
            }
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.place = Some(Place { row, blocks, slot });
            }
        }
    }

    /// Decodes first, so that running answers are never held up, then as much of the prompts as fits.
    fn batch(&mut self) -> Batch {
        let mut batch = Batch::default();
        let ids: Vec<SequenceId> = self.sequences.keys().copied().collect();
        for id in &ids {
            let Some(s) = self.sequences.get_mut(id) else { continue };
            let Some(place) = s.place.as_ref().filter(|_| s.decodes()) else { continue };
            let position = s.request.prompt.len() + s.sampled - 1;
            // On one device the id never leaves it; other ranks have to be told.
            let token = if self.ranks.is_some() { s.last as i32 } else { -1 };
            batch.push(token, position, place);
            batch.pick(*id, s.sampled, place.row, &s.request.sampling);
            batch.members.push(*id);
            s.sampled += 1;
        }
        for id in &ids {
            let Some(s) = self.sequences.get_mut(id) else { continue };
            let Some(place) = s.place.as_ref().filter(|_| s.prompt_left() > 0) else { continue };
            let mut n = s.prompt_left().min(self.options.max_step_tokens.saturating_sub(batch.rows.len()));
            let room = self.runner.max_logit_rows.saturating_sub(batch.gather.len());
            if s.request.logits {
                n = n.min(room);
            }
            if n == 0 || room == 0 {
                continue;
            }
            if s.request.logits {
                batch.logits.push(LogitRows { sequence: *id, position: s.read, first: batch.gather.len(), count: n });
            }
            for i in s.read..s.read + n {
                if s.request.logits {
                    batch.gather.push(batch.rows.len() as u32);
                }
                batch.push(s.request.prompt[i] as i32, i, place);
            }
            batch.members.push(*id);
            s.read += n;
            if s.prompt_left() == 0 {
                if s.max_tokens > 0 {
                    if s.request.logits {
                        batch.gather.pop();
                    }
                    batch.pick(*id, 0, place.row, &s.request.sampling);
                    s.sampled = 1;
                } else {
                    batch.read_out.push(*id);
                }
            }
        }
        batch
    }

    fn record(&mut self, batch: Batch) -> Result<()> {
        let (step, slots) = self.message(&batch);
        let results = Results::of(&step, self.runner.model.config().vocab);
        let arrival = match &mut self.ranks {
            None => on_device(self.runner.step(None, &step, &slots)?),
            Some(ranks) => {
                exchange::broadcast(ranks.line(), &step.encode())?;
                let (rank, n) = (ranks.line().rank(), ranks.line().ranks());
                let part = step.part(self.runner.way, rank, n);
                let readback = self.runner.step(Some(ranks), &part, &slots)?;
                match self.runner.way {
                    ExchangeWay::Sums => on_device(readback),
                    ExchangeWay::Dispatch => {
                        let own = self.runner.results(readback)?;
                        let parts = exchange::collect(ranks.line(), &own)?;
                        Arrival::Here(merge(&step, results.vocab, &parts)?)
                    }
                }
            }
        };
        let Batch { picked, read_out, logits, members, .. } = batch;
        self.in_flight.push_back(InFlight { arrival, results, picked, read_out, logits, members });
        Ok(())
    }

    /// The step as all ranks hear of it, and the slots of its adapters on this one.
    fn message(&mut self, batch: &Batch) -> (StepMessage, Vec<usize>) {
        // Which adapter a slot holds: pinned slots keep theirs while a sequence runs.
        let mut adapters: Vec<(usize, u64)> = Vec::new();
        for sequence in batch.members.iter().filter_map(|id| self.sequences.get(id)) {
            if let (Some(id), Some(slot)) = (sequence.request.adapter, sequence.place.as_ref().and_then(|p| p.slot)) {
                adapters.push((slot, id.0));
            }
        }
        adapters.sort_unstable();
        adapters.dedup();
        let place = |slot: i32| adapters.iter().position(|(s, _)| *s as i32 == slot).map_or(-1, |i| i as i32);
        let message = StepMessage {
            rows: batch
                .rows
                .iter()
                .map(|[token, position, row, slot]| [*token, *position, *row, place(*slot)])
                .collect(),
            adapters: adapters.iter().map(|(_, id)| *id).collect(),
            blocks: std::mem::take(&mut self.new_blocks),
            gather: batch.gather.clone(),
            picks: batch.picks.clone(),
            wanted: batch.logits.iter().map(|l| [l.first as u32, l.count as u32]).collect(),
        };
        (message, adapters.into_iter().map(|(slot, _)| slot).collect())
    }
}

fn on_device(readback: Readback) -> Arrival {
    let mapped = Mapped::request(&readback);
    Arrival::OnDevice(readback, mapped)
}

impl Batch {
    fn push(&mut self, token: i32, position: usize, place: &Place) {
        let slot = place.slot.map_or(-1, |s| s as i32);
        self.rows.push([token, position as i32, place.row as i32, slot]);
    }

    /// Samples from the row pushed last.
    fn pick(&mut self, id: SequenceId, n: usize, row: u32, sampling: &crate::engine::Sampling) {
        self.picks.push(Pick {
            row: self.gather.len() as u32,
            sequence: row,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            u: sampling.uniform(n),
            pad0: 0,
            pad1: 0,
        });
        self.picked.push(id);
        self.gather.push(self.rows.len() as u32 - 1);
    }
}
