//! A product of whole tokens, with what their adapters add.

use crate::error::Result;
use crate::kernels::dense_gemm::{Cut, DenseGemm};
use crate::kernels::expert_gemm::{ExpertGemm, Rows, Weights, dense_on_matrices};
use crate::kernels::expert_gemm_matrix::{ExpertGemmMatrix, Folded};
use crate::kernels::lora::{Factors, LoraSite};
use crate::kernels::lora_matrix::LoraShrinkMatrix;
use crate::kernels::pack::{Pack, Packed};
use crate::kernels::pair_shrink::{PairShrink, Shrunk};
use crate::kernels::{Recording, View};
use crate::layer::LoraBatch;
use crate::plan::matrix::{self, EDGE};
use crate::plan::rows;

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
    /// Records the product and the adapters: a shrink and a product that adds the rest where rows are few and a subgroup reads a
    /// row of the weights together, or on cooperative matrices; else the product alone and both halves of the adapters.
    ///
    /// # Errors
    /// When the device refuses a shader or has no room for scratch.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let Self { tokens, x, weights, y, accumulate, exact, .. } = *self;
        let Weights { out_dim, in_dim, .. } = *weights;
        let adapters = self.adapters.filter(|(batch, site, factors)| batch.adapts(site, factors));
        let caps = rec.gpu().capabilities().clone();
        let cut = Cut::of(&caps, tokens, out_dim, in_dim).filter(|_| !exact);
        if let (None, Some(tile), Some(adapters)) = (cut, dense_on_matrices(&caps, tokens, weights, false), adapters)
            && !exact
            && adapters.0.folded(weights, tile.height as usize, tokens)
            && adapters.0.has_room(&caps, Some(tile).filter(|cut| cut.direct), tokens)
            && (rows::tokens_apart(&caps, tokens) || adapters.0.matrix_runs.is_some())
        {
            return self.record_folded(rec, pass, adapters);
        }
        let Some(cut) = cut else {
            let (rows, row_div, select, y_stride) = (tokens, 1, Rows::Dense, out_dim);
            ExpertGemm { rows, row_div, select, x, weights, y, y_stride, accumulate, exact }.record(rec, pass)?;
            let Some((batch, site, factors)) = adapters else { return Ok(()) };
            return batch.record_dense(rec, pass, site, factors, tokens, x, y);
        };
        let shrunk = match adapters {
            None => None,
            Some(adapters) => Some((self.shrink(adapters, x).record(rec, pass)?, adapters.1)),
        };
        let adapters = shrunk.as_ref().map(|(shrunk, site)| (shrunk, *site));
        DenseGemm { rows: tokens, cut, x, weights, adapters, y, accumulate }.record(rec, pass)
    }

    /// Records the product with the first half of the adapters beside it, for a reader of y that adds the other half. `u` gives the
    /// buffer, u32 `[T, projections, 4 + max_rank]` for a rank that it is told, or none where the reader cannot add such a rank.
    /// `None`, and nothing is recorded, then, where rows are many, and where no adapter changes the site.
    ///
    /// # Errors
    /// When the device refuses a shader or has no room for scratch.
    pub fn record_shrink(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        u: impl FnOnce(&mut Recording, usize) -> Result<Option<View>>,
    ) -> Result<Option<Shrunk>> {
        let Self { tokens, x, weights, y, accumulate, exact, .. } = *self;
        let Some(adapters) = self.adapters.filter(|(batch, site, factors)| batch.adapts(site, factors)) else {
            return Ok(None);
        };
        let cut = Cut::of(rec.gpu().capabilities(), tokens, weights.out_dim, weights.in_dim).filter(|_| !exact);
        let Some(cut) = cut else { return Ok(None) };
        let shrink = self.shrink(adapters, x);
        let Some(u) = u(rec, shrink.max_rank)? else { return Ok(None) };
        DenseGemm { rows: tokens, cut, x, weights, adapters: None, y, accumulate }
            .record_shrink(rec, pass, &shrink, u)
            .map(Some)
    }

    /// The first half of the adapters of tokens one by one.
    fn shrink<'b>(&'b self, adapters: (&'b LoraBatch, &'b LoraSite, &'b Factors), x: &'b View) -> PairShrink<'b> {
        let (batch, site, factors) = adapters;
        PairShrink {
            rows: self.tokens,
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
        }
    }

    /// A product on cooperative matrices that adds the adapters.
    fn record_folded(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        adapters: (&LoraBatch, &LoraSite, &Factors),
    ) -> Result<()> {
        let (batch, site, factors) = adapters;
        let Weights { out_dim, in_dim, .. } = *self.weights;
        let direct = matrix::dense(rec.gpu().capabilities(), self.tokens, out_dim, false).filter(|cut| cut.direct);
        let labels = ["packed", "packed blocks"];
        let packed = Packed::scratch_for(rec, labels, self.tokens, in_dim, direct.as_ref(), true)?;
        Pack { x: self.x, packed: &packed }.record(rec, pass)?;
        let (rows, row_div, max_rank) = (self.tokens, 1, batch.max_rank.next_multiple_of(EDGE as usize));
        let u = match &batch.matrix_runs {
            None => self.shrink(adapters, &packed.view).record_packed(rec, pass)?,
            Some(runs) => {
                let (w_scale, x, folded) = (1.0, &packed, true);
                LoraShrinkMatrix { rows, row_div, runs, max_rank, w_scale, site, factors, x, folded }
                    .record(rec, pass)?
            }
        };
        let (token_lora_mapping, top_k, slots, experts) = (&batch.token_lora_mapping, 1, batch.slots, 1);
        let used = batch.adapters();
        let folded = Folded { u, max_rank, token_lora_mapping, top_k, slots, used, experts, site, factors };
        let (select, x, weights, y, y_stride) = (Rows::Dense, &packed, self.weights, self.y, out_dim);
        let (accumulate, adapters) = (self.accumulate, Some(&folded));
        ExpertGemmMatrix { rows, row_div, select, x, weights, y, y_stride, accumulate, adapters }.record(rec, pass)
    }
}
