//! Staging memory of the device: a few mapped buffers that go round. A write through the queue would make a new one each
//! time, and its pages would be touched for the first time each time.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use super::stream::CHUNK_BYTES;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;

/// Buffers that go round: two would do if copies took equal times.
const BUFFERS: usize = 6;

/// Writes to device buffers through mapped memory.
pub(super) struct Ring {
    gpu: Gpu,
    made: usize,
    /// On their way, oldest first: the submission that reads a buffer, and whether it could be mapped again, once that is known.
    in_flight: VecDeque<(wgpu::Buffer, wgpu::SubmissionIndex, Arc<OnceLock<bool>>)>,
}

impl Ring {
    pub(super) fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone(), made: 0, in_flight: VecDeque::new() }
    }

    /// Writes `bytes`, a multiple of 4 of them, to `to` from `offset` on.
    ///
    /// Errors: `Device` when it was lost, `OutOfMemory`.
    pub(super) fn write(&mut self, to: &wgpu::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.len() > CHUNK_BYTES {
            // A row longer than a chunk.
            self.gpu.queue().write_buffer(to, offset, bytes);
            return self.settle();
        }
        let staging = self.mapped()?;
        let n_bytes = bytes.len() as u64;
        let unmapped = |e| Error::new(ErrorKind::Device, format!("uploading weights: {e}"));
        staging.get_mapped_range_mut(..n_bytes).map_err(unmapped)?.copy_from_slice(bytes);
        staging.unmap();
        let mut encoder =
            self.gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("upload") });
        encoder.copy_buffer_to_buffer(&staging, 0, to, offset, n_bytes);
        let submission = self.gpu.queue().submit([encoder.finish()]);
        let mapped = Arc::new(OnceLock::new());
        let done = mapped.clone();
        staging.map_async(wgpu::MapMode::Write, .., move |result| {
            // Called once.
            let _ = done.set(result.is_ok());
        });
        self.in_flight.push_back((staging, submission, mapped));
        Ok(())
    }

    /// Waits until everything has arrived.
    pub(super) fn settle(&mut self) -> Result<()> {
        self.gpu.queue().submit([]);
        self.wait(None)
    }

    /// A mapped buffer: a new one while there are few, else the oldest under way.
    fn mapped(&mut self) -> Result<wgpu::Buffer> {
        if self.made < BUFFERS {
            self.made += 1;
            return self.gpu.create(&wgpu::BufferDescriptor {
                label: Some("staging"),
                size: CHUNK_BYTES as u64,
                usage: wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: true,
            });
        }
        let lost = || Error::new(ErrorKind::Device, "uploading weights: the device gave a staging buffer not back");
        let (buffer, submission, mapped) = self.in_flight.pop_front().ok_or_else(lost)?;
        loop {
            match mapped.get() {
                Some(true) => return Ok(buffer),
                Some(false) => return Err(lost()),
                // Another thread that uses the device may have taken the callback and not called it yet, so once is not enough.
                None => {
                    self.gpu.check()?;
                    self.wait(Some(submission.clone()))?;
                }
            }
        }
    }

    fn wait(&self, submission_index: Option<wgpu::SubmissionIndex>) -> Result<()> {
        let poll = wgpu::PollType::Wait { submission_index, timeout: None };
        let lost = |e| Error::new(ErrorKind::Device, format!("uploading weights: {e}"));
        self.gpu.device().poll(poll).map(|_| ()).map_err(lost)
    }
}
