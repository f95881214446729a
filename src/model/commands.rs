//! Commands of one step, cut into submissions: before a desktop driver's watchdog minds, and where ranks exchange.

use crate::error::{Error, ErrorKind, Result};
use crate::exchange::{Download, Ranks, Received};
use crate::gpu::Gpu;
use crate::kernels::{Recording, View};
use crate::layer::Routed;

/// Commands under construction. With several ranks, submissions wait for the exchanges that they depend on, but recording
/// does not: while a partial sum is on its way, the layer behind it is recorded.
pub struct Commands<'a> {
    gpu: Gpu,
    encoder: wgpu::CommandEncoder,
    macs: u64,
    ranks: Option<&'a mut Ranks>,
    pending: Option<Pending>,
}

/// What the device has under way and ranks then exchange.
enum Pending {
    /// A partial sum, to be replaced by the sum.
    Sum(Download, View),
    /// What was computed of the tokens of other ranks; and where to write what they computed of this rank's T.
    Outputs { computed: Option<Download>, received: Received, to: Option<(View, usize)> },
}

/// Rows of other ranks on the device.
pub(crate) struct Arrived {
    /// f32 `[R, D]`.
    pub x: View,
    pub routed: Routed,
    /// i32 `[R]`.
    pub token_lora_mapping: View,
}

impl<'a> Commands<'a> {
    /// An empty list; `ranks` where something has to be exchanged.
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
        let partial = ranks.copy(&self.gpu, &mut self.encoder, &[(view, n_bytes)])?;
        self.submit_recorded(rec)?;
        partial.request();
        self.pending = Some(Pending::Sum(partial, view.clone()));
        Ok(())
    }

    /// Sends this rank's tokens to the ranks of their experts: x (f32 `[T, D]`) and what the router chose; `adapters` are their
    /// T global ids, 0 for none. Waits for the device, and for what the other ranks send; a rank without tokens takes
    /// part with `None`.
    ///
    /// # Errors
    /// Those of this exchange or an earlier one.
    pub(crate) fn send(
        &mut self,
        rec: &mut Recording,
        tokens: Option<(&View, &Routed)>,
        adapters: &[u64],
        [hidden, top_k]: [usize; 2],
    ) -> Result<Received> {
        let mut routed = None;
        if let (Some((x, chosen)), Some(ranks)) = (tokens, &mut self.ranks) {
            let [x_bytes, pair_bytes] = [hidden, top_k].map(|n| (adapters.len() * n * 4) as u64);
            let parts = [(x, x_bytes), (&chosen.topk_ids, pair_bytes), (&chosen.topk_weights, pair_bytes)];
            routed = Some(ranks.copy(&self.gpu, &mut self.encoder, &parts)?);
        }
        self.submit_recorded(rec)?;
        if let Some(routed) = &routed {
            routed.request();
        }
        let alone = || Error::new(ErrorKind::Rank, "tokens cannot be sent: this rank is alone");
        self.ranks.as_deref_mut().ok_or_else(alone)?.send(&self.gpu, routed, adapters)
    }

    /// Records the write of `received` to the device, with local ids (i32 `[R, A]`) and slots (i32 `[R]`).
    ///
    /// # Errors
    /// When the device has no room for it.
    pub(crate) fn arrive(
        &mut self,
        rec: &mut Recording,
        received: &Received,
        local_ids: &[i32],
        slots: &[i32],
    ) -> Result<Arrived> {
        let size = |slices: &[&[u8]]| slices.iter().map(|s| s.len() as u64).sum::<u64>();
        let (x, weights) = (received.x(), received.topk_weights());
        let ids: [&[u8]; 1] = [bytemuck::cast_slice(local_ids)];
        let mapping: [&[u8]; 1] = [bytemuck::cast_slice(slots)];
        let arrived = Arrived {
            x: rec.scratch("dispatched x", size(&x))?,
            routed: Routed {
                topk_ids: rec.scratch("dispatched ids", size(&ids))?,
                local: true,
                topk_weights: rec.scratch("dispatched weights", size(&weights))?,
            },
            token_lora_mapping: rec.scratch("dispatched slots", size(&mapping))?,
        };
        let parts: [(&View, &[&[u8]]); 4] = [
            (&arrived.x, &x),
            (&arrived.routed.topk_ids, &ids),
            (&arrived.routed.topk_weights, &weights),
            (&arrived.token_lora_mapping, &mapping),
        ];
        if let Some(ranks) = &mut self.ranks {
            ranks.write(&self.gpu, &mut self.encoder, &parts)?;
        }
        Ok(arrived)
    }

    /// Gives back what was computed of `received` (f32 `[R, D]`, `None` where nothing came), and puts the sum of what all ranks computed of
    /// this rank's T tokens into `to` (`None` where it has none): f32 `[T, D]`, before what is recorded from now on.
    ///
    /// # Errors
    /// Those of an earlier exchange.
    pub(crate) fn give_back(
        &mut self,
        rec: &mut Recording,
        received: Received,
        computed: Option<(&View, u64)>,
        to: Option<(View, usize)>,
    ) -> Result<()> {
        let copied = match (computed, &mut self.ranks) {
            (Some(part), Some(ranks)) => Some(ranks.copy(&self.gpu, &mut self.encoder, &[part])?),
            _ => None,
        };
        self.submit_recorded(rec)?;
        if let Some(copied) = &copied {
            copied.request();
        }
        self.pending = Some(Pending::Outputs { computed: copied, received, to });
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
        let mut before = None;
        if let (Some(pending), Some(ranks)) = (self.pending.take(), &mut self.ranks) {
            let mut writes = Self::encoder_on(&self.gpu);
            match pending {
                Pending::Sum(partial, to) => ranks.sum(&self.gpu, &mut writes, partial, &to)?,
                Pending::Outputs { computed, received, to } => {
                    let to = to.as_ref().map(|(view, tokens)| (view, *tokens));
                    ranks.give_back(&self.gpu, &mut writes, computed, &received, to)?;
                }
            }
            before = Some(writes.finish());
        }
        rec.flush();
        let full = std::mem::replace(&mut self.encoder, Self::encoder_on(&self.gpu));
        self.macs = 0;
        let submission = self.gpu.queue().submit(before.into_iter().chain([full.finish()]));
        if let Some(ranks) = &mut self.ranks {
            ranks.submitted();
        }
        Ok(submission)
    }
}
