//! Commands of one step, cut into submissions: before a desktop driver's watchdog minds, and where ranks exchange.

use crate::error::Result;
use crate::exchange::{Partial, Ranks};
use crate::gpu::Gpu;
use crate::kernels::{Recording, View};

/// Commands under construction. With several ranks, submissions wait for the exchanges that they depend on, but recording
/// does not: while a partial sum is on its way, the layer behind it is recorded.
pub struct Commands<'a> {
    gpu: Gpu,
    encoder: wgpu::CommandEncoder,
    macs: u64,
    ranks: Option<&'a mut Ranks>,
    pending: Option<Partial>,
}

impl<'a> Commands<'a> {
    /// An empty list; `ranks` where partial sums have to be exchanged.
    pub fn new(gpu: &Gpu, ranks: Option<&'a mut Ranks>) -> Self {
        Self { gpu: gpu.clone(), encoder: Self::encoder_on(gpu), macs: 0, ranks, pending: None }
    }

    fn encoder_on(gpu: &Gpu) -> wgpu::CommandEncoder {
        gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("step") })
    }

    /// The encoder, for copies between passes.
    pub fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        &mut self.encoder
    }

    /// True on the rank whose partial sums include the residual: it must be added once.
    pub fn adds_residual(&mut self) -> bool {
        self.ranks.as_mut().is_none_or(|ranks| ranks.line().rank() == 0)
    }

    /// Records `work` into a pass of its own; `macs` is its size. Submits what went before when it grew too long.
    ///
    /// # Errors
    /// Those of `work` and of a pending exchange.
    pub fn pass<T>(
        &mut self,
        rec: &mut Recording,
        label: &str,
        macs: u64,
        work: impl FnOnce(&mut Recording, &mut wgpu::ComputePass<'_>) -> Result<T>,
    ) -> Result<T> {
        if self.macs > 0 && self.macs + macs > self.gpu.capabilities().macs_per_submission {
            self.submit_recorded(rec)?;
        }
        self.macs += macs;
        let mut pass = self
            .encoder
            .begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some(label), timestamp_writes: None });
        work(rec, &mut pass)
    }

    /// Replaces the first `n_bytes` of `view`, f32, by their sum over all ranks. Nothing to do for one rank.
    ///
    /// # Errors
    /// Those of an earlier exchange.
    pub fn sum(&mut self, rec: &mut Recording, view: &View, n_bytes: u64) -> Result<()> {
        let Some(ranks) = &mut self.ranks else { return Ok(()) };
        let partial = ranks.copy(&self.gpu, &mut self.encoder, view, n_bytes);
        self.submit_recorded(rec)?;
        partial.request();
        self.pending = Some(partial);
        Ok(())
    }

    /// Submits the rest.
    ///
    /// # Errors
    /// Those of a pending exchange.
    pub fn submit(mut self, rec: &mut Recording) -> Result<wgpu::SubmissionIndex> {
        self.submit_recorded(rec)
    }

    fn submit_recorded(&mut self, rec: &mut Recording) -> Result<wgpu::SubmissionIndex> {
        if let (Some(partial), Some(ranks)) = (self.pending.take(), &mut self.ranks) {
            ranks.complete(&self.gpu, partial)?;
        }
        rec.flush();
        let full = std::mem::replace(&mut self.encoder, Self::encoder_on(&self.gpu));
        self.macs = 0;
        Ok(self.gpu.queue().submit([full.finish()]))
    }
}
