//! Steps on the device, and what comes back from them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::engine::results::Results;
use crate::engine::runner::{Readback, Runner};
use crate::engine::{Engine, Event, FinishReason, SequenceId};
use crate::error::{Error, ErrorKind, Result};
use crate::router::{STATUS_ID, STATUS_NON_FINITE, STATUS_SLOT};

/// Logits of a prompt that a step computes.
pub(crate) struct LogitRows {
    pub sequence: SequenceId,
    /// First position.
    pub position: usize,
    /// First row among the step's logits.
    pub first: usize,
    pub count: usize,
}

const PENDING: u8 = 0;
const READY: u8 = 1;
const LOST: u8 = 2;

/// A step that was begun.
pub(crate) struct InFlight {
    pub arrival: Arrival,
    pub results: Results,
    /// Whose tokens were sampled, in order.
    pub picked: Vec<SequenceId>,
    /// Whose prompt ends here without a token.
    pub read_out: Vec<SequenceId>,
    pub logits: Vec<LogitRows>,
    /// Every sequence with a row in the step.
    pub members: Vec<SequenceId>,
}

/// Where a step's [`Results`] are.
pub(crate) enum Arrival {
    OnDevice(Readback, Mapped),
    /// Collected from all ranks.
    Here(Vec<u8>),
}

/// Whether a buffer's mapping is pending, ready or lost.
pub(crate) struct Mapped(Arc<AtomicU8>);

impl Mapped {
    /// Asks for the results of a step.
    pub fn request(readback: &Readback) -> Self {
        let state = Arc::new(AtomicU8::new(PENDING));
        let flag = state.clone();
        readback.staging.map_async(wgpu::MapMode::Read, 0..readback.mapped_bytes(), move |result| {
            flag.store(if result.is_ok() { READY } else { LOST }, Ordering::Release);
        });
        Self(state)
    }
}

impl Readback {
    fn mapped_bytes(&self) -> u64 {
        self.results.bytes().next_multiple_of(8) as u64
    }
}

impl Runner {
    /// Waits until the device has finished a step.
    fn wait(&self, readback: &Readback) -> Result<()> {
        let wait = wgpu::PollType::Wait { submission_index: Some(readback.submission.clone()), timeout: None };
        self.gpu.device().poll(wait).map_err(|e| Error::new(ErrorKind::Device, format!("device: {e}")))?;
        Ok(())
    }

    /// The results of a step that have been mapped.
    fn take(&mut self, readback: Readback) -> Result<Vec<u8>> {
        let data = {
            let view = readback
                .staging
                .get_mapped_range(0..readback.mapped_bytes())
                .map_err(|e| Error::new(ErrorKind::Device, format!("device: {e}")))?;
            view[..readback.results.bytes()].to_vec()
        };
        readback.staging.unmap();
        self.recycle(readback.staging);
        Ok(data)
    }

    /// Waits for the results of a step.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] when the device was lost.
    pub fn results(&mut self, readback: Readback) -> Result<Vec<u8>> {
        let mapped = Mapped::request(&readback);
        self.wait(&readback)?;
        // Another thread that uses the device may be the one that hears of it.
        while mapped.0.load(Ordering::Acquire) == PENDING {
            self.gpu.check()?;
            self.gpu
                .device()
                .poll(wgpu::PollType::Poll)
                .map_err(|e| Error::new(ErrorKind::Device, format!("device: {e}")))?;
        }
        self.take(readback)
    }
}

impl Engine {
    /// Collects what has finished since the last call. Never blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Device`] when the device was lost; nothing more will come then.
    pub fn poll(&mut self) -> Result<Vec<Event>> {
        self.runner
            .gpu
            .device()
            .poll(wgpu::PollType::Poll)
            .map_err(|e| Error::new(ErrorKind::Device, format!("device: {e}")))?;
        self.collect()
    }

    /// Waits for the oldest step on the device, if any, and collects what has finished.
    ///
    /// # Errors
    /// As [`Engine::poll`].
    pub fn wait(&mut self) -> Result<Vec<Event>> {
        if self.events.is_empty()
            && let Some(InFlight { arrival: Arrival::OnDevice(readback, _), .. }) = self.in_flight.front()
        {
            self.runner.wait(readback)?;
        }
        self.collect()
    }

    fn collect(&mut self) -> Result<Vec<Event>> {
        while let Some(step) = self.in_flight.front() {
            if let Arrival::OnDevice(_, mapped) = &step.arrival {
                match mapped.0.load(Ordering::Acquire) {
                    READY => {}
                    PENDING => {
                        // What is on a lost device never arrives.
                        self.runner.gpu.check()?;
                        break;
                    }
                    _ => return Err(Error::new(ErrorKind::Device, "device: lost while a step was running")),
                }
            }
            if let Some(mut step) = self.in_flight.pop_front() {
                let data = match std::mem::replace(&mut step.arrival, Arrival::Here(Vec::new())) {
                    Arrival::Here(data) => data,
                    Arrival::OnDevice(readback, _) => self.runner.take(readback)?,
                };
                self.deliver(&step, &data);
            }
        }
        Ok(std::mem::take(&mut self.events))
    }

    fn deliver(&mut self, step: &InFlight, data: &[u8]) {
        let word = |at: usize| i32::from_le_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]);
        let status = word(0) as u32;
        if status != 0 {
            for id in &step.members {
                if self.sequences.contains_key(id) {
                    self.fail(*id, Error::new(ErrorKind::Device, status_message(status)));
                }
            }
            return;
        }
        let vocab = self.config().vocab;
        let mut at = step.results.logit_base();
        for l in &step.logits {
            let size = l.count * vocab * 4;
            if self.sequences.contains_key(&l.sequence) {
                let rows = bytemuck::pod_collect_to_vec(&data[at..at + size]);
                self.events.push(Event::Logits { sequence: l.sequence, position: l.position, rows });
            }
            at += size;
        }
        for id in &step.read_out {
            if self.sequences.contains_key(id) {
                self.finish(*id, FinishReason::Length);
            }
        }
        for (i, id) in step.picked.iter().enumerate() {
            // A sequence that has ended meanwhile: this token is the one step too many.
            let Some(s) = self.sequences.get_mut(id) else { continue };
            let token = word(4 + i * 4);
            if token < 0 {
                self.fail(*id, Error::new(ErrorKind::Device, "the model computed no finite logit"));
                continue;
            }
            s.arrived += 1;
            s.last = token as u32;
            let stop = s.request.stop_ids.contains(&(token as u32));
            let full = s.arrived >= s.max_tokens;
            self.events.push(Event::Token { sequence: *id, id: token as u32 });
            if stop {
                self.finish(*id, FinishReason::Stop);
            } else if full {
                self.finish(*id, FinishReason::Length);
            }
        }
    }
}

fn status_message(status: u32) -> String {
    let mut what = Vec::new();
    if status & STATUS_NON_FINITE != 0 {
        what.push("a router row had too few finite logits");
    }
    if status & STATUS_SLOT != 0 {
        what.push("an adapter slot was out of range");
    }
    if status & STATUS_ID != 0 {
        what.push("an expert id was out of range");
    }
    format!("step failed: {}", what.join("; "))
}
