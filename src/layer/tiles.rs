//! The experts of many tokens on cooperative matrices: tiles of pairs, both operands of a product packed as f16 where they
//! are made, and products that stay in the order of the tiles until the next stage reads them.

use crate::error::Result;
use crate::kernels::activation::ActivatePack;
use crate::kernels::align::{Align, Aligned};
use crate::kernels::combine::CombineTiles;
use crate::kernels::expert_gemm::{Rows, Weights};
use crate::kernels::expert_gemm_matrix::{ExpertGemmMatrix, Folded};
use crate::kernels::lora::LoraSite;
use crate::kernels::lora_matrix::{self, LoraExpandTiles, LoraShrinkMatrix};
use crate::kernels::pack::{Pack, Packed};
use crate::kernels::{Recording, View};
use crate::layer::{MoeLayer, MoeTensors, Routed};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{self, EDGE};
use crate::shape::{MoeShape, align_capacity};

/// A product to record: rows of x in the tiles of their experts meet the weights, and the adapters of a site are added.
struct Product<'a> {
    aligned: &'a Aligned,
    weights: &'a Weights,
    x: &'a Packed,
    /// Pairs that share a row of x.
    row_div: usize,
    /// `None` where none changes it.
    adapters: Option<(&'a Aligned, &'a LoraSite)>,
    label: &'static str,
}

/// What became of a product, in the order of the tiles.
struct Products {
    y: View,
    y_stride: usize,
    /// The inverse of the weights' power of two.
    w_unscale: f32,
}

impl MoeLayer {
    /// Height of the tiles in which `pairs` meet the experts on cooperative matrices; `None` where they do not.
    pub(super) fn matrix_tile(&self, caps: &Capabilities, pairs: usize) -> Option<usize> {
        let whole_blocks =
            |w: &Weights| w.pieces.iter().all(|(piece, _)| piece.row_begin.is_multiple_of(EDGE as usize));
        let possible = |w: &Weights| w.exponent.get().is_some() && whole_blocks(w);
        if !caps.matrix || !possible(&self.gate_up) || !possible(&self.down) {
            return None;
        }
        let row_bytes = stride(&self.gate_up).max(stride(&self.down)) as u64 * 4;
        let fits = |tile: usize| align_capacity(pairs, self.experts, tile) as u64 * row_bytes <= caps.max_binding_bytes;
        let mut tile = matrix::tile(pairs, self.experts)?;
        while !fits(tile) {
            tile = matrix::lower(tile)?;
        }
        Some(tile)
    }

    /// Records the experts for local `ids`, i32 `[P]`, in tiles of `tile` pairs, and the sum by weight.
    pub(super) fn on_matrices(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        routed: &Routed,
        ids: &View,
        tile: usize,
    ) -> Result<()> {
        let MoeShape { top_k: a, hidden: d, .. } = self.shape;
        let caps = rec.gpu().capabilities().clone();
        let pairs = t.tokens * a;

        let adapters = self.adapter_tiles(rec, pass, t, ids)?;
        let columns: Vec<u32> = self.gate_up.columns(&caps, tile).chain(self.down.columns(&caps, tile)).collect();
        let (label, work_label, buckets) = ("expert tiles", "align work", self.experts);
        let aligned = Align { pairs, buckets, tile, label, work_label, ids, columns: &columns }.record(rec, pass)?;

        let x = Packed::scratch(rec, "packed x", t.tokens, d)?;
        Pack { x: t.x, packed: &x }.record(rec, pass)?;
        let with = |down: bool| {
            let (_, sites, _) = t.lora?;
            let site = if down { &sites.down } else { &sites.gate_up };
            adapters.as_ref().filter(|_| t.adapts(site)).map(|tiles| (tiles, site))
        };
        let (aligned, row_div, label) = (&aligned, a, "gate_up");
        let product = Product { aligned, weights: &self.gate_up, x: &x, row_div, adapters: with(false), label };
        let gate_up = self.product(rec, pass, t, &product)?;

        let h = Packed::scratch(rec, "packed h", pairs, self.width)?;
        ActivatePack {
            rows: pairs,
            width: self.width,
            kind: self.activation,
            gate_up: &gate_up.y,
            ids,
            aligned,
            x: &x,
            row_div,
            w_unscale: gate_up.w_unscale,
            h: &h,
        }
        .record(rec, pass)?;

        let (row_div, label) = (1, "expert y");
        let product = Product { aligned, weights: &self.down, x: &h, row_div, adapters: with(true), label };
        let y = self.product(rec, pass, t, &product)?;
        CombineTiles {
            tokens: t.tokens,
            top_k: a,
            hidden: d,
            y: &y.y,
            y_stride: y.y_stride,
            topk_weights: &routed.topk_weights,
            ids,
            aligned,
            h: &h,
            w_unscale: y.w_unscale,
            out: t.out,
            accumulate: t.accumulate,
        }
        .record(rec, pass)
    }

    /// Tiles of pairs that share expert and adapter; `None` without adapters.
    fn adapter_tiles(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        ids: &View,
    ) -> Result<Option<Aligned>> {
        let Some((batch, sites, _)) = t.lora else { return Ok(None) };
        let virtual_topk_ids = self.remap(rec, pass, t, ids, batch)?;
        if !t.adapts_experts() {
            return Ok(None);
        }
        let columns: Vec<u32> = [&sites.gate_up, &sites.down]
            .into_iter()
            .flat_map(|s| lora_matrix::column_tiles(s, batch.max_rank))
            .collect();
        let align = Align {
            pairs: t.tokens * self.shape.top_k,
            buckets: batch.slots * self.experts,
            tile: lora_matrix::TILE,
            label: "virtual tiles",
            work_label: "align work",
            ids: &virtual_topk_ids,
            columns: &columns,
        };
        align.record(rec, pass).map(Some)
    }

    /// Records a product. It adds the adapters itself where their factors allow it and are not long beside a row of weights;
    /// else they are added to what it wrote, in f32.
    fn product(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        product: &Product<'_>,
    ) -> Result<Products> {
        let Product { aligned, weights, x, row_div, label, .. } = *product;
        let rows = t.tokens * self.shape.top_k;
        let exponent = weights.exponent.get().unwrap_or(0);
        let y_stride = stride(weights);
        let y = rec.scratch(label, (aligned.capacity * y_stride * 4) as u64)?;
        let matrix = |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, adapters: Option<&Folded<'_>>| {
            let (select, accumulate, y) = (Rows::Tiles(aligned), false, &y);
            ExpertGemmMatrix { rows, row_div, select, x, weights, y, y_stride, accumulate, adapters }.record(rec, pass)
        };
        if let (Some((tiles, site)), Some((batch, _, factors))) = (product.adapters, t.lora) {
            let (slots, experts) = (batch.slots, self.experts);
            let folded = exponent == 0
                && batch.folds
                && slots <= matrix::FOLDED_SLOTS
                && matrix::folds(batch.adapters.min(aligned.tile), batch.max_rank, weights.in_dim);
            let max_rank = batch.max_rank.next_multiple_of(if folded { EDGE as usize } else { 8 });
            let u_bytes = rows * site.out_dims.len() * max_rank * if folded { 2 } else { 4 };
            let u = rec.scratch("lora u", u_bytes as u64)?;
            let (buckets, w_scale) = (slots * experts, 2f32.powi(exponent));
            LoraShrinkMatrix {
                rows,
                row_div,
                aligned: tiles,
                buckets,
                max_rank,
                w_scale,
                site,
                factors,
                x,
                folded,
                u: &u,
            }
            .record(rec, pass)?;
            if folded {
                let (token_lora_mapping, top_k) = (&batch.token_lora_mapping, self.shape.top_k);
                let folded = Folded { u, max_rank, token_lora_mapping, top_k, slots, experts, site, factors };
                matrix(rec, pass, Some(&folded))?;
            } else {
                matrix(rec, pass, None)?;
                let (u, places, y, aligned) = (&u, aligned, &y, tiles);
                LoraExpandTiles { rows, aligned, buckets, max_rank, site, factors, u, places, y, y_stride }
                    .record(rec, pass)?;
            }
        } else {
            matrix(rec, pass, None)?;
        }
        Ok(Products { y, y_stride, w_unscale: 2f32.powi(-exponent) })
    }
}

/// Row of products with `weights` in elements: whole blocks of columns.
fn stride(weights: &Weights) -> usize {
    weights.out_dim.next_multiple_of(EDGE as usize)
}
