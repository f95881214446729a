//! The experts of many tokens on cooperative matrices: tiles of pairs, both operands of a product packed as f16 where they
//! are made, and products that stay in the order of the tiles until the next stage reads them.

use crate::error::Result;
use crate::kernels::activation::ActivatePack;
use crate::kernels::align::{Align, Aligned};
use crate::kernels::combine::CombineTiles;
use crate::kernels::expert_gemm_matrix::{ExpertGemmMatrix, Gated, Leaves};
use crate::kernels::lora::LoraSite;
use crate::kernels::lora_matrix::{self, Folded, InBlocks, LoraExpandTiles, LoraShrinkMatrix};
use crate::kernels::operands::{Rows, Weights};
use crate::kernels::pack::{Blocks, Form, Packed, pack};
use crate::kernels::runs::{AlignRuns, Runs};
use crate::kernels::tile_rows::TileRows;
use crate::kernels::{Recording, View};
use crate::layer::{LABELS, LoraBatch, MoeLayer, MoeTensors, Routed};
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
    /// Runs of pairs that share expert and adapter, where they are needed.
    runs: Option<&'a Runs>,
    /// What the shrink of its adapters does with the blocks of x, if there are any.
    in_blocks: InBlocks,
    /// What becomes of its sums.
    leaves: Leaves<'a>,
    label: &'static str,
}

/// What became of a product, in the order of the tiles; nothing, if it left the activation.
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
        let possible = |w: &Weights| w.magnitude.exponent().is_some() && whole_blocks(w);
        if !caps.matrix || !possible(&self.gate_up) || !possible(&self.down) {
            return None;
        }
        // Rows of products, and of x packed or as blocks.
        let fits = |tile: usize| {
            let direct = MatrixTile::direct_of(caps, tile);
            let x_values = |w: &Weights| direct.map_or(w.in_dim, |cut| cut.blocks(w.in_dim) * EDGE as usize);
            let row_bytes = |w: &Weights| (stride(w) * 4).max(x_values(w) * 2 + 8) as u64;
            let most = row_bytes(&self.gate_up).max(row_bytes(&self.down));
            // Blocks are loaded ahead past the end.
            let ahead = direct.map_or(0, |cut| Blocks::ahead_bytes(&cut) as u64);
            align_capacity(pairs, self.experts, tile) as u64 * most + ahead <= caps.max_binding_bytes
        };
        let mut tile = matrix::tile(caps, pairs, self.experts)?;
        while !fits(tile) {
            tile = matrix::lower(caps, tile)?;
        }
        Some(tile)
    }

    /// Records the experts for local `ids`, i32 `[P]`, in tiles of `tile` pairs, and the sum by weight. x may be `packed`.
    pub(super) fn on_matrices(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        routed: &Routed,
        ids: &View,
        (tile, packed): (usize, Option<&Packed>),
    ) -> Result<()> {
        let MoeShape { top_k: a, hidden: d, .. } = self.shape;
        let caps = rec.gpu().capabilities().clone();
        let pairs = t.tokens * a;

        let columns: Vec<u32> = self.gate_up.columns(&caps, tile).chain(self.down.columns(&caps, tile)).collect();
        let (aligned, runs) = self.sorted(rec, pass, t, ids, tile, &columns)?;

        let mut x = match packed.filter(|packed| packed.serve(&Form::ROWS)) {
            Some(packed) => packed.clone(),
            None => pack(rec, pass, LABELS, t.x, [t.tokens, d], &Form::ROWS)?,
        };
        let adapters = |down: bool| {
            let (_, sites, _) = t.lora?;
            Some(self.site(sites, down)).filter(|site| t.adapts(site))
        };
        let (aligned, row_div, runs) = (&aligned, a, runs.as_ref());
        x.blocks = None;
        let mut in_blocks = InBlocks::Read;
        let mut h = Packed::scratch(rec, "packed h", pairs, self.width)?;
        if let Some(cut) = MatrixTile::direct_of(&caps, tile) {
            let takes = |blocks: &Blocks, width: usize, way: InBlocks| {
                runs.is_some_and(|runs| lora_matrix::by_blocks(runs.most, blocks, width, way))
            };
            // The shrink leaves them where it reads the row of every pair.
            let blocks = Blocks::scratch(rec, "x in blocks", aligned.capacity, x.width, &cut)?;
            let everyone = t.lora.is_some_and(|(batch, ..)| batch.everyone) && adapters(false).is_some();
            x.blocks = Some(if everyone && takes(&blocks, x.width, InBlocks::Leave) {
                in_blocks = InBlocks::Leave;
                blocks
            } else {
                TileRows { rows: pairs, row_div, aligned, cut, x: &x }.record(rec, pass)?
            });
            let blocks = Blocks::scratch(rec, "h in blocks", aligned.capacity, self.width, &cut)?;
            // A shrink that does not read blocks reads rows.
            h.by_row = adapters(true).is_some() && !takes(&blocks, self.width, InBlocks::Read);
            h.blocks = Some(blocks);
        }
        let x = x;
        let (weights, site, label) = (&self.gate_up, &adapters(false), "gate_up");
        let gates = MatrixTile::direct_of(&caps, tile).is_some_and(|cut| cut.gates());
        let reach = self.reach(&caps, t, weights, tile).filter(|_| gates && weights.whole() && self.activation.gated());
        let leaves = match reach {
            Some(reach) => Leaves::Activation(Gated { kind: self.activation, reach, h: &h }),
            None => Leaves::Sums,
        };
        let product = Product { aligned, weights, x: &x, row_div, site, ids, runs, in_blocks, leaves, label };
        let gate_up = self.product(rec, pass, t, &product)?;
        if reach.is_none() {
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
        }

        let (weights, site, label) = (&self.down, &adapters(true), "expert y");
        let halves = self.reach(&caps, t, weights, tile).map(|reach| {
            // The sums keep the power of two of the weights.
            matrix::halves_exponent(reach + weights.magnitude.exponent().unwrap_or(0), weights.in_dim)
        });
        let leaves = halves.map_or(Leaves::Sums, Leaves::Halves);
        let in_blocks = InBlocks::Read;
        let product = Product { aligned, weights, x: &h, row_div: 1, site, ids, runs, in_blocks, leaves, label };
        let y = self.product(rec, pass, t, &product)?;
        CombineTiles {
            tokens: t.tokens,
            top_k: a,
            hidden: d,
            y: &y.y,
            halves,
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

    /// The power of two that bounds a product in tiles of `tile` pairs over the norm of a row of x: with a direct cut, adapters that it adds
    /// itself, and weights and adapters whose bound says enough.
    fn reach(&self, caps: &Capabilities, t: &MoeTensors<'_>, weights: &Weights, tile: usize) -> Option<i32> {
        let norms = weights.magnitude.norms().filter(|_| MatrixTile::direct_of(caps, tile).is_some())?;
        let adapters = t.lora.filter(|_| t.adapts_experts());
        if adapters.is_some() && !self.folds(caps, t, weights, tile) {
            return None;
        }
        matrix::reach_exponent(norms, adapters.map_or(0.0, |(batch, ..)| batch.reach))
    }

    /// The pairs in tiles of `tile` of an expert, whose products have `columns`; and runs of an expert and adapter, where some shrink
    /// takes these: where pairs share factors, or some product does not add the adapters itself.
    fn sorted(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        ids: &View,
        tile: usize,
        columns: &[u32],
    ) -> Result<(Aligned, Option<Runs>)> {
        let caps = rec.gpu().capabilities().clone();
        let (pairs, top_k, experts) = (t.tokens * self.shape.top_k, self.shape.top_k, self.experts);
        let label = "expert tiles";
        if let Some((batch, sites, _)) = t.lora {
            let products = [(&sites.gate_up, &self.gate_up), (&sites.down, &self.down)];
            let mut adapted = products.into_iter().filter(|(site, _)| t.adapts(site));
            let apart = self.apart(&caps, t);
            let folded = adapted.clone().all(|(_, weights)| self.folds(&caps, t, weights, tile));
            if adapted.next().is_some() && !(apart && folded) {
                let run_columns: Vec<u32> = [&sites.gate_up, &sites.down]
                    .into_iter()
                    .flat_map(|site| lora_matrix::column_tiles(site, batch.max_rank))
                    .collect();
                let chunks = match &batch.chunks {
                    Some(chunks) => chunks.clone(),
                    None => batch.sorted(rec, pass, "expert chunks", t.tokens)?,
                };
                let runs = AlignRuns {
                    chunks: &chunks,
                    top_k,
                    experts,
                    tile,
                    label,
                    ids: Some(ids),
                    status: t.status,
                    run: lora_matrix::shrink_run(&caps, pairs, batch.adapters() * experts, folded),
                    columns,
                    run_columns: &run_columns,
                }
                .record(rec, pass)?;
                return Ok((runs.aligned.clone(), Some(runs)));
            }
            if !t.adapts_experts() {
                // Nothing is shrunk, which would leave the status.
                self.remap(rec, pass, t, ids, batch)?;
            }
        }
        let aligned = Align { pairs, buckets: experts, tile, label, ids, columns }.record(rec, pass)?;
        Ok((aligned, None))
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
        let exponent = weights.magnitude.exponent().unwrap_or(0);
        let y_stride = stride(weights);
        let y = match &product.leaves {
            Leaves::Activation(gated) => gated.h.view.clone(),
            Leaves::Halves(_) => rec.scratch(label, (aligned.capacity * y_stride * 2) as u64)?,
            Leaves::Sums => rec.scratch(label, (aligned.capacity * y_stride * 4) as u64)?,
        };
        let matrix = |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, adapters: Option<&Folded<'_>>| {
            let (select, accumulate, y) = (Rows::Tiles(aligned), false, &y);
            let leaves = product.leaves;
            ExpertGemmMatrix { rows, row_div, select, x, weights, y, y_stride, accumulate, parts: 1, adapters, leaves }
                .record(rec, pass)
        };
        let (Some(site), Some((batch, _, factors))) = (product.site, t.lora) else {
            matrix(rec, pass, None)?;
            return Ok(Products { y, y_stride, w_unscale: 2f32.powi(-exponent) });
        };
        let (slots, used, experts, top_k) = (batch.slots, batch.adapters(), self.experts, self.shape.top_k);
        let folded = self.folds(rec.gpu().capabilities(), t, weights, aligned.tile);
        let token_lora_mapping = &batch.token_lora_mapping;
        let max_rank = batch.max_rank.next_multiple_of(if folded { EDGE as usize } else { 8 });
        let u = match product.runs {
            None => {
                let shrink = self.shrink(t, (batch, site, factors), &x.view, row_div, product.ids);
                shrink.record_packed(rec, pass, x.stride())?
            }
            Some(runs) => {
                let w_scale = 2f32.powi(exponent);
                let blocks = x.blocks.as_ref().map(|blocks| (blocks, product.in_blocks));
                LoraShrinkMatrix { rows, row_div, runs, max_rank, w_scale, site, factors, x, blocks, folded }
                    .record(rec, pass)?
            }
        };
        match product.runs {
            Some(runs) if !folded => {
                matrix(rec, pass, None)?;
                let (buckets, u, y) = (slots * experts, &u, &y);
                LoraExpandTiles { runs, buckets, max_rank, site, factors, u, y, y_stride }.record(rec, pass)?;
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
