//! What passes between the devices of ranks: a copy to the host, an exchange, a copy back.

use super::dispatch::{Dispatch, Received, Tokens};
use super::staging::{Download, Downloads, Uploads};
use super::{Exchange, sum};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::kernels::View;

/// A line with the host memory that sums and tokens pass through.
pub struct Ranks {
    line: Box<dyn Exchange>,
    /// `None`: ranks exchange sums.
    dispatch: Option<Dispatch>,
    down: Downloads,
    up: Uploads,
    values: Vec<f32>,
}

impl Ranks {
    /// Exchanges sums over `line`.
    pub fn new(line: Box<dyn Exchange>) -> Self {
        let (down, up) = (Downloads::default(), Uploads::default());
        Self { line, dispatch: None, down, up, values: Vec::new() }
    }

    /// Exchanges tokens from now on.
    pub(crate) fn dispatch_with(&mut self, dispatch: Dispatch) {
        self.dispatch = Some(dispatch);
    }

    /// The line, for what is exchanged between host and host.
    pub fn line(&mut self) -> &mut dyn Exchange {
        &mut *self.line
    }

    /// Ends this rank well.
    pub fn end(self) {
        self.line.end();
    }

    /// Records the copy of the first bytes of each of `parts` to the host.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`].
    pub(crate) fn copy(
        &mut self,
        gpu: &Gpu,
        encoder: &mut wgpu::CommandEncoder,
        parts: &[(&View, u64)],
    ) -> Result<Download> {
        self.down.copy(gpu, encoder, parts)
    }

    /// Records writes to the device: the slices of each part go one behind the other to the beginning of its view.
    ///
    /// # Errors
    /// [`ErrorKind::Device`], [`ErrorKind::OutOfMemory`].
    pub(crate) fn write(
        &mut self,
        gpu: &Gpu,
        encoder: &mut wgpu::CommandEncoder,
        parts: &[(&View, &[&[u8]])],
    ) -> Result<()> {
        self.up.write(gpu, encoder, parts)
    }

    /// What was recorded has been submitted.
    pub(crate) fn submitted(&mut self) {
        self.up.submitted();
    }

    /// Waits for a partial sum, adds those of all ranks, and records the write of the sum to `to`.
    ///
    /// # Errors
    /// Those of the exchange; [`ErrorKind::Device`] when the device was lost.
    pub(crate) fn sum(
        &mut self,
        gpu: &Gpu,
        encoder: &mut wgpu::CommandEncoder,
        partial: Download,
        to: &View,
    ) -> Result<()> {
        let values = &mut self.values;
        self.down.read(gpu, partial, |bytes| {
            values.clear();
            values.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
            Ok(())
        })?;
        sum(&mut *self.line, &mut self.values)?;
        self.up.write(gpu, encoder, &[(to, &[bytemuck::cast_slice(&self.values)])])
    }

    /// Waits for the x, ids and weights of this rank's tokens (`None`: it has none), and sends each token to the ranks of its experts.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub(crate) fn send(&mut self, gpu: &Gpu, routed: Option<Download>, adapters: &[u64]) -> Result<Received> {
        let Self { line, dispatch, down, .. } = self;
        let dispatch = dispatch.as_mut().ok_or_else(no_dispatch)?;
        let Some(routed) = routed else {
            return dispatch.send(&mut **line, &Tokens { x: &[], topk_ids: &[], topk_weights: &[], adapters: &[] });
        };
        let [d, a] = dispatch.sizes().map(|n| n * 4 * adapters.len());
        down.read(gpu, routed, |bytes| {
            let ids: Vec<i32> = bytemuck::pod_collect_to_vec(&bytes[d..d + a]);
            let (x, topk_weights) = (&bytes[..d], &bytes[d + a..]);
            dispatch.send(&mut **line, &Tokens { x, topk_ids: &ids, topk_weights, adapters })
        })
    }

    /// Waits for what this rank computed of `received` (`None`: nothing came), gives it back, and records the write of what all ranks
    /// computed of this rank's tokens, added up, to `to` (`None`: it has none): f32 `[tokens, D]`.
    ///
    /// # Errors
    /// As [`Ranks::sum`].
    pub(crate) fn give_back(
        &mut self,
        gpu: &Gpu,
        encoder: &mut wgpu::CommandEncoder,
        computed: Option<Download>,
        received: &Received,
        to: Option<(&View, usize)>,
    ) -> Result<()> {
        let Self { line, dispatch, down, up, values } = self;
        let dispatch = dispatch.as_ref().ok_or_else(no_dispatch)?;
        let tokens = to.map_or(0, |(_, tokens)| tokens);
        let mut exchange = |y: &[u8]| dispatch.give_back(&mut **line, received, y, tokens, values);
        match computed {
            Some(computed) => down.read(gpu, computed, exchange)?,
            None => exchange(&[])?,
        }
        match to {
            Some((to, _)) => up.write(gpu, encoder, &[(to, &[bytemuck::cast_slice(values)])]),
            None => Ok(()),
        }
    }
}

fn no_dispatch() -> Error {
    Error::new(ErrorKind::Rank, "tokens cannot be sent: ranks exchange sums")
}
