//! A product of whole tokens, with what their adapters add.

use crate::error::Result;
use crate::kernels::dense_gemm::{Cut, DenseGemm};
use crate::kernels::expert_gemm::{ExpertGemm, Rows, Weights};
use crate::kernels::lora::{Factors, LoraSite};
use crate::kernels::pair_shrink::PairShrink;
use crate::kernels::{Recording, View};
use crate::layer::LoraBatch;

/// Semantics: `y[t] (+)= W · x[t]`, and what the adapter of token t changes at the site.
pub struct Dense<'a> {
    /// T.
    pub tokens: usize,
    /// f32 `[T, in]`.
    pub x: &'a View,
    /// One matrix `[out, in]`.
    pub weights: &'a Weights,
    /// The adapters of the batch, the site and its factors; `None` where no token has one.
    pub adapters: Option<(&'a LoraBatch, &'a LoraSite, &'a Factors)>,
    /// f32 `[T, out]`, written or added to.
    pub y: &'a View,
    /// Add to y.
    pub accumulate: bool,
    /// As exact as f32 arithmetic on every tier, and one product for all numbers of rows: for the router.
    pub exact: bool,
    /// u32 `[1]`: bit 1 is set for a slot past L, where the adapters of few rows look it up.
    pub status: &'a View,
}

impl Dense<'_> {
    /// Records the product and the adapters: two stages at most where rows are few and a subgroup reads a row of the weights
    /// together, else the product alone and both halves of the adapters.
    ///
    /// # Errors
    /// When the device refuses a shader or has no room for scratch.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let Self { tokens, x, weights, y, accumulate, exact, .. } = *self;
        let Weights { out_dim, in_dim, .. } = *weights;
        let adapters = self.adapters.filter(|(batch, site, factors)| batch.max_rank > 0 && factors.any(site));
        let cut = Cut::of(rec.gpu().capabilities(), tokens, out_dim, in_dim).filter(|_| !exact);
        let Some(cut) = cut else {
            let (rows, row_div, select, y_stride) = (tokens, 1, Rows::Dense, out_dim);
            ExpertGemm { rows, row_div, select, x, weights, y, y_stride, accumulate, exact }.record(rec, pass)?;
            let Some((batch, site, factors)) = adapters else { return Ok(()) };
            return batch.record_dense(rec, pass, site, factors, tokens, x, y);
        };
        let shrunk = match adapters {
            None => None,
            Some((batch, site, factors)) => {
                let shrink = PairShrink {
                    rows: tokens,
                    row_div: 1,
                    top_k: 1,
                    experts: 1,
                    slots: batch.slots,
                    max_rank: batch.max_rank,
                    site,
                    factors,
                    x,
                    ids: None,
                    token_lora_mapping: &batch.token_lora_mapping,
                    status: self.status,
                };
                Some((shrink.record(rec, pass)?, site))
            }
        };
        let adapters = shrunk.as_ref().map(|(shrunk, site)| (shrunk, *site));
        DenseGemm { rows: tokens, cut, x, weights, adapters, y, accumulate }.record(rec, pass)
    }
}
