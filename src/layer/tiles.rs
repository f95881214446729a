//! The experts of many tokens on cooperative matrices: tiles of pairs, both operands of a product packed as f16 where they
//! are made, and products that stay in the order of the tiles until the next stage reads them.

use crate::error::Result;
use crate::kernels::activation::ActivatePack;
use crate::kernels::align::{Align, Aligned};
use crate::kernels::combine::CombineTiles;
use crate::kernels::expert_gemm::{Rows, Weights};
use crate::kernels::expert_gemm_matrix::ExpertGemmMatrix;
use crate::kernels::lora::LoraSite;
use crate::kernels::lora_matrix::{self, LoraExpandTiles, LoraShrinkMatrix};
use crate::kernels::pack::{Pack, Packed};
use crate::kernels::{Recording, View};
use crate::layer::{MoeLayer, MoeTensors, Routed};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{self, EDGE};
use crate::shape::{MoeShape, align_capacity};

/// Products in the order of the tiles.
struct Products<'a> {
    aligned: &'a Aligned,
    weights: &'a Weights,
    y: View,
    y_stride: usize,
}

impl Products<'_> {
    /// The power of two of the weights.
    fn exponent(&self) -> i32 {
        self.weights.exponent.get().unwrap_or(0)
    }
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
        let gate_up = product(rec, pass, pairs, a, &aligned, &x, &self.gate_up, "gate_up")?;
        if let (Some(adapters), Some((_, sites, _))) = (&adapters, t.lora) {
            self.adapt(rec, pass, t, adapters, &sites.gate_up, a, &x, &gate_up)?;
        }

        let h = Packed::scratch(rec, "packed h", pairs, self.width)?;
        ActivatePack {
            rows: pairs,
            width: self.width,
            kind: self.activation,
            gate_up: &gate_up.y,
            ids,
            aligned: &aligned,
            x: &x,
            row_div: a,
            w_unscale: 2f32.powi(-gate_up.exponent()),
            h: &h,
        }
        .record(rec, pass)?;

        let y = product(rec, pass, pairs, 1, &aligned, &h, &self.down, "expert y")?;
        if let (Some(adapters), Some((_, sites, _))) = (&adapters, t.lora) {
            self.adapt(rec, pass, t, adapters, &sites.down, 1, &h, &y)?;
        }
        CombineTiles {
            tokens: t.tokens,
            top_k: a,
            hidden: d,
            y: &y.y,
            y_stride: y.y_stride,
            topk_weights: &routed.topk_weights,
            ids,
            aligned: &aligned,
            h: &h,
            w_unscale: 2f32.powi(-y.exponent()),
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
        Align {
            pairs: t.tokens * self.shape.top_k,
            buckets: batch.slots * self.experts,
            tile: lora_matrix::TILE,
            label: "virtual tiles",
            work_label: "align work",
            ids: &virtual_topk_ids,
            columns: &columns,
        }
        .record(rec, pass)
        .map(Some)
    }

    /// Adds the adapters of one site to the products.
    #[allow(clippy::too_many_arguments, reason = "the arguments are the site's operands")]
    fn adapt(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        aligned: &Aligned,
        site: &LoraSite,
        row_div: usize,
        x: &Packed,
        products: &Products<'_>,
    ) -> Result<()> {
        let Some((batch, _, factors)) = t.lora.filter(|_| t.adapts(site)) else { return Ok(()) };
        let (rows, buckets) = (t.tokens * self.shape.top_k, batch.slots * self.experts);
        let max_rank = batch.max_rank.next_multiple_of(8);
        let u = rec.scratch("lora u", (rows * site.out_dims.len() * max_rank * 4) as u64)?;
        let w_scale = 2f32.powi(products.exponent());
        LoraShrinkMatrix { rows, row_div, aligned, buckets, max_rank, w_scale, site, factors, x, u: &u }
            .record(rec, pass)?;
        let (places, y, y_stride) = (products.aligned, &products.y, products.y_stride);
        LoraExpandTiles { rows, aligned, buckets, max_rank, site, factors, u: &u, places, y, y_stride }
            .record(rec, pass)
    }
}

/// Row of products with `weights` in elements: whole blocks of columns.
fn stride(weights: &Weights) -> usize {
    weights.out_dim.next_multiple_of(EDGE as usize)
}

/// Records a product of tiles.
#[allow(clippy::too_many_arguments, reason = "the arguments are the product's operands")]
fn product<'a>(
    rec: &mut Recording,
    pass: &mut wgpu::ComputePass<'_>,
    rows: usize,
    row_div: usize,
    aligned: &'a Aligned,
    x: &Packed,
    weights: &'a Weights,
    label: &'static str,
) -> Result<Products<'a>> {
    let y_stride = stride(weights);
    let y = rec.scratch(label, (aligned.capacity * y_stride * 4) as u64)?;
    let (select, accumulate) = (Rows::Tiles(aligned), false);
    ExpertGemmMatrix { rows, row_div, select, x, weights, y: &y, y_stride, accumulate }.record(rec, pass)?;
    Ok(Products { aligned, weights, y, y_stride })
}
