//! Host memory that device buffers are copied to and from. Both kinds of buffers go round, so that in the steady state nothing
//! is made: a write through the queue would make a buffer each time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::View;

fn lost(e: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Device, format!("exchange: {e}"))
}

/// Copies from the device to the host.
#[derive(Default)]
pub(super) struct Downloads {
    free: Vec<wgpu::Buffer>,
}

/// One of them, on its way.
pub(crate) struct Download {
    buffer: wgpu::Buffer,
    n_bytes: u64,
    mapped: Arc<AtomicBool>,
}

impl Download {
    /// Asks for the bytes, once the commands that copy them have been submitted.
    pub fn request(&self) {
        let mapped = self.mapped.clone();
        // A failure is noticed when the range is asked for.
        self.buffer.map_async(wgpu::MapMode::Read, 0..self.n_bytes, move |_| mapped.store(true, Ordering::Release));
    }
}

impl Downloads {
    /// Records the copy of the first bytes of each of `parts`, one behind the other. [`Download::request`] follows its
    /// submission.
    pub fn copy(&mut self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder, parts: &[(&View, u64)]) -> Result<Download> {
        let n_bytes = parts.iter().map(|(_, n)| n).sum();
        let buffer = gpu.readable(&mut self.free, "exchange", n_bytes)?;
        let mut at = 0;
        for (view, n) in parts {
            encoder.copy_buffer_to_buffer(&view.buffer, view.offset, &buffer, at, *n);
            at += n;
        }
        Ok(Download { buffer, n_bytes, mapped: Arc::default() })
    }

    /// Waits for a download and shows its bytes to `read`.
    ///
    /// Errors: `Device` when it was lost; those of `read`.
    pub fn read<T>(&mut self, gpu: &Gpu, download: Download, read: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        while !download.mapped.load(Ordering::Acquire) {
            gpu.device().poll(wgpu::PollType::wait_indefinitely()).map_err(|e| lost(&e))?;
        }
        let result = {
            let view = download.buffer.get_mapped_range(0..download.n_bytes).map_err(|e| lost(&e))?;
            read(&view)
        };
        download.buffer.unmap();
        self.free.push(download.buffer);
        result
    }
}

/// Copies from the host to the device.
#[derive(Default)]
pub(super) struct Uploads {
    /// Mapped, or about to be.
    free: Vec<(wgpu::Buffer, Arc<AtomicBool>)>,
    /// Part of commands that have not been submitted yet.
    recorded: Vec<wgpu::Buffer>,
}

impl Uploads {
    /// Records writes: the bytes of each part, one slice behind the other, to the beginning of its view. [`Uploads::submitted`]
    /// follows the submission.
    ///
    /// Errors: `Device`, `OutOfMemory`.
    pub fn write(&mut self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder, parts: &[(&View, &[&[u8]])]) -> Result<()> {
        let size = |slices: &[&[u8]]| slices.iter().map(|s| s.len()).sum::<usize>();
        let n_bytes: usize = parts.iter().map(|(_, slices)| size(slices)).sum();
        if n_bytes == 0 {
            return Ok(());
        }
        let staging = self.mapped(gpu, n_bytes as u64)?;
        {
            let mut view = staging.get_mapped_range_mut(..n_bytes as u64).map_err(|e| lost(&e))?;
            let mut at = 0;
            for slice in parts.iter().flat_map(|(_, slices)| slices.iter()) {
                view.slice(at..at + slice.len()).copy_from_slice(slice);
                at += slice.len();
            }
        }
        staging.unmap();
        let mut at = 0;
        for (view, slices) in parts {
            let n = size(slices) as u64;
            if n > 0 {
                encoder.copy_buffer_to_buffer(&staging, at, &view.buffer, view.offset, n);
            }
            at += n;
        }
        self.recorded.push(staging);
        Ok(())
    }

    /// The recorded writes have been submitted: their memory is mapped again when they are done.
    pub fn submitted(&mut self) {
        for buffer in self.recorded.drain(..) {
            let mapped = Arc::new(AtomicBool::new(false));
            let done = mapped.clone();
            buffer.map_async(wgpu::MapMode::Write, .., move |result| done.store(result.is_ok(), Ordering::Release));
            self.free.push((buffer, mapped));
        }
    }

    /// A mapped buffer of at least `bytes`. Before each write its rank has waited for a later download than the write before,
    /// so one or two are enough.
    fn mapped(&mut self, gpu: &Gpu, bytes: u64) -> Result<wgpu::Buffer> {
        let ready = |(b, mapped): &(wgpu::Buffer, Arc<AtomicBool>)| b.size() >= bytes && mapped.load(Ordering::Acquire);
        if let Some(at) = self.free.iter().position(ready) {
            return Ok(self.free.swap_remove(at).0);
        }
        self.free.retain(|(b, _)| b.size() >= bytes);
        gpu.create(&wgpu::BufferDescriptor {
            label: Some("exchange"),
            size: bytes.next_power_of_two().max(256),
            usage: wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::GpuOptions;

    #[test]
    fn writes_arrive_in_order_and_their_memory_is_used_again() {
        let Ok(gpu) = Gpu::new(&GpuOptions::default()) else {
            assert!(std::env::var("WGMOE_TEST_NO_DEVICE").is_ok_and(|v| v == "skip"), "no device");
            return;
        };
        let (mut up, mut down) = (Uploads::default(), Downloads::default());
        let buffers = [64, 16].map(|n| View::whole(&gpu.buffer("test", n, wgpu::BufferUsages::empty()).unwrap()));
        for round in 0..6u8 {
            let bytes: Vec<u8> = (0..80).map(|i| i + round).collect();
            let encoder = || gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let mut encoder = encoder();
            let parts: [&[&[u8]]; 2] = [&[&bytes[..20], &[], &bytes[20..64]], &[&bytes[64..]]];
            up.write(&gpu, &mut encoder, &[(&buffers[0], parts[0]), (&buffers[1], parts[1])]).unwrap();
            let download = down.copy(&gpu, &mut encoder, &[(&buffers[0], 64), (&buffers[1], 16)]).unwrap();
            gpu.queue().submit([encoder.finish()]);
            up.submitted();
            download.request();
            let got = down.read(&gpu, download, |got| Ok(got.to_vec())).unwrap();
            assert_eq!(got, bytes, "round {round}");
            assert_eq!((up.free.len(), down.free.len()), (1, 1), "round {round}");
        }
    }
}
