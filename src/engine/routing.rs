//! The router's choices, counted on the device and added up here.

use crate::checkpoint::{MlpKind, ModelConfig};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernels::View;
use crate::placement::RoutingCounts;

/// Counts of one rank's rows. The device's are of 32 bits and read so rarely that a step does not notice.
pub(crate) struct RoutingCounter {
    /// u32 `[layers, E]`: what was chosen since the last reading.
    pub counts: View,
    /// Rows since then: no count is larger.
    rows: u64,
    total: RoutingCounts,
}

impl RoutingCounter {
    pub fn new(gpu: &Gpu, config: &ModelConfig) -> Result<Self> {
        let (experts, top_k) = (config.moe.experts, config.moe.top_k);
        let n_bytes = (config.layers.len() * experts * 4) as u64;
        let counts = View::whole(&gpu.buffer("routing counts", n_bytes, wgpu::BufferUsages::empty())?);
        gpu.queue().write_buffer(&counts.buffer, 0, &vec![0; n_bytes as usize]);
        let of_layer = |kind: &MlpKind| if *kind == MlpKind::Experts { vec![0; experts] } else { Vec::new() };
        let layers = config.layers.iter().map(of_layer).collect();
        let model_type = config.family.model_type().to_owned();
        Ok(Self { counts, rows: 0, total: RoutingCounts { model_type, experts, top_k, tokens: 0, layers } })
    }

    /// Announces a step of `rows` rows. Reads, and so waits for the device, once in 2^32 rows.
    pub fn begin(&mut self, gpu: &Gpu, rows: usize) -> Result<()> {
        let rows = rows as u64;
        if self.rows + rows > u64::from(u32::MAX) {
            self.read(gpu)?;
        }
        self.rows += rows;
        self.total.tokens += rows;
        Ok(())
    }

    /// All that was chosen so far. Waits for what was submitted.
    pub fn read(&mut self, gpu: &Gpu) -> Result<RoutingCounts> {
        let n_bytes = (self.total.layers.len() * self.total.experts * 4) as u64;
        let counts: Vec<u32> = bytemuck::pod_collect_to_vec(&gpu.read(&self.counts.buffer, 0, n_bytes)?);
        gpu.queue().write_buffer(&self.counts.buffer, 0, &vec![0; n_bytes as usize]);
        self.rows = 0;
        for (layer, counts) in self.total.layers.iter_mut().zip(counts.chunks(self.total.experts.max(1))) {
            layer.iter_mut().zip(counts).for_each(|(total, n)| *total += u64::from(*n));
        }
        Ok(self.total.clone())
    }
}
