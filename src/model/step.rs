//! One step of the decoder: T rows of any mix of sequences, prompts and adapters.

use crate::adapter::pool::AdapterPool;
use crate::adapter::sites::{EndSites, LayerSites};
use crate::checkpoint::MlpKind;
use crate::error::Result;
use crate::kernels::activation::{Activate, Hidden};
use crate::kernels::attention::Attention;
use crate::kernels::embed::Embed;
use crate::kernels::expert_gemm::{ExpertGemm, Rows};
use crate::kernels::norm::Norm;
use crate::kernels::rope::{AttentionShape, Rope};
use crate::kernels::{Recording, View};
use crate::layer::{LoraBatch, MoeTensors};
use crate::model::{Commands, DecoderLayer, KvCache, Mlp, Model};

/// What a step works on.
pub struct StepTensors<'a> {
    /// T.
    pub rows: usize,
    /// i32 `[T, 4]`: token or -1, position, sequence, slot.
    pub row_table: &'a View,
    /// i32 `[sequences]`: last sampled ids.
    pub last_ids: &'a View,
    /// u32 `[sequences, max_blocks]`.
    pub blocks: &'a View,
    /// Rotary table.
    pub rotary: &'a View,
    /// Heads and cache layout.
    pub attention: AttentionShape,
    /// Rows whose logits are wanted: u32 `[logit_rows]`.
    pub logit_gather: &'a View,
    /// Number of them.
    pub logit_rows: usize,
    /// u32 `[1]`.
    pub status: &'a View,
    /// Adapters of the batch; `None` when no row has one.
    pub lora: Option<LoraBatch>,
    /// Some adapter of the batch changes the embedding.
    pub lora_embedding: bool,
    /// The adapters of the rows whose logits are wanted, by those rows; `None` when none of them changes the LM head.
    pub lora_head: Option<LoraBatch>,
    /// Cached positions that all rows together attend to.
    pub attended: u64,
}

impl Model {
    /// The adapter sites of every layer for `slots` slots.
    pub(crate) fn sites(&self, slots: usize) -> Vec<LayerSites> {
        self.config.layers.iter().map(|kind| LayerSites::new(&self.config, *kind, &self.share, slots)).collect()
    }

    /// The adapter sites outside the layers.
    pub(crate) fn end_sites(&self, slots: usize) -> EndSites {
        EndSites::new(&self.config, slots)
    }

    /// Multiply-accumulates of one layer for one row, adapters not counted.
    fn layer_macs(&self, layer: usize) -> u64 {
        let c = &self.config;
        let attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads);
        let mlp = match c.layers[layer] {
            MlpKind::Experts => c.moe.top_k * 3 * c.hidden * c.moe.expert_width + c.hidden * c.moe.experts,
            MlpKind::Dense => 3 * c.hidden * c.dense_width,
        };
        (attention + mlp) as u64
    }

    /// Records a whole step and returns the logits, f32 `[logit_rows, vocab]` (`None` without wanted rows).
    ///
    /// # Errors
    /// When the device refuses a shader or has no room for scratch.
    pub fn record(
        &self,
        commands: &mut Commands<'_>,
        rec: &mut Recording,
        cache: &KvCache,
        pool: &AdapterPool,
        mut t: StepTensors<'_>,
    ) -> Result<Option<View>> {
        let c = &self.config;
        let d = c.hidden;
        let hidden = rec.scratch("hidden", (t.rows * d * 4) as u64)?;
        t.lora = commands.pass(rec, "embed", 0, |rec, pass| {
            let embed = Embed {
                rows: t.rows,
                row_table: t.row_table,
                last_ids: t.last_ids,
                table: &self.embedding,
                hidden: &hidden,
            };
            embed.record(rec, pass)?;
            let Some(batch) = t.lora.take() else { return Ok(None) };
            let ends = pool.ends().filter(|_| t.lora_embedding);
            let sites = (0..self.layers.len()).flat_map(|layer| {
                let sites = pool.layer(layer).0;
                let dense = sites.router.is_none();
                let mlp = [&sites.gate_up, &sites.down].into_iter().filter(move |_| dense);
                [&sites.qkv, &sites.o].into_iter().chain(&sites.router).chain(mlp)
            });
            let embedding = ends.map(|(sites, _)| &sites.embedding);
            let batch = batch.prepare(rec, pass, t.rows, sites.chain(embedding))?;
            if let Some((sites, factors)) = ends {
                let tables = [t.row_table, t.last_ids];
                batch.record_embedding(rec, pass, &sites.embedding, factors, t.rows, tables, &hidden)?;
            }
            Ok(Some(batch))
        })?;
        let attention = t.attended * (2 * c.heads * c.head_dim) as u64;
        for (layer, weights) in self.layers.iter().enumerate() {
            let macs = self.layer_macs(layer) * t.rows as u64 + attention;
            let residual = commands.adds_residual();
            commands.pass(rec, "layer", macs, |rec, pass| {
                self.record_layer(rec, pass, layer, weights, cache, pool, &t, &hidden, residual)
            })?;
            if matches!(weights.mlp, Mlp::Experts(_)) {
                commands.sum(rec, &hidden, (t.rows * d * 4) as u64)?;
            }
        }
        if t.logit_rows == 0 {
            return Ok(None);
        }
        let macs = (t.logit_rows * d * c.vocab) as u64;
        let lora = t.lora_head.take();
        commands.pass(rec, "lm_head", macs, |rec, pass| {
            let x = rec.scratch("final x", (t.logit_rows * d * 4) as u64)?;
            let norm = Norm {
                rows: t.logit_rows,
                width: d,
                eps: c.rms_eps,
                x: &hidden,
                weight: &self.final_norm,
                gather: Some(t.logit_gather),
                out: &x,
            };
            norm.record(rec, pass)?;
            let logits = rec.scratch("logits", (t.logit_rows * c.vocab * 4) as u64)?;
            let product = ExpertGemm {
                rows: t.logit_rows,
                row_div: 1,
                select: Rows::Dense,
                x: &x,
                weights: self.head(),
                y: &logits,
                y_stride: c.vocab,
                accumulate: false,
                exact: false,
            };
            product.record(rec, pass)?;
            if let Some((batch, (sites, factors))) = lora.zip(pool.ends()) {
                let site = &sites.lm_head;
                let batch = batch.prepare(rec, pass, t.logit_rows, std::iter::once(site))?;
                batch.record_dense(rec, pass, site, factors, t.logit_rows, &x, &logits)?;
            }
            Ok(Some(logits))
        })
    }

    #[allow(clippy::too_many_arguments, reason = "the arguments are the layer's operands")]
    fn record_layer(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        layer: usize,
        w: &DecoderLayer,
        cache: &KvCache,
        pool: &AdapterPool,
        t: &StepTensors<'_>,
        hidden: &View,
        residual: bool,
    ) -> Result<()> {
        let c = &self.config;
        let d = c.hidden;
        let (sites, factors) = pool.layer(layer);
        let q_width = c.heads * c.head_dim;
        let qkv_width = q_width + 2 * c.kv_heads * c.head_dim;
        let dense = |rec: &mut Recording,
                     pass: &mut wgpu::ComputePass<'_>,
                     x: &View,
                     weights,
                     y: &View,
                     y_stride,
                     accumulate| {
            let (rows, row_div, select, exact) = (t.rows, 1, Rows::Dense, false);
            ExpertGemm { rows, row_div, select, x, weights, y, y_stride, accumulate, exact }.record(rec, pass)
        };
        let adapt = |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, site, x: &View, y: &View| match &t.lora {
            Some(batch) => batch.record_dense(rec, pass, site, factors, t.rows, x, y),
            None => Ok(()),
        };
        let norm = |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, weight, out: &View| {
            Norm { rows: t.rows, width: d, eps: c.rms_eps, x: hidden, weight, gather: None, out }.record(rec, pass)
        };

        // Attention.
        let x = rec.scratch("x", (t.rows * d * 4) as u64)?;
        norm(rec, pass, &w.input_norm, &x)?;
        let qkv = rec.scratch("qkv", (t.rows * qkv_width * 4) as u64)?;
        dense(rec, pass, &x, &w.qkv, &qkv, qkv_width, false)?;
        adapt(rec, pass, &sites.qkv, &x, &qkv)?;
        let q = rec.scratch("q", (t.rows * q_width * 4) as u64)?;
        let (k_cache, v_cache) = &cache.layers[layer];
        Rope {
            rows: t.rows,
            shape: t.attention,
            eps: c.rms_eps,
            qkv: &qkv,
            norms: &w.head_norms,
            table: t.rotary,
            row_table: t.row_table,
            blocks: t.blocks,
            q: &q,
            k_cache,
            v_cache,
        }
        .record(rec, pass)?;
        let attended = rec.scratch("attended", (t.rows * q_width * 4) as u64)?;
        Attention {
            rows: t.rows,
            shape: t.attention,
            q: &q,
            k_cache,
            v_cache,
            row_table: t.row_table,
            blocks: t.blocks,
            out: &attended,
        }
        .record(rec, pass)?;
        dense(rec, pass, &attended, &w.o, hidden, d, true)?;
        adapt(rec, pass, &sites.o, &attended, hidden)?;

        // MLP.
        norm(rec, pass, &w.mlp_norm, &x)?;
        match &w.mlp {
            Mlp::Experts(moe) => {
                let lora = t.lora.as_ref().map(|batch| (batch, sites, factors));
                moe.record(
                    rec,
                    pass,
                    &MoeTensors { tokens: t.rows, x: &x, out: hidden, accumulate: residual, status: t.status, lora },
                )
            }
            Mlp::Dense { gate_up, down } => {
                let f = c.dense_width;
                let both = rec.scratch("dense gate_up", (t.rows * 2 * f * 4) as u64)?;
                dense(rec, pass, &x, gate_up, &both, 2 * f, false)?;
                adapt(rec, pass, &sites.gate_up, &x, &both)?;
                let h = rec.scratch("dense h", (t.rows * f * 4) as u64)?;
                let kind = crate::activation::Activation::Silu;
                Activate { rows: t.rows, width: f, kind, gate_up: &both, ids: None, h: Hidden::Plain(&h) }
                    .record(rec, pass)?;
                dense(rec, pass, &h, down, hidden, d, true)?;
                adapt(rec, pass, &sites.down, &h, hidden)
            }
        }
    }
}
