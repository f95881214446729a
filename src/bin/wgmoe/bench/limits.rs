//! What the device can do at best: copy memory, and multiply.

use std::time::{Duration, Instant};

use serde::Serialize;
use wgmoe::gpu::Gpu;
use wgmoe::kernels::rate::Rate;
use wgmoe::kernels::stream::Stream;
use wgmoe::kernels::{Recording, View};

use crate::bench::timing::{Times, WARM_UP};

/// Measured on the device that is benchmarked, in the same run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Limits {
    /// Bytes read and written by a shader that copies, in GB a second.
    pub copy_gb_s: f64,
    /// Multiply-accumulates in registers, in TFLOP a second (two a multiply-accumulate).
    pub tflops: f64,
}

/// How long a measurement should take at least, so that its ends do not count.
const LONG: Duration = Duration::from_millis(20);
const RUNS: usize = 5;
/// Repetitions at most.
const MOST: u32 = 1 << 14;
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

/// Copies between two buffers larger than any cache.
fn copy(gpu: &Gpu) -> anyhow::Result<f64> {
    let size =
        if gpu.info().software { 16 << 20 } else { (512 << 20).min(gpu.capabilities().max_binding_bytes & !255) };
    let view = || -> anyhow::Result<View> { Ok(View::whole(&gpu.buffer("copy", size, wgpu::BufferUsages::empty())?)) };
    let (from, to) = (view()?, view()?);
    let us = burst(gpu, &mut |rec, pass, times| {
        for _ in 0..times {
            Stream { from: &from, to: &to }.record(rec, pass)?;
        }
        Ok(())
    })?;
    Ok(2.0 * size as f64 / us / 1e3)
}

/// Arithmetic in registers.
fn rate(gpu: &Gpu) -> anyhow::Result<f64> {
    let workgroups = if gpu.info().software { 16 } else { WORKGROUPS };
    let out = View::whole(&gpu.buffer("rate", u64::from(workgroups) * 1024, wgpu::BufferUsages::empty())?);
    let us = burst(gpu, &mut |rec, pass, rounds| Ok(Rate { workgroups, rounds, out: &out }.record(rec, pass)?))?;
    Ok(2.0 * Rate { workgroups, rounds: 1, out: &out }.macs(gpu.capabilities()) / us / 1e6)
}

/// Records work so many times over.
type Repeat<'a> = dyn FnMut(&mut Recording, &mut wgpu::ComputePass<'_>, u32) -> anyhow::Result<()> + 'a;

/// Median time of `work` done once, in microseconds by the device's clock, from runs that repeat it until they are long.
fn burst(gpu: &Gpu, work: &mut Repeat<'_>) -> anyhow::Result<f64> {
    let mut rec = Recording::new(gpu);
    let mut run = |n: u32, times: Option<(&Times, usize)>| -> anyhow::Result<Duration> {
        rec.reset();
        let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        {
            let timestamp_writes = times.map(|(times, run)| times.pass(run));
            let mut pass =
                encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some("limit"), timestamp_writes });
            work(&mut rec, &mut pass, n)?;
        }
        rec.flush();
        let begin = Instant::now();
        gpu.queue().submit([encoder.finish()]);
        gpu.device().poll(wgpu::PollType::wait_indefinitely())?;
        Ok(begin.elapsed())
    };
    // The first compiles the shader.
    run(1, None)?;
    // A device that was idle works at a lower clock at first.
    let begin = Instant::now();
    while begin.elapsed() < WARM_UP {
        run(1, None)?;
    }
    let mut n = 1;
    while run(n, None)? < LONG && n < MOST {
        n *= 2;
    }
    let times = Times::new(gpu, RUNS);
    for i in 0..RUNS {
        run(n, Some((&times, i)))?;
    }
    Ok(times.medians(gpu, &[])?.0 / f64::from(n))
}
