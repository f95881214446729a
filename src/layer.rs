//! One mixture-of-experts layer: the stages in order and nothing else.

use crate::activation::Activation;
use crate::adapter::sites::LayerSites;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::activation::{Activate, Hidden};
use crate::kernels::align::{Align, Aligned};
use crate::kernels::combine::Combine;
use crate::kernels::expert_gemm::{ExpertGemm, Rows, Weights};
use crate::kernels::expert_gemm_matrix::ExpertGemmMatrix;
use crate::kernels::localise::Localise;
use crate::kernels::lora::{self, Factors, Lora, LoraSite};
use crate::kernels::lora_gather::LoraGather;
use crate::kernels::pack::Packed;
use crate::kernels::remap::Remap;
use crate::kernels::route::Route;
use crate::kernels::{Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{self, MatrixTile};
use crate::plan::rows;
use crate::router::{NoAdapter, RouteOptions};
use crate::shape::MoeShape;

/// The resident weights and rules of one mixture-of-experts layer.
#[derive(Debug, Clone)]
pub struct MoeLayer {
    /// Sizes of the whole layer, all ranks together.
    pub shape: MoeShape,
    /// E_l: experts this rank holds.
    pub experts: usize,
    /// F_l: columns of each that this rank holds, padded with zero weights to a multiple of 8; F where it holds all.
    pub width: usize,
    /// [`Owner`](crate::placement::Owner) `[E]`; `None` when this rank alone holds all experts in order.
    pub owners: Option<View>,
    /// Router, one matrix `[E, D]`.
    pub router: Weights,
    /// Selection rule.
    pub options: RouteOptions,
    /// gate rows, then up rows of each expert (interleaved for the clamped swiglu): `[E_l, 2F_l, D]`.
    pub gate_up: Weights,
    /// `[E_l, D, F_l]`.
    pub down: Weights,
    /// Between the two.
    pub activation: Activation,
}

/// The adapters of a batch, the same for every layer.
#[derive(Debug, Clone)]
pub struct LoraBatch {
    /// i32 `[T]`: slot of each token, negative for none.
    pub token_lora_mapping: View,
    /// L.
    pub slots: usize,
    /// Adapters that occur in the batch, at least 1.
    pub adapters: usize,
    /// Largest rank among them, a bias counted.
    pub max_rank: usize,
    /// Tokens sorted by slot, where there are enough of them.
    pub aligned: Option<Aligned>,
}

impl LoraBatch {
    /// Prepares the adapters of `tokens` tokens; `sites` are those that work on whole tokens (attention, router, dense).
    ///
    /// # Errors
    /// Those of the align stage.
    pub fn prepare<'a>(
        mut self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        tokens: usize,
        sites: impl Iterator<Item = &'a LoraSite>,
    ) -> Result<Self> {
        let caps = rec.gpu().capabilities().clone();
        let Some(tile) = rows::adapter_tile(&caps, tokens, self.adapters) else { return Ok(self) };
        let columns: Vec<u32> = sites.flat_map(|s| lora::column_tiles(&caps, s, self.max_rank, tile)).collect();
        let align = Align {
            pairs: tokens,
            buckets: self.slots,
            tile,
            label: "adapter tiles",
            work_label: "align work",
            ids: &self.token_lora_mapping,
            columns: &columns,
        };
        self.aligned = Some(align.record(rec, pass)?);
        Ok(self)
    }

    /// Records the adapters of a site that works on whole tokens.
    ///
    /// # Errors
    /// Those of the LoRA stages.
    #[allow(clippy::too_many_arguments, reason = "the arguments are the site's operands")]
    pub fn record_dense(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        site: &LoraSite,
        factors: &Factors,
        tokens: usize,
        x: &View,
        y: &View,
    ) -> Result<()> {
        self.dense(site, factors, tokens, x, y).record(rec, pass)
    }

    /// The stage of a site that works on whole tokens.
    fn dense<'a>(
        &'a self,
        site: &'a LoraSite,
        factors: &'a Factors,
        tokens: usize,
        x: &'a View,
        y: &'a View,
    ) -> Lora<'a> {
        let select = match &self.aligned {
            Some(aligned) => Rows::Tiles(aligned),
            None => Rows::Pairs(&self.token_lora_mapping),
        };
        Lora {
            rows: tokens,
            row_div: 1,
            select,
            buckets: self.slots,
            max_rank: self.max_rank,
            site,
            factors,
            x,
            y,
            y_stride: site.out_dims.iter().sum(),
        }
    }

    /// Records the adapters of the embedding: `hidden`, f32 `[T, D]`, is added to. `row_table` and `last_ids` are those of
    /// [`Embed`](crate::kernels::embed::Embed).
    ///
    /// # Errors
    /// Those of the LoRA stages.
    #[allow(clippy::too_many_arguments, reason = "the arguments are the site's operands")]
    pub fn record_embedding(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        site: &LoraSite,
        factors: &Factors,
        tokens: usize,
        [row_table, last_ids]: [&View; 2],
        hidden: &View,
    ) -> Result<()> {
        let u = rec.scratch("lora u", (tokens * self.max_rank.next_multiple_of(8) * 4) as u64)?;
        let (slots, max_rank) = (self.slots, self.max_rank);
        LoraGather { rows: tokens, row_table, last_ids, slots, max_rank, site, factors, u: &u }.record(rec, pass)?;
        self.dense(site, factors, tokens, &u, hidden).record_expand(rec, pass, &u)
    }
}

/// The tensors of one pass through a layer.
pub struct MoeTensors<'a> {
    /// T.
    pub tokens: usize,
    /// f32 `[T, D]`, normed.
    pub x: &'a View,
    /// f32 `[T, D]`, written, or added to.
    pub out: &'a View,
    /// `out` holds the residual: add to it. Not with several ranks, where partial sums are exchanged first.
    pub accumulate: bool,
    /// u32 `[1]` status word.
    pub status: &'a View,
    /// Adapters of the batch with the sites and factors of this layer; `None` when no token has one.
    pub lora: Option<(&'a LoraBatch, &'a LayerSites, &'a Factors)>,
}

impl MoeLayer {
    /// Records the layer into the caller's pass. Nothing is submitted. A rank without experts or columns routes, so that the
    /// status is the same on all ranks, and adds nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for experts without a gate; when the device refuses a shader or has no room for scratch.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, t: &MoeTensors<'_>) -> Result<()> {
        if self.activation == Activation::ReluSquared {
            return Err(Error::new(ErrorKind::Unsupported, "layer: experts without a gate are not implemented"));
        }
        let MoeShape { experts: e, top_k: a, hidden: d, .. } = self.shape;
        let f = self.width;
        let caps = rec.gpu().capabilities().clone();
        let pairs = t.tokens * a;

        // Router.
        let logits = rec.scratch("router logits", (t.tokens * e * 4) as u64)?;
        ExpertGemm {
            rows: t.tokens,
            row_div: 1,
            select: Rows::Dense,
            x: t.x,
            weights: &self.router,
            y: &logits,
            y_stride: e,
            accumulate: false,
            exact: true,
        }
        .record(rec, pass)?;
        if let Some((batch, sites, factors)) = t.lora
            && let Some(site) = &sites.router
        {
            batch.record_dense(rec, pass, site, factors, t.tokens, t.x, &logits)?;
        }
        let topk_ids = rec.scratch("topk_ids", (pairs * 4) as u64)?;
        let topk_weights = rec.scratch("topk_weights", (pairs * 4) as u64)?;
        Route {
            tokens: t.tokens,
            experts: e,
            top_k: a,
            options: &self.options,
            logits: &logits,
            bias: None,
            topk_ids: &topk_ids,
            topk_weights: &topk_weights,
            status: t.status,
        }
        .record(rec, pass)?;
        if self.experts == 0 || f == 0 {
            if t.accumulate {
                return Ok(());
            }
            // A sum over no pair: nothing of y, weights and ids is read.
            let nothing = Combine {
                tokens: t.tokens,
                top_k: 0,
                hidden: d,
                y: &logits,
                topk_weights: &topk_weights,
                ids: &topk_ids,
                out: t.out,
                accumulate: false,
            };
            return nothing.record(rec, pass);
        }

        // This rank's ids.
        let ids = match &self.owners {
            None => topk_ids,
            Some(owners) => {
                let local_ids = rec.scratch("local_ids", (pairs * 4) as u64)?;
                Localise {
                    pairs,
                    valid_pairs: pairs,
                    experts: e,
                    top_k: a,
                    topk_ids: &topk_ids,
                    owners,
                    local_ids: &local_ids,
                }
                .record(rec, pass)?;
                local_ids
            }
        };

        // Virtual ids, then tiles of both streams.
        let adapters = match t.lora {
            None => None,
            Some((batch, sites, factors)) => {
                let virtual_topk_ids = rec.scratch("virtual_topk_ids", (pairs * 4) as u64)?;
                let lora_mask = rec.scratch("lora_mask", (t.tokens * 4) as u64)?;
                Remap {
                    pairs,
                    top_k: a,
                    experts: self.experts,
                    slots: batch.slots,
                    no_adapter: NoAdapter::Skip,
                    topk_ids: &ids,
                    token_lora_mapping: &batch.token_lora_mapping,
                    virtual_topk_ids: &virtual_topk_ids,
                    lora_mask: &lora_mask,
                    status: t.status,
                }
                .record(rec, pass)?;
                let aligned = self.align_virtual(rec, pass, &caps, pairs, &virtual_topk_ids, batch, sites)?;
                Some((virtual_topk_ids, aligned, batch, sites, factors))
            }
        };
        let aligned = self.align(rec, pass, &caps, pairs, &ids)?;
        let select = aligned.as_ref().map_or(Rows::Pairs(&ids), Rows::Tiles);
        let with_adapters =
            |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, down: bool, x: &View, y: &View| match &adapters {
                None => Ok(()),
                Some((virtual_ids, aligned, batch, sites, factors)) => {
                    let site = if down { &sites.down } else { &sites.gate_up };
                    Lora {
                        rows: pairs,
                        row_div: if down { 1 } else { a },
                        select: aligned.as_ref().map_or(Rows::Pairs(virtual_ids), Rows::Tiles),
                        buckets: batch.slots * self.experts,
                        max_rank: batch.max_rank,
                        site,
                        factors,
                        x,
                        y,
                        y_stride: if down { d } else { 2 * f },
                    }
                    .record(rec, pass)
                }
            };

        // Experts. On the matrix tier both operands of a product are f16, packed where they are made.
        let matrix = aligned.as_ref().is_some_and(|aligned| MatrixTile::of(aligned.tile).is_some());
        let (rows, accumulate, exact) = (pairs, false, false);
        let gate_up = rec.scratch("gate_up", (pairs * 2 * f * 4) as u64)?;
        let y = rec.scratch("expert y", (pairs * d * 4) as u64)?;
        let h = rec.scratch("expert h", (pairs * f * 4) as u64)?;
        {
            let (row_div, x, weights, y, y_stride) = (a, t.x, &self.gate_up, &gate_up, 2 * f);
            ExpertGemm { rows, row_div, select, x, weights, y, y_stride, accumulate, exact }.record(rec, pass)?;
        }
        with_adapters(rec, pass, false, t.x, &gate_up)?;
        let activate = Activate {
            rows: pairs,
            width: f,
            kind: self.activation,
            gate_up: &gate_up,
            ids: Some(&ids),
            h: Hidden::Plain(&h),
        };
        let (row_div, weights, y_stride) = (1, &self.down, d);
        // Adapters read h in f32.
        if matrix && adapters.is_none() {
            let packed = Packed::scratch(rec, "packed", pairs, f)?;
            Activate { h: Hidden::Packed(&packed), ..activate }.record(rec, pass)?;
            ExpertGemmMatrix { rows, row_div, select, x: &packed, weights, y: &y, y_stride, accumulate }
                .record(rec, pass)?;
        } else {
            activate.record(rec, pass)?;
            ExpertGemm { rows, row_div, select, x: &h, weights, y: &y, y_stride, accumulate, exact }
                .record(rec, pass)?;
            with_adapters(rec, pass, true, &h, &y)?;
        }
        Combine {
            tokens: t.tokens,
            top_k: a,
            hidden: d,
            y: &y,
            topk_weights: &topk_weights,
            ids: &ids,
            out: t.out,
            accumulate: t.accumulate,
        }
        .record(rec, pass)
    }

    /// Tiles of the base stream, or `None` when pairs go one by one.
    fn align(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        caps: &Capabilities,
        pairs: usize,
        ids: &View,
    ) -> Result<Option<Aligned>> {
        let matrix = caps.matrix && self.gate_up.exponent.get().is_some() && self.down.exponent.get().is_some();
        let tile = if matrix { matrix::tile(pairs, self.experts) } else { rows::tile(pairs, self.experts) };
        let Some(tile) = tile else { return Ok(None) };
        let columns: Vec<u32> = self.gate_up.columns(caps, tile).chain(self.down.columns(caps, tile)).collect();
        Align {
            pairs,
            buckets: self.experts,
            tile,
            label: "expert tiles",
            work_label: "align work",
            ids,
            columns: &columns,
        }
        .record(rec, pass)
        .map(Some)
    }

    /// Tiles of the adapter stream, or `None` when pairs go one by one.
    #[allow(clippy::too_many_arguments, reason = "the arguments are the stage's operands")]
    fn align_virtual(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        caps: &Capabilities,
        pairs: usize,
        ids: &View,
        batch: &LoraBatch,
        sites: &LayerSites,
    ) -> Result<Option<Aligned>> {
        let Some(tile) = rows::adapter_tile(caps, pairs, self.experts * batch.adapters) else { return Ok(None) };
        let columns: Vec<u32> = [&sites.gate_up, &sites.down]
            .into_iter()
            .flat_map(|s| lora::column_tiles(caps, s, batch.max_rank, tile))
            .collect();
        let buckets = batch.slots * self.experts;
        Align { pairs, buckets, tile, label: "virtual tiles", work_label: "align work", ids, columns: &columns }
            .record(rec, pass)
            .map(Some)
    }
}
