//! Sums between ranks of what lies on their devices: one copy to the host, one exchange, one copy back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Exchange, sum};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::View;

/// A line with the host memory that sums pass through.
pub struct Ranks {
    line: Box<dyn Exchange>,
    /// Mappable buffers that are free.
    staging: Vec<wgpu::Buffer>,
    values: Vec<f32>,
}

/// A partial sum on its way to the host.
pub(crate) struct Partial {
    staging: wgpu::Buffer,
    n_bytes: u64,
    to: View,
    mapped: Arc<AtomicBool>,
}

impl Ranks {
    /// Exchanges over `line`.
    pub fn new(line: Box<dyn Exchange>) -> Self {
        Self { line, staging: Vec::new(), values: Vec::new() }
    }

    /// The line, for what is exchanged between host and host.
    pub fn line(&mut self) -> &mut dyn Exchange {
        &mut *self.line
    }

    /// Ends this rank well.
    pub fn end(self) {
        self.line.end();
    }

    /// Records the copy of the first `n_bytes` of `view` to the host. [`Partial::request`] follows its submission.
    pub(crate) fn copy(&mut self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder, view: &View, n_bytes: u64) -> Partial {
        let fits = self.staging.iter().position(|b| b.size() >= n_bytes);
        let staging = fits.map(|at| self.staging.swap_remove(at)).unwrap_or_else(|| {
            self.staging.clear();
            gpu.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some("partial sums"),
                size: n_bytes.next_power_of_two().max(256),
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        });
        encoder.copy_buffer_to_buffer(&view.buffer, view.offset, &staging, 0, n_bytes);
        Partial { staging, n_bytes, to: view.clone(), mapped: Arc::default() }
    }

    /// Waits for a partial sum, adds those of all ranks, and writes the sum back over it: before whatever is submitted next.
    ///
    /// # Errors
    /// Those of the exchange; [`ErrorKind::Device`] when the device was lost.
    pub(crate) fn complete(&mut self, gpu: &Gpu, partial: Partial) -> Result<()> {
        let lost = |e: &dyn std::fmt::Display| Error::new(ErrorKind::Device, format!("partial sums: {e}"));
        while !partial.mapped.load(Ordering::Acquire) {
            gpu.device().poll(wgpu::PollType::wait_indefinitely()).map_err(|e| lost(&e))?;
        }
        {
            let view = partial.staging.get_mapped_range(0..partial.n_bytes).map_err(|e| lost(&e))?;
            self.values.clear();
            self.values.extend(view.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
        partial.staging.unmap();
        self.staging.push(partial.staging);
        sum(&mut *self.line, &mut self.values)?;
        gpu.queue().write_buffer(&partial.to.buffer, partial.to.offset, bytemuck::cast_slice(&self.values));
        Ok(())
    }
}

impl Partial {
    /// Asks for the copy, once its commands have been submitted.
    pub(crate) fn request(&self) {
        let mapped = self.mapped.clone();
        // A failure is noticed when the range is asked for.
        self.staging.map_async(wgpu::MapMode::Read, 0..self.n_bytes, move |_| mapped.store(true, Ordering::Release));
    }
}
