//! The experts of few pairs: what a step of decoding does. Few dispatches, each with all the work that its operands allow.

use crate::adapter::sites::LayerSites;
use crate::error::Result;
use crate::kernels::align::Align;
use crate::kernels::choice::{self, Choice, Topk};
use crate::kernels::combine::Combine;
use crate::kernels::down_combine::DownCombine;
use crate::kernels::lora::{Factors, LoraSite};
use crate::kernels::operands::Rows;
use crate::kernels::pair_expand_shrink::PairExpandShrink;
use crate::kernels::pair_gemm::{self, PairGemm};
use crate::kernels::pair_gemm_shrink::{self, PairGemmShrink};
use crate::kernels::pair_shrink::{PairShrink, Shrunk};
use crate::kernels::{Recording, View};
use crate::layer::{LoraBatch, MoeLayer, MoeTensors, Routed};
use crate::plan::capabilities::Capabilities;
use crate::plan::rows::{self, Few};
use crate::shape::MoeShape;

impl MoeLayer {
    /// How this layer takes the tokens of `t`, where they are few.
    pub(super) fn few(&self, caps: &Capabilities, t: &MoeTensors<'_>) -> Option<Few> {
        let few = rows::few(caps, t.tokens, self.shape.top_k, self.experts)?;
        pair_gemm::gated(&self.gate_up).then_some(few)
    }

    /// Whether the first product chooses the experts: where single pairs meet them, on the rank that holds them all, and no other stage
    /// wants the ids before.
    pub(super) fn chooses_late(&self, rec: &Recording, t: &MoeTensors<'_>) -> bool {
        let MoeShape { experts, top_k, .. } = self.shape;
        let rank = self.owners.is_none() && self.experts == experts && self.width > 0;
        // It reads whole logits.
        rank && self.router_parts(rec.gpu().capabilities(), t) == 1
            && self.few(rec.gpu().capabilities(), t) == Some(Few::Single)
            && self.activation.gated()
            && choice::possible(rec.gpu().capabilities(), &self.options, experts, top_k)
            && (t.lora.is_none() || self.shrinks_beside(rec, t))
    }

    /// Records a layer that [`chooses_late`](Self::chooses_late).
    pub(super) fn record_choosing(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
    ) -> Result<Routed> {
        let MoeShape { experts, top_k, .. } = self.shape;
        // Whole ones: so it was asked.
        let (logits, _) = &self.router(rec, pass, t, None)?;
        let topk = &Topk::scratch(rec, t.tokens * top_k)?;
        let routed = Routed { topk_ids: topk.ids(), local: false, topk_weights: topk.weights() };
        let choice = Choice { options: &self.options, experts, logits, topk, status: t.status };
        self.few_pairs(rec, pass, t, &routed, &routed.topk_ids, (Few::Single, Some(&choice)))?;
        Ok(routed)
    }

    /// Records the experts of few pairs; `ids` are those of this rank, which the first product writes if there is a choice.
    pub(super) fn few_pairs(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        routed: &Routed,
        ids: &View,
        (few, choice): (Few, Option<&Choice<'_>>),
    ) -> Result<()> {
        let (top_k, d, f) = (self.shape.top_k, self.shape.hidden, self.width);
        let rows = t.tokens * top_k;
        if let Some((batch, ..)) = t.lora
            && !t.adapts_experts()
        {
            // Nothing is shrunk, which would leave the status.
            self.remap(rec, pass, t, ids, batch)?;
        }
        let aligned = match few {
            Few::Single => None,
            Few::Tiles(tile) => {
                let label = "expert tiles";
                let align = Align { pairs: rows, buckets: self.experts, tile, label, ids, columns: &[] };
                Some(align.record(rec, pass)?)
            }
        };
        let select = aligned.as_ref().map_or(Rows::Pairs(ids), Rows::Tiles);
        let shrunk = |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, down: bool, x: &View| {
            let Some((batch, sites, factors)) = t.lora else { return Ok(None) };
            let site = if down { &sites.down } else { &sites.gate_up };
            if !t.adapts(site) {
                return Ok(None);
            }
            let row_div = if down { 1 } else { top_k };
            self.shrink(t, (batch, site, factors), x, row_div, ids).record(rec, pass).map(Some)
        };

        let h = rec.scratch("expert h", (rows * f * 4) as u64)?;
        let adapters = if let Some(lora) = t.lora.filter(|_| self.shrinks_beside(rec, t)) {
            Some(self.gate_up_and_shrinks(rec, pass, t, lora, (select, choice), ids, &h)?)
        } else {
            let adapters = shrunk(rec, pass, false, t.x)?;
            PairGemm {
                rows,
                row_div: top_k,
                select,
                choice,
                x: t.x,
                weights: &self.gate_up,
                activation: Some(self.activation),
                adapters: adapters.as_ref(),
                y: &h,
            }
            .record(rec, pass)?;
            shrunk(rec, pass, true, &h)?
        };
        let (tokens, out, accumulate, topk_weights) = (t.tokens, t.out, t.accumulate, &routed.topk_weights);
        let (weights, adapters) = (&self.down, adapters.as_ref());
        if aligned.is_none() {
            return DownCombine { tokens, top_k, h: &h, weights, ids, topk_weights, adapters, out, accumulate }
                .record(rec, pass);
        }
        let y = rec.scratch("expert y", (rows * d * 4) as u64)?;
        let (row_div, choice, activation) = (1, None, None);
        PairGemm { rows, row_div, select, choice, x: &h, weights, activation, adapters, y: &y }.record(rec, pass)?;
        Combine { tokens, top_k, hidden: d, y: &y, topk_weights, ids, out, accumulate }.record(rec, pass)
    }

    /// Whether both sites are shrunk beside other work: where there is something for both, and room for gate and up.
    fn shrinks_beside(&self, rec: &Recording, t: &MoeTensors<'_>) -> bool {
        let Some((batch, sites, _)) = t.lora else { return false };
        let bytes = pair_gemm_shrink::bytes(t.tokens * self.shape.top_k, 2 * self.width, batch.max_rank);
        t.adapts(&sites.gate_up) && t.adapts(&sites.down) && bytes <= rec.gpu().capabilities().max_binding_bytes
    }

    /// Records gate and up with their adapters and the activation into `h`, and the first half of those of down: two stages in which
    /// nothing waits for a shrink alone.
    #[allow(clippy::too_many_arguments, reason = "the operands of two stages")]
    fn gate_up_and_shrinks(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        (batch, sites, factors): (&LoraBatch, &LayerSites, &Factors),
        (select, choice): (Rows<'_>, Option<&Choice<'_>>),
        ids: &View,
        h: &View,
    ) -> Result<Shrunk> {
        let shrink = self.shrink(t, (batch, &sites.gate_up, factors), t.x, self.shape.top_k, ids);
        let rows = shrink.rows;
        let (weights, down) = (&self.gate_up, &sites.down);
        let sums = PairGemmShrink { select, choice, weights, shrink, down }.record(rec, pass)?;
        let [pool, down_pool] = [&sites.gate_up, &sites.down].map(|site| factors.pool(site));
        let (width, activation, sums, status) = (self.width, self.activation, &sums, t.status);
        PairExpandShrink { rows, width, activation, sums, pool, down_pool, h, status }.record(rec, pass)
    }

    /// The first half of the adapters of a site for each pair on its own; `ids` are those of this rank. Both ways of recording
    /// it look up slot and expert, and leave the status.
    pub(super) fn shrink<'a>(
        &self,
        t: &'a MoeTensors<'_>,
        (batch, site, factors): (&'a LoraBatch, &'a LoraSite, &'a Factors),
        x: &'a View,
        row_div: usize,
        ids: &'a View,
    ) -> PairShrink<'a> {
        let top_k = self.shape.top_k;
        PairShrink {
            rows: t.tokens * top_k,
            row_div,
            top_k,
            experts: self.experts,
            slots: batch.slots,
            max_rank: batch.max_rank,
            site,
            factors,
            x,
            ids: Some(ids),
            token_lora_mapping: &batch.token_lora_mapping,
            status: t.status,
        }
    }
}
