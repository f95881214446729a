//! The experts of many tokens on cooperative matrices: tiles of pairs, both operands of a product packed as f16 where they
//! are made, and products that stay in the order of the tiles until the next stage reads them.

use crate::adapter::sites::LayerSites;
use crate::error::Result;
use crate::kernels::activation::ActivatePack;
use crate::kernels::align::{Align, Aligned};
use crate::kernels::combine::CombineTiles;
use crate::kernels::expert_gemm::{Rows, Weights};
use crate::kernels::expert_gemm_matrix::{ExpertGemmMatrix, Folded};
use crate::kernels::lora::LoraSite;
use crate::kernels::lora_matrix::{self, LoraExpandTiles, LoraShrinkMatrix};
use crate::kernels::pack::{Blocks, Pack, Packed};
use crate::kernels::{Recording, View};
use crate::layer::{LoraBatch, MoeLayer, MoeTensors, Routed};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{self, EDGE, MatrixTile};
use crate::plan::rows;
use crate::shape::{MoeShape, align_capacity};

/// A product to record: rows of x in the tiles of their experts meet the weights, and the adapters of a site are added.
struct Product<'a> {
    aligned: &'a Aligned,
    weights: &'a Weights,
    x: &'a Packed,
    /// Pairs that share a row of x.
    row_div: usize,
    /// Where adapters change it.
    site: &'a Option<LoraSite>,
    /// i32 `[P]`, this rank's.
    ids: &'a View,
    /// Tiles of pairs that share expert and adapter, where they are needed.
    tiles: Option<&'a Aligned>,
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
        // Rows of products, and of x as blocks.
        let row_bytes = |w: &Weights| (stride(w) * 4).max(w.in_dim.next_multiple_of(64) * 2 + 8) as u64;
        let row_bytes = row_bytes(&self.gate_up).max(row_bytes(&self.down));
        let fits = |tile: usize| align_capacity(pairs, self.experts, tile) as u64 * row_bytes <= caps.max_binding_bytes;
        let mut tile = matrix::tile(caps, pairs, self.experts)?;
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

        let sorted =
            |site: &LoraSite, w: &Weights| t.adapts(site) && !(self.apart(&caps, t) && self.folds(&caps, t, w, tile));
        let tiles = match t.lora {
            Some((batch, sites, _)) if sorted(&sites.gate_up, &self.gate_up) || sorted(&sites.down, &self.down) => {
                let added = |site: &LoraSite, w: &Weights| !t.adapts(site) || self.folds(&caps, t, w, tile);
                let folded = added(&sites.gate_up, &self.gate_up) && added(&sites.down, &self.down);
                Some(self.adapter_tiles(rec, pass, t, ids, (batch, sites, folded))?)
            }
            // Nothing is shrunk, which would leave the status.
            Some((batch, ..)) if !t.adapts_experts() => {
                self.remap(rec, pass, t, ids, batch)?;
                None
            }
            _ => None,
        };
        let columns: Vec<u32> = self.gate_up.columns(&caps, tile).chain(self.down.columns(&caps, tile)).collect();
        let (label, work_label, buckets) = ("expert tiles", "align work", self.experts);
        let aligned = Align { pairs, buckets, tile, label, work_label, ids, columns: &columns }.record(rec, pass)?;

        let x = Packed::scratch(rec, "packed x", t.tokens, d)?;
        Pack { x: t.x, packed: &x }.record(rec, pass)?;
        let adapters = |down: bool| {
            let (_, sites, _) = t.lora?;
            Some(self.site(sites, down)).filter(|site| t.adapts(site))
        };
        let (aligned, row_div, tiles) = (&aligned, a, tiles.as_ref());
        let (weights, site, label) = (&self.gate_up, &adapters(false), "gate_up");
        let gate_up =
            self.product(rec, pass, t, &Product { aligned, weights, x: &x, row_div, site, ids, tiles, label })?;

        let mut h = Packed::scratch(rec, "packed h", pairs, self.width)?;
        if let Some(cut) = MatrixTile::direct_of(&caps, tile) {
            // The shrink reads rows.
            h.by_row = adapters(true).is_some();
            h.blocks = Some(Blocks::scratch(rec, "h in blocks", aligned.capacity, self.width, &cut)?);
        }
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

        let (weights, site, label) = (&self.down, &adapters(true), "expert y");
        let y =
            self.product(rec, pass, t, &Product { aligned, weights, x: &h, row_div: 1, site, ids, tiles, label })?;
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

    /// Whether the pairs of `t` hardly share factors of adapters.
    fn apart(&self, caps: &Capabilities, t: &MoeTensors<'_>) -> bool {
        let buckets = |batch: &LoraBatch| self.experts * batch.adapters();
        t.lora.is_some_and(|(batch, ..)| rows::apart(caps, t.tokens * self.shape.top_k, buckets(batch)))
    }

    /// Whether a product with `weights` in tiles of `tile` pairs adds the adapters itself.
    fn folds(&self, caps: &Capabilities, t: &MoeTensors<'_>, weights: &Weights, tile: usize) -> bool {
        // A tile has no more adapters than pairs, of which an expert has so many on the average.
        let pairs = t.tokens * self.shape.top_k;
        let most = pairs.div_ceil(self.experts).min(tile);
        let rows = align_capacity(pairs, self.experts, tile);
        let cut = MatrixTile::direct_of(caps, tile);
        t.lora.is_some_and(|(batch, ..)| batch.folded(weights, most, pairs) && batch.has_room(caps, cut, rows))
    }

    /// Tiles of pairs that share expert and adapter, for shrinks, and for expands unless all products add the adapters (`folded`).
    fn adapter_tiles(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        ids: &View,
        (batch, sites, folded): (&LoraBatch, &LayerSites, bool),
    ) -> Result<Aligned> {
        let virtual_topk_ids = self.remap(rec, pass, t, ids, batch)?;
        let columns: Vec<u32> = [&sites.gate_up, &sites.down]
            .into_iter()
            .flat_map(|s| lora_matrix::column_tiles(s, batch.max_rank))
            .collect();
        let pairs = t.tokens * self.shape.top_k;
        let align = Align {
            pairs,
            buckets: batch.slots * self.experts,
            tile: lora_matrix::shrink_tile(rec.gpu().capabilities(), pairs, batch.adapters() * self.experts, folded),
            label: "virtual tiles",
            work_label: "align work",
            ids: &virtual_topk_ids,
            columns: &columns,
        };
        align.record_used(rec, pass, &batch.used, self.experts)
    }

    /// Records a product. It adds the adapters itself where it can ([`LoraBatch::folded`]); else they are added to what it wrote,
    /// in f32.
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
        let (Some(site), Some((batch, _, factors))) = (product.site, t.lora) else {
            matrix(rec, pass, None)?;
            return Ok(Products { y, y_stride, w_unscale: 2f32.powi(-exponent) });
        };
        let (slots, used, experts, top_k) = (batch.slots, batch.adapters(), self.experts, self.shape.top_k);
        let folded = self.folds(rec.gpu().capabilities(), t, weights, aligned.tile);
        let token_lora_mapping = &batch.token_lora_mapping;
        let max_rank = batch.max_rank.next_multiple_of(if folded { EDGE as usize } else { 8 });
        let buckets = slots * experts;
        let u = match product.tiles {
            None => self.shrink(t, (batch, site, factors), &x.view, row_div, product.ids).record_packed(rec, pass)?,
            Some(aligned) => {
                let w_scale = 2f32.powi(exponent);
                LoraShrinkMatrix { rows, row_div, aligned, buckets, max_rank, w_scale, site, factors, x, folded }
                    .record(rec, pass)?
            }
        };
        match product.tiles {
            Some(tiles) if !folded => {
                matrix(rec, pass, None)?;
                let (u, places, y, aligned) = (&u, aligned, &y, tiles);
                LoraExpandTiles { rows, aligned, buckets, max_rank, site, factors, u, places, y, y_stride }
                    .record(rec, pass)?;
            }
            _ => matrix(
                rec,
                pass,
                Some(&Folded { u, max_rank, token_lora_mapping, top_k, slots, used, experts, site, factors }),
            )?,
        }
        Ok(Products { y, y_stride, w_unscale: 2f32.powi(-exponent) })
    }
}

/// Row of products with `weights` in elements: whole blocks of columns.
fn stride(weights: &Weights) -> usize {
    weights.out_dim.next_multiple_of(EDGE as usize)
}
