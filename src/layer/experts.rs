//! The second half of a layer: the experts of routed tokens, their adapters, and the weighted sum.

use crate::activation::Activation;
use crate::adapter::sites::LayerSites;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::activation::Activate;
use crate::kernels::align::{Align, Aligned};
use crate::kernels::combine::Combine;
use crate::kernels::expert_gemm::ExpertGemm;
use crate::kernels::localise::Localise;
use crate::kernels::lora::{self, Lora};
use crate::kernels::operands::Rows;
use crate::kernels::pack::{Form, Packed, Reads};
use crate::kernels::remap::Remap;
use crate::kernels::{Recording, View};
use crate::layer::{LoraBatch, MoeLayer, MoeTensors, Routed};
use crate::plan::capabilities::Capabilities;
use crate::plan::rows;
use crate::router::NoAdapter;
use crate::shape::MoeShape;

impl MoeLayer {
    /// Records the experts of tokens that are `routed`, and the sum of their outputs by weight.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for experts without a gate; when the device refuses a shader or has no room for scratch.
    pub fn experts(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        routed: &Routed,
    ) -> Result<()> {
        self.experts_rows(rec, pass, t, routed, None)
    }

    /// In which forms the experts read x.
    pub(super) fn experts_reads(&self, caps: &Capabilities, t: &MoeTensors<'_>) -> Reads {
        if self.experts == 0 || self.width == 0 {
            return Reads { plain: false, packed: None };
        }
        let few = self.few(caps, t).is_some();
        match self.matrix_tile(caps, t.tokens * self.shape.top_k) {
            Some(_) if !few => Reads { plain: false, packed: Some(Form::ROWS) },
            _ => Reads::PLAIN,
        }
    }

    /// The same as [`experts`](Self::experts) for x that may be `packed`.
    pub(super) fn experts_rows(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        routed: &Routed,
        packed: Option<&Packed>,
    ) -> Result<()> {
        if self.activation == Activation::ReluSquared {
            return Err(Error::new(ErrorKind::Unsupported, "layer: experts without a gate are not implemented"));
        }
        let MoeShape { top_k: a, hidden: d, .. } = self.shape;
        let f = self.width;
        let caps = rec.gpu().capabilities().clone();
        let pairs = t.tokens * a;
        if self.experts == 0 || f == 0 {
            if t.accumulate {
                return Ok(());
            }
            // A sum over no pair: nothing of y, weights and ids is read.
            let nothing = Combine {
                tokens: t.tokens,
                top_k: 0,
                hidden: d,
                y: t.x,
                topk_weights: &routed.topk_weights,
                ids: &routed.topk_ids,
                out: t.out,
                accumulate: false,
            };
            return nothing.record(rec, pass);
        }

        // This rank's ids.
        let ids = match &self.owners {
            Some(owners) if !routed.local => {
                let local_ids = rec.scratch("local_ids", (pairs * 4) as u64)?;
                Localise { pairs, valid_pairs: pairs, topk_ids: &routed.topk_ids, owners, local_ids: &local_ids }
                    .record(rec, pass)?;
                local_ids
            }
            _ => routed.topk_ids.clone(),
        };

        if let Some(few) = self.few(&caps, t) {
            return self.few_pairs(rec, pass, t, routed, &ids, (few, None));
        }
        if let Some(tile) = self.matrix_tile(&caps, pairs) {
            return self.on_matrices(rec, pass, t, routed, &ids, (tile, packed));
        }

        // Virtual ids, then tiles of both streams.
        let adapters = match t.lora {
            None => None,
            Some((batch, sites, factors)) => {
                let virtual_topk_ids = self.remap(rec, pass, t, &ids, batch)?;
                if t.adapts_experts() {
                    let aligned = self.align_virtual(rec, pass, &caps, pairs, &virtual_topk_ids, batch, sites)?;
                    Some((virtual_topk_ids, aligned, batch, sites, factors))
                } else {
                    None
                }
            }
        };
        let aligned = self.align(rec, pass, &caps, pairs, &ids)?;
        let select = aligned.as_ref().map_or(Rows::Pairs(&ids), Rows::Tiles);
        let with_adapters =
            |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, down: bool, x: &View, y: &View| match &adapters {
                None => Ok(()),
                Some((virtual_ids, aligned, batch, sites, factors)) => {
                    let site = &self.site(sites, down);
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

        // Experts.
        let (rows, accumulate, exact) = (pairs, false, false);
        let gate_up = rec.scratch("gate_up", (pairs * 2 * f * 4) as u64)?;
        let y = rec.scratch("expert y", (pairs * d * 4) as u64)?;
        let h = rec.scratch("expert h", (pairs * f * 4) as u64)?;
        {
            let (row_div, x, weights, y, y_stride) = (a, t.x, &self.gate_up, &gate_up, 2 * f);
            ExpertGemm { rows, row_div, select, x, weights, y, y_stride, accumulate, exact }.record(rec, pass)?;
        }
        with_adapters(rec, pass, false, t.x, &gate_up)?;
        Activate { rows: pairs, width: f, kind: self.activation, gate_up: &gate_up, ids: Some(&ids), h: &h }
            .record(rec, pass)?;
        {
            let (row_div, x, weights, y, y_stride) = (1, &h, &self.down, &y, d);
            ExpertGemm { rows, row_div, select, x, weights, y, y_stride, accumulate, exact }.record(rec, pass)?;
        }
        with_adapters(rec, pass, true, &h, &y)?;
        Combine {
            tokens: t.tokens,
            top_k: a,
            hidden: d,
            y: &y,
            topk_weights: &routed.topk_weights,
            ids: &ids,
            out: t.out,
            accumulate: t.accumulate,
        }
        .record(rec, pass)
    }

    /// Virtual ids of `ids`, and what the status says of them.
    pub(super) fn remap(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        ids: &View,
        batch: &LoraBatch,
    ) -> Result<View> {
        let top_k = self.shape.top_k;
        let virtual_topk_ids = rec.scratch("virtual_topk_ids", (t.tokens * top_k * 4) as u64)?;
        let lora_mask = rec.scratch("lora_mask", (t.tokens * 4) as u64)?;
        Remap {
            pairs: t.tokens * top_k,
            top_k,
            experts: self.experts,
            slots: batch.slots,
            no_adapter: NoAdapter::Skip,
            topk_ids: ids,
            token_lora_mapping: &batch.token_lora_mapping,
            virtual_topk_ids: &virtual_topk_ids,
            lora_mask: &lora_mask,
            status: t.status,
        }
        .record(rec, pass)?;
        Ok(virtual_topk_ids)
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
        let Some(tile) = rows::tile(caps, pairs, self.experts) else { return Ok(None) };
        let columns: Vec<u32> = self.gate_up.columns(caps, tile).chain(self.down.columns(caps, tile)).collect();
        Align { pairs, buckets: self.experts, tile, label: "expert tiles", ids, columns: &columns }
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
        let Some(tile) = rows::adapter_tile(caps, pairs, self.experts * batch.adapters()) else { return Ok(None) };
        let columns: Vec<u32> = [&sites.gate_up, &sites.down]
            .into_iter()
            .flat_map(|s| lora::column_tiles(caps, s, batch.max_rank, tile))
            .collect();
        let buckets = batch.slots * self.experts;
        Align { pairs, buckets, tile, label: "virtual tiles", ids, columns: &columns }
            .record_used(rec, pass, &batch.used, self.experts)
            .map(Some)
    }
}
