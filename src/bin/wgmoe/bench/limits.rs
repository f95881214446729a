//! What the device can do at best: copy memory, and multiply.

use std::time::{Duration, Instant};

use serde::Serialize;
use wgmoe::gpu::Gpu;
use wgmoe::kernels::rate::Rate;
use wgmoe::kernels::{Recording, View};

use crate::bench::timing::{Times, median};

/// Measured on the device that is benchmarked, in the same run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Limits {
    /// Bytes read and written by device copies, in GB a second.
    pub copy_gb_s: f64,
    /// Multiply-accumulates in registers, in TFLOP a second (two a multiply-accumulate).
    pub tflops: f64,
}

/// How long a measurement should take at least, so that its ends do not count.
const LONG: Duration = Duration::from_millis(20);
const RUNS: usize = 5;
/// Workgroups of a burst: enough for every device to be full many times over.
const WORKGROUPS: u32 = 2048;

impl Limits {
    pub fn measure(gpu: &Gpu) -> anyhow::Result<Self> {
        Ok(Self { copy_gb_s: copy(gpu)?, tflops: rate(gpu)? })
    }

    /// The least time for this work, in microseconds, and whether memory decides.
    pub fn least(&self, bytes: f64, macs: f64) -> (f64, bool) {
        let (memory, arithmetic) = (bytes / self.copy_gb_s / 1e3, 2.0 * macs / self.tflops / 1e6);
        (memory.max(arithmetic), memory >= arithmetic)
    }
}

fn wait(gpu: &Gpu) -> anyhow::Result<()> {
    gpu.device().poll(wgpu::PollType::wait_indefinitely())?;
    Ok(())
}

/// Copies between two buffers larger than any cache, by the host's clock over many.
fn copy(gpu: &Gpu) -> anyhow::Result<f64> {
    let size =
        if gpu.info().software { 16 << 20 } else { (512 << 20).min(gpu.capabilities().max_binding_bytes & !255) };
    let buffers = [(); 2].map(|()| gpu.buffer("copy", size, wgpu::BufferUsages::empty()));
    let [from, to] = buffers;
    let (from, to) = (from?, to?);
    let timed = |copies: usize| -> anyhow::Result<Duration> {
        let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for _ in 0..copies {
            encoder.copy_buffer_to_buffer(&from, 0, &to, 0, size);
        }
        let commands = encoder.finish();
        let begin = Instant::now();
        gpu.queue().submit([commands]);
        wait(gpu)?;
        Ok(begin.elapsed())
    };
    let mut copies = 1;
    while timed(copies)? < LONG {
        copies *= 2;
    }
    let seconds = median((0..RUNS).map(|_| Ok(timed(copies)?.as_secs_f64())).collect::<anyhow::Result<_>>()?);
    Ok(2.0 * size as f64 * copies as f64 / seconds / 1e9)
}

/// Bursts of arithmetic, by the device's clock.
fn rate(gpu: &Gpu) -> anyhow::Result<f64> {
    let workgroups = if gpu.info().software { 16 } else { WORKGROUPS };
    let out = View::whole(&gpu.buffer("rate", u64::from(workgroups) * 1024, wgpu::BufferUsages::empty())?);
    let mut rec = Recording::new(gpu);
    let mut burst = |rounds: u32, times: Option<(&Times, usize)>| -> anyhow::Result<f64> {
        rec.reset();
        let burst = Rate { workgroups, rounds, out: &out };
        let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        {
            let timestamp_writes = times.map(|(times, run)| times.pass(run));
            let mut pass =
                encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some("rate"), timestamp_writes });
            burst.record(&mut rec, &mut pass)?;
        }
        rec.flush();
        let begin = Instant::now();
        gpu.queue().submit([encoder.finish()]);
        if times.is_none() {
            wait(gpu)?;
        }
        log::debug!("burst of {rounds} rounds: {:?}", begin.elapsed());
        Ok(begin.elapsed().as_secs_f64())
    };
    let mut rounds = 16;
    burst(rounds, None)?;
    while burst(rounds, None)? < LONG.as_secs_f64() && rounds < 1 << 24 {
        rounds *= 2;
    }
    let times = Times::new(gpu, RUNS);
    for run in 0..RUNS {
        burst(rounds, Some((&times, run)))?;
    }
    let (us, _) = times.medians(gpu, &[])?;
    let macs = Rate { workgroups, rounds, out: &out }.macs(gpu.capabilities());
    Ok(2.0 * macs / us / 1e6)
}
