//! A product of whole tokens, with what their adapters add.

use crate::error::Result;
use crate::kernels::dense_gemm::{Cut, DenseGemm};
use crate::kernels::expert_gemm::{ExpertGemm, dense_form, dense_on_matrices};
use crate::kernels::expert_gemm_matrix::{ExpertGemmMatrix, Leaves};
use crate::kernels::lora::{Factors, LoraSite};
use crate::kernels::lora_matrix::{Folded, LoraShrinkMatrix};
use crate::kernels::operands::{Rows, Weights};
use crate::kernels::pack::{Form, Packed, Reads, pack};
use crate::kernels::pair_shrink::{PairShrink, Shrunk};
use crate::kernels::{Recording, View};
use crate::layer::LoraBatch;
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{self, DEPTH_PARTS, EDGE, MatrixTile};
use crate::plan::rows;

/// Semantics: `y[t] (+)= W · x[t]`, and what the adapter of token t changes at the site.
pub struct Dense<'a> {
    /// T.
    pub tokens: usize,
    /// f32 `[T, in]`; not read where somebody has packed it and no adapter reads it.
    pub x: &'a View,
    /// The same, as somebody has packed it for this product; `None` where it has to pack x itself.
    pub packed: Option<&'a Packed>,
    /// One matrix `[out, in]`.
    pub weights: &'a Weights,
    /// The adapters of the batch, the site and its factors; `None` where no token has one.
    pub adapters: Option<Adapters<'a>>,
    /// f32 `[T, out]`, written or added to; `[parts, T, out]`, written, in several parts.
    pub y: &'a View,
    /// Parts of the depth, whose sum the product is: those that [`Dense::parts`] tells, or 1.
    pub parts: usize,
    /// Add to y.
    pub accumulate: bool,
    /// As exact as f32 arithmetic on every tier, and one product for all numbers of rows: for the router.
    pub exact: bool,
    /// u32 `[1]`: bit 1 is set for a slot past L, where the adapters of few rows look it up.
    pub status: &'a View,
}

/// The adapters of the batch, a site and its factors.
pub(crate) type Adapters<'a> = (&'a LoraBatch, &'a LoraSite, &'a Factors);

/// Those that change what the site computes.
fn changing(adapters: Option<Adapters<'_>>) -> Option<Adapters<'_>> {
    adapters.filter(|(batch, site, factors)| batch.adapts(site, factors))
}

/// How a product is recorded.
enum Way {
    /// Few rows, a row of the weights a subgroup.
    Few(Cut),
    /// On cooperative matrices, adapters included.
    Folded(MatrixTile),
    /// On cooperative matrices, and the adapters behind it.
    Matrix(MatrixTile),
    /// In f32, and the adapters behind it.
    Plain,
}

impl Way {
    /// That of `tokens` rows, with the adapters that change the site.
    fn of(caps: &Capabilities, tokens: usize, weights: &Weights, adapters: Option<Adapters<'_>>, exact: bool) -> Self {
        if let Some(cut) = Cut::of(caps, tokens, weights.out_dim, weights.in_dim).filter(|_| !exact) {
            return Self::Few(cut);
        }
        let Some(tile) = dense_on_matrices(caps, tokens, weights, exact) else { return Self::Plain };
        let folds = |(batch, ..): Adapters<'_>| {
            batch.folded(weights, tile.height as usize, tokens)
                && batch.has_room(caps, Some(tile).filter(|cut| cut.direct), tokens)
                && (rows::tokens_apart(caps, tokens) || batch.matrix_runs.is_some())
        };
        if adapters.is_some_and(folds) && !exact { Self::Folded(tile) } else { Self::Matrix(tile) }
    }

    /// In which form it reads rows that are packed.
    fn form(&self, exact: bool) -> Option<Form> {
        match *self {
            // The shrink reads rows.
            Self::Folded(tile) => Some(Form { cut: Some(tile).filter(|cut| cut.direct), ..Form::ROWS }),
            Self::Matrix(tile) => Some(dense_form(tile, exact)),
            Self::Few(_) | Self::Plain => None,
        }
    }
}

/// Names of the scratch of rows that are packed.
const LABELS: [&str; 2] = ["packed", "packed blocks"];

impl Dense<'_> {
    /// Parts of its depth in which such a product is best recorded, for a reader of y that adds them up.
    pub fn parts(caps: &Capabilities, tokens: usize, weights: &Weights, exact: bool) -> usize {
        let Weights { out_dim, in_dim, .. } = *weights;
        let few = !exact && Cut::of(caps, tokens, out_dim, in_dim).is_some();
        let possible = !few && dense_on_matrices(caps, tokens, weights, exact).is_some();
        match possible {
            true if exact => matrix::exact_parts(caps, tokens, out_dim),
            true if matrix::parts(caps, tokens, out_dim, in_dim) => DEPTH_PARTS,
            _ => 1,
        }
    }

    /// In which forms such a product reads x.
    pub(crate) fn reads(
        caps: &Capabilities,
        tokens: usize,
        weights: &Weights,
        adapters: Option<Adapters<'_>>,
        exact: bool,
    ) -> Reads {
        let adapters = changing(adapters);
        let way = Way::of(caps, tokens, weights, adapters, exact);
        let plain = match way {
            Way::Few(_) | Way::Plain => true,
            Way::Matrix(_) => adapters.is_some(),
            Way::Folded(_) => false,
        };
        Reads { plain, packed: way.form(exact) }
    }

    /// Records the product and the adapters: a shrink and a product that adds the rest where rows are few and a subgroup reads a
    /// row of the weights together, or on cooperative matrices; else the product alone and both halves of the adapters.
    ///
    /// # Errors
    /// When the device refuses a shader or has no room for scratch.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let Self { tokens, x, weights, y, accumulate, exact, .. } = *self;
        let Weights { out_dim, in_dim, .. } = *weights;
        let adapters = changing(self.adapters);
        let way = Way::of(rec.gpu().capabilities(), tokens, weights, adapters, exact);
        let packed = match way.form(exact) {
            None => None,
            Some(form) => Some(match self.packed.filter(|packed| packed.serve(&form)) {
                Some(packed) => packed.clone(),
                None => pack(rec, pass, LABELS, x, [tokens, in_dim], &form)?,
            }),
        };
        match (&way, &packed, adapters) {
            (Way::Few(cut), ..) => {
                let shrunk = match adapters {
                    None => None,
                    Some(adapters) => Some((self.shrink(adapters, x).record(rec, pass)?, adapters.1)),
                };
                let adapters = shrunk.as_ref().map(|(shrunk, site)| (shrunk, *site));
                return DenseGemm { rows: tokens, cut: *cut, x, weights, adapters, y, accumulate }.record(rec, pass);
            }
            (Way::Folded(_), Some(packed), Some(adapters)) => {
                return self.record_folded(rec, pass, packed, adapters);
            }
            _ => {}
        }
        let (rows, row_div, select, y_stride) = (tokens, 1, Rows::Dense, out_dim);
        let gemm = ExpertGemm { rows, row_div, select, x, weights, y, y_stride, accumulate, exact };
        match &packed {
            Some(packed) => gemm.record_packed(rec, pass, packed, self.parts)?,
            None => gemm.record(rec, pass)?,
        }
        let Some((batch, site, factors)) = adapters else { return Ok(()) };
        batch.record_dense(rec, pass, site, factors, tokens, x, y)
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
        let Some(adapters) = changing(self.adapters) else { return Ok(None) };
        let cut = Cut::of(rec.gpu().capabilities(), tokens, weights.out_dim, weights.in_dim).filter(|_| !exact);
        let Some(cut) = cut else { return Ok(None) };
        let shrink = self.shrink(adapters, x);
        let Some(u) = u(rec, shrink.max_rank)? else { return Ok(None) };
        DenseGemm { rows: tokens, cut, x, weights, adapters: None, y, accumulate }
            .record_shrink(rec, pass, &shrink, u)
            .map(Some)
    }

    /// The first half of the adapters of tokens one by one.
    fn shrink<'b>(&'b self, adapters: Adapters<'b>, x: &'b View) -> PairShrink<'b> {
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

    /// A product on cooperative matrices that adds the adapters, for rows that are packed.
    fn record_folded(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        x: &Packed,
        adapters: Adapters<'_>,
    ) -> Result<()> {
        let (batch, site, factors) = adapters;
        let (rows, row_div, max_rank) = (self.tokens, 1, batch.max_rank.next_multiple_of(EDGE as usize));
        let u = match &batch.matrix_runs {
            None => self.shrink(adapters, &x.view).record_packed(rec, pass, x.stride())?,
            Some(runs) => {
                let (w_scale, folded) = (1.0, true);
                LoraShrinkMatrix { rows, row_div, runs, max_rank, w_scale, site, factors, x, blocks: None, folded }
                    .record(rec, pass)?
            }
        };
        let (token_lora_mapping, top_k, slots, experts) = (&batch.token_lora_mapping, 1, batch.slots, 1);
        let used = batch.adapters();
        let folded = Folded { u, max_rank, token_lora_mapping, top_k, slots, used, experts, site, factors };
        let (select, weights, y, y_stride) = (Rows::Dense, self.weights, self.y, self.weights.out_dim);
        let (accumulate, parts, adapters) = (self.accumulate, self.parts, Some(&folded));
        let leaves = Leaves::Sums;
        ExpertGemmMatrix { rows, row_div, select, x, weights, y, y_stride, accumulate, parts, adapters, leaves }
            .record(rec, pass)
    }
}
