//! Which rows a step has, and its recording.

use std::collections::BTreeMap;

use crate::engine::in_flight::{InFlight, LogitRows, Mapped};
use crate::engine::runner::Rows;
use crate::engine::sequence::{Place, Sequence};
use crate::engine::worker::{StepMessage, tell};
use crate::engine::{DEPTH, Engine, SequenceId};
use crate::error::{Error, ErrorKind, Result};
use crate::exchange;
use crate::gpu::Gpu;
use crate::kernels::sample::{Pick, Sample};
use crate::model::{Commands, KvCache};

/// The rows of one step.
#[derive(Default)]
struct Batch {
    /// Token or -1, position, sequence row, slot.
    rows: Vec<[i32; 4]>,
    /// Slot of each row, -1 for none.
    mapping: Vec<i32>,
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
            if self.free_rows.is_empty() {
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
            let (Some(blocks), Some(row)) =
                (self.runner.cache.take(KvCache::blocks_for(positions)), self.free_rows.last().copied())
            else {
                if let Some(slot) = slot {
                    self.runner.pool.unpin(slot);
                }
                return;
            };
            self.free_rows.pop();
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
        if let Some(ranks) = &mut self.ranks {
            let message = message(&batch, &self.sequences, std::mem::take(&mut self.new_blocks));
            exchange::broadcast(ranks.line(), &message.encode())?;
        }
        self.runner.rec.reset();
        let picks = self.runner.upload("picks", bytemuck::cast_slice(&batch.picks))?;
        // What the device refuses must not look like a result: the step's buffers would hold those of an earlier one.
        let scope = self.runner.gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
        let mut commands = Commands::new(&self.runner.gpu, self.ranks.as_mut());
        let Batch { rows, mapping, gather, .. } = &batch;
        let logits = self.runner.layers(&mut commands, &Rows { rows, mapping, gather })?;

        let n_picks = batch.picks.len();
        let vocab = self.runner.model.config().vocab;
        let sampled = self.runner.rec.scratch("sampled", (n_picks.max(1) * 4) as u64)?;
        if let Some(logits) = &logits
            && n_picks > 0
        {
            let sample = Sample {
                rows: n_picks,
                vocab,
                logits,
                picks: &picks,
                sampled: &sampled,
                last_ids: &self.runner.last_ids,
            };
            commands.pass(&mut self.runner.rec, "sample", 0, |rec, pass| sample.record(rec, pass))?;
        }
        // Status, sampled ids, then the logits that somebody wants, in one buffer to map.
        let wanted: usize = batch.logits.iter().map(|l| l.count).sum();
        let logit_base = (4 + n_picks * 4).next_multiple_of(16);
        let bytes = (logit_base + wanted * vocab * 4) as u64;
        let staging = staging(&mut self.readback, &self.runner.gpu, bytes);
        let encoder = commands.encoder();
        encoder.copy_buffer_to_buffer(&self.runner.status.buffer, 0, &staging, 0, 4);
        if n_picks > 0 {
            encoder.copy_buffer_to_buffer(&sampled.buffer, 0, &staging, 4, (n_picks * 4) as u64);
        }
        if let Some(logits) = &logits {
            let mut at = logit_base as u64;
            for l in &batch.logits {
                let size = (l.count * vocab * 4) as u64;
                encoder.copy_buffer_to_buffer(&logits.buffer, (l.first * vocab * 4) as u64, &staging, at, size);
                at += size;
            }
        }
        let submission = commands.submit(&mut self.runner.rec)?;
        if let Some(e) = pollster::block_on(scope.pop()) {
            return Err(Error::new(ErrorKind::Device, format!("step refused: {e}")));
        }
        let mapped = Mapped::request(&staging, bytes);
        let Batch { picked, read_out, logits, members, .. } = batch;
        let step = InFlight { submission, staging, bytes, logit_base, picked, read_out, logits, members, mapped };
        self.in_flight.push_back(step);
        Ok(())
    }
}

impl Batch {
    fn push(&mut self, token: i32, position: usize, place: &Place) {
        let slot = place.slot.map_or(-1, |s| s as i32);
        self.rows.push([token, position as i32, place.row as i32, slot]);
        self.mapping.push(slot);
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

/// A mappable buffer of at least `bytes`, one of `free` where one is large enough.
fn staging(free: &mut Vec<wgpu::Buffer>, gpu: &Gpu, bytes: u64) -> wgpu::Buffer {
    if let Some(at) = free.iter().position(|b| b.size() >= bytes) {
        return free.swap_remove(at);
    }
    free.clear();
    gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: Some("readback"),
        size: bytes.next_power_of_two().max(256),
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    })
}

/// The step as the other ranks hear of it.
fn message(batch: &Batch, sequences: &BTreeMap<SequenceId, Sequence>, blocks: Vec<(u32, Vec<u32>)>) -> StepMessage {
    // Which adapter a slot holds: pinned slots keep theirs while a sequence runs.
    let mut adapters: Vec<(i32, u64)> = Vec::new();
    for sequence in batch.members.iter().filter_map(|id| sequences.get(id)) {
        if let (Some(id), Some(slot)) = (sequence.request.adapter, sequence.place.as_ref().and_then(|p| p.slot)) {
            adapters.push((slot as i32, id.0));
        }
    }
    adapters.sort_unstable();
    adapters.dedup();
    let place = |slot: i32| adapters.iter().position(|(s, _)| *s == slot).map_or(-1, |i| i as i32);
    let rows = batch.rows.iter().map(|[token, position, row, slot]| [*token, *position, *row, place(*slot)]).collect();
    StepMessage { rows, adapters: adapters.into_iter().map(|(_, id)| id).collect(), blocks }
}
