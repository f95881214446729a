//! The device's own clock.

use std::time::Duration;

use wgmoe::gpu::Gpu;

use crate::Device;

/// Opens a device that has a clock.
pub fn open(device: &Device) -> anyhow::Result<Gpu> {
    let gpu = device.open()?;
    if !gpu.device().features().contains(wgpu::Features::TIMESTAMP_QUERY) {
        anyhow::bail!("device `{}` has no timestamps to measure with", gpu.info().name);
    }
    Ok(gpu)
}

/// How long the device works before it is timed: an idle one lowers its clock.
pub const WARM_UP: Duration = Duration::from_millis(300);

/// Dispatches that a profile has room for.
pub const STAGES: u32 = 64;

/// Timestamps of some runs: both ends of each, and the end of each dispatch.
pub struct Times {
    runs: usize,
    ends: wgpu::QuerySet,
    stages: Vec<wgpu::QuerySet>,
}

impl Times {
    pub fn new(gpu: &Gpu, runs: usize) -> Self {
        let set = |count: u32| {
            let ty = wgpu::QueryType::Timestamp;
            gpu.device().create_query_set(&wgpu::QuerySetDescriptor { label: None, ty, count })
        };
        Self { runs, ends: set(2 * runs as u32), stages: (0..runs).map(|_| set(STAGES)).collect() }
    }

    /// Where a pass that is run number `run` leaves its ends.
    pub fn pass(&self, run: usize) -> wgpu::ComputePassTimestampWrites<'_> {
        wgpu::ComputePassTimestampWrites {
            query_set: &self.ends,
            beginning_of_pass_write_index: Some(2 * run as u32),
            end_of_pass_write_index: Some(2 * run as u32 + 1),
        }
    }

    /// Where its dispatches leave theirs.
    pub fn stages(&self, run: usize) -> &wgpu::QuerySet {
        &self.stages[run]
    }

    /// The median of the whole in microseconds, and of each of the dispatches `labels`.
    pub fn medians(&self, gpu: &Gpu, labels: &[String]) -> anyhow::Result<(f64, Vec<f64>)> {
        let ends = microseconds(gpu, &self.ends, 2 * self.runs)?;
        let mut parts = Vec::new();
        if !labels.is_empty() {
            let stages = self.stages.iter().map(|set| microseconds(gpu, set, labels.len()));
            let stages = stages.collect::<anyhow::Result<Vec<_>>>()?;
            for i in 0..labels.len() {
                let before = |run: usize| if i == 0 { ends[2 * run] } else { stages[run][i - 1] };
                parts.push(median((0..self.runs).map(|run| stages[run][i] - before(run)).collect()));
            }
        }
        Ok((median(ends.chunks(2).map(|run| run[1] - run[0]).collect()), parts))
    }
}

pub fn microseconds(gpu: &Gpu, set: &wgpu::QuerySet, n: usize) -> anyhow::Result<Vec<f64>> {
    let resolved = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: n as u64 * 8,
        usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });
    let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.resolve_query_set(set, 0..n as u32, &resolved, 0);
    gpu.queue().submit([encoder.finish()]);
    let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&gpu.read(&resolved, 0, n as u64 * 8)?);
    let period = f64::from(gpu.queue().get_timestamp_period()) / 1000.0;
    Ok(ticks.into_iter().map(|t| t as f64 * period).collect())
}

/// The middle one; 0 of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
