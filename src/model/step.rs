//! One step of the decoder: T rows of any mix of sequences, prompts and adapters.

use crate::adapter::pool::AdapterPool;
use crate::adapter::sites::{EndSites, LayerSites};
use crate::checkpoint::MlpKind;
use crate::error::Result;
use crate::kernels::activation::Activate;
use crate::kernels::attention::Attention;
use crate::kernels::count::Count;
use crate::kernels::dense_gemm::Cut;
use crate::kernels::embed::Embed;
use crate::kernels::expand_norm::{self, ExpandNorm};
use crate::kernels::lora::LoraSite;
use crate::kernels::norm::Norm;
use crate::kernels::norm_pack;
use crate::kernels::operands::Weights;
use crate::kernels::pack::Reads;
use crate::kernels::pair_shrink::Shrunk;
use crate::kernels::rope::{AttentionShape, Heads, Rope};
use crate::kernels::{Recording, View};
use crate::layer::{Adapters, Dense, LoraBatch, MoeTensors};
use crate::model::dispatch::add_returned;
use crate::model::{Commands, DecoderLayer, KvCache, Mlp, Model};
use crate::plan::attention::AttentionWork;
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::DEPTH_PARTS;

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
    /// u32 `[layers, E]`: choices of experts are added to it; `None`: nobody asked.
    pub routing_counts: Option<&'a View>,
    /// How attention shares out the rows.
    pub work: &'a AttentionWork,
    /// Its table on the device.
    pub attention_items: &'a View,
    /// Cached positions that all rows together attend to.
    pub attended: u64,
    /// Where tokens are sent to other ranks. T may then be 0.
    pub dispatch: Option<StepDispatch>,
}

/// What a step needs besides where tokens are sent to other ranks.
pub struct StepDispatch {
    /// `[T]`: the adapter of each row by its global id, 0 for none.
    pub adapters: Vec<u64>,
    /// The adapters of the whole step, on all ranks: global id and slot on this one.
    pub slots: Vec<(u64, usize)>,
    /// f32 `[T]`, ones.
    pub ones: View,
    /// i32 `[T]`, zeros.
    pub zeros: View,
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

    /// Multiply-accumulates of attention and MLP of one layer for one row, adapters and attended positions not counted.
    fn layer_macs(&self, layer: usize) -> [u64; 2] {
        let (c, heads) = (&self.config, &self.share.heads);
        let attention = 2 * c.hidden * (heads.q_range().len() + heads.kv_range().len());
        let mlp = match c.layers[layer] {
            MlpKind::Experts => c.moe.top_k * 3 * c.hidden * c.moe.expert_width + c.hidden * c.moe.experts,
            MlpKind::Dense => 3 * c.hidden * c.dense_width,
        };
        [attention as u64, mlp as u64]
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
        let embedded = |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>| {
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
            let batch = batch.prepare(rec, pass, t.rows, sites.chain(embedding), t.status)?;
            if let Some((sites, factors)) = ends {
                let tables = [t.row_table, t.last_ids];
                batch.record_embedding(rec, pass, &sites.embedding, factors, t.rows, tables, &hidden)?;
            }
            Ok(Some(batch))
        };
        if t.rows > 0 {
            t.lora = commands.pass(rec, "embed", 0, embedded)?;
        }
        let attended = t.attended * (2 * self.share.heads.q_range().len()) as u64;
        let n_bytes = (t.rows * d * 4) as u64;
        // Only where tokens are dispatched: what `hidden` still lacks of the layer before.
        let mut returned = None;
        for (layer, weights) in self.layers.iter().enumerate() {
            let row_macs = self.layer_macs(layer);
            let [attention, mlp] = row_macs.map(|macs| macs * t.rows as u64);
            let attention = attention + attended;
            let step = LayerStep { model: self, layer, weights, cache, pool, t: &t, hidden: &hidden };
            if let Some(dispatch) = &t.dispatch {
                returned = step.record_dispatched(commands, rec, dispatch, returned, [attention, row_macs[1]])?;
                continue;
            }
            let residual = commands.adds_residual();
            if self.share.heads.is_whole() {
                commands.pass(rec, "layer", attention + mlp, |rec, pass| {
                    let lacks = step.record_attention(rec, pass, true, true)?;
                    step.record_mlp(rec, pass, residual, lacks.as_ref())
                })?;
            } else {
                commands
                    .pass(rec, "attention", attention, |rec, pass| step.record_attention(rec, pass, residual, false))?;
                commands.sum(rec, &hidden, n_bytes)?;
                commands.pass(rec, "mlp", mlp, |rec, pass| step.record_mlp(rec, pass, residual, None))?;
            }
            if matches!(weights.mlp, Mlp::Experts(_)) {
                commands.sum(rec, &hidden, n_bytes)?;
            }
        }
        if t.logit_rows == 0 {
            return Ok(None);
        }
        let macs = (t.logit_rows * d * c.vocab) as u64;
        let lora = t.lora_head.take();
        commands.pass(rec, "lm_head", macs, |rec, pass| {
            if let (Some(dispatch), Some(returned)) = (&t.dispatch, &returned) {
                add_returned(rec, pass, &t, dispatch, returned, &hidden, d)?;
            }
            let x = rec.scratch("final x", (t.logit_rows * d * 4) as u64)?;
            let (rows, width, eps, weight) = (t.logit_rows, d, c.rms_eps, &self.final_norm);
            let norm = Norm { rows, width, eps, x: &hidden, weight, gather: Some(t.logit_gather), out: &x };
            let logits = rec.scratch("logits", (t.logit_rows * c.vocab * 4) as u64)?;
            let adapters = match lora.zip(pool.ends()) {
                None => None,
                Some((batch, (EndSites { lm_head: site, .. }, factors))) => {
                    Some((batch.prepare(rec, pass, t.logit_rows, std::iter::once(site), t.status)?, site, factors))
                }
            };
            let adapters = adapters.as_ref().map(|(batch, site, factors)| (batch, *site, *factors));
            let reads = Dense::reads(rec.gpu().capabilities(), t.logit_rows, self.head(), adapters, false);
            let packed = norm.record_for(rec, pass, &reads, None)?;
            Dense {
                tokens: t.logit_rows,
                x: &x,
                packed: packed.as_ref(),
                weights: self.head(),
                adapters,
                y: &logits,
                parts: 1,
                accumulate: false,
                exact: false,
                status: t.status,
            }
            .record(rec, pass)?;
            Ok(Some(logits))
        })
    }
}

/// What `hidden` still lacks of the output projection, for the norm behind it to add.
pub(super) enum Lacks {
    /// The adapters of few rows.
    Adapters(Shrunk),
    /// All of it, f32 `[`[`DEPTH_PARTS`]`, T, D]`.
    Parts(View),
}

/// One layer of a step.
pub(super) struct LayerStep<'a> {
    pub model: &'a Model,
    pub layer: usize,
    pub weights: &'a DecoderLayer,
    pub cache: &'a KvCache,
    pub pool: &'a AdapterPool,
    pub t: &'a StepTensors<'a>,
    /// f32 `[T, D]`.
    pub hidden: &'a View,
}

impl LayerStep<'_> {
    /// Attention of this rank's heads, in the place of `hidden`: added to it with `residual`, otherwise alone. Where the norm of
    /// [`record_mlp`](Self::record_mlp) is `next`, it may be left to add something: what is returned.
    pub fn record_attention(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        residual: bool,
        next: bool,
    ) -> Result<Option<Lacks>> {
        let Self { model, weights: w, t, hidden, .. } = *self;
        let (c, heads) = (&model.config, &model.share.heads);
        let d = c.hidden;
        let (sites, _) = self.pool.layer(self.layer);
        let q_width = heads.q_range().len();
        let qkv_width = q_width + 2 * heads.kv_range().len();
        let x = rec.scratch("x", (t.rows * d * 4) as u64)?;
        let reads = self.reads(rec.gpu().capabilities(), &w.qkv, &sites.qkv);
        let packed = self.norm(&w.input_norm, &x).record_for(rec, pass, &reads, None)?;
        let projected = self.project(rec, pass, &x)?;
        let parts = match &projected {
            None => self.parts(rec.gpu().capabilities(), &w.qkv),
            Some(_) => 1,
        };
        let (qkv, q) = match &projected {
            Some((heads, _)) => (heads.qkv.clone(), heads.q.clone()),
            None => {
                let qkv = rec.scratch("qkv", (parts * t.rows * qkv_width * 4) as u64)?;
                let packed = packed.as_ref();
                Dense { packed, parts, ..self.dense(&x, &w.qkv, &sites.qkv, &qkv, false) }.record(rec, pass)?;
                (qkv, rec.scratch("q", (t.rows * q_width * 4) as u64)?)
            }
        };
        let (k_cache, v_cache) = &self.cache.layers[self.layer];
        Rope {
            rows: t.rows,
            shape: t.attention,
            eps: c.rms_eps,
            qkv: &qkv,
            parts,
            norms: &w.head_norms,
            table: t.rotary,
            row_table: t.row_table,
            blocks: t.blocks,
            q: &q,
            k_cache,
            v_cache,
            adapters: projected.as_ref().map(|(heads, shrunk)| (heads, shrunk)),
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
            work: t.work,
            items: t.attention_items,
            out: &attended,
        }
        .record(rec, pass)?;
        let o = self.dense(&attended, &w.o, &sites.o, hidden, residual);
        if next {
            let u = |rec: &mut Recording, max_rank: usize| {
                let adds = expand_norm::adds(rec.gpu().capabilities(), max_rank);
                adds.then(|| rec.scratch("lora u", (t.rows * (4 + max_rank.next_multiple_of(8)) * 4) as u64))
                    .transpose()
            };
            if let Some(lacks) = o.record_shrink(rec, pass, u)? {
                return Ok(Some(Lacks::Adapters(lacks)));
            }
            let caps = rec.gpu().capabilities();
            let added = || norm_pack::holds(caps, d) && self.mlp_reads(caps).packed.is_some();
            if self.parts(caps, &w.o) == DEPTH_PARTS && added() {
                let y = rec.scratch("o in parts", (DEPTH_PARTS * t.rows * d * 4) as u64)?;
                Dense { y: &y, parts: DEPTH_PARTS, accumulate: false, ..o }.record(rec, pass)?;
                return Ok(Some(Lacks::Parts(y)));
            }
        }
        o.record(rec, pass)?;
        Ok(None)
    }

    /// q, k and v of rows that are few, with adapters that the next stage adds; `None`, and nothing is recorded, where there are
    /// none or it does not.
    fn project(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        x: &View,
    ) -> Result<Option<(Heads, Shrunk)>> {
        let Self { weights: w, t, .. } = *self;
        let (sites, factors) = self.pool.layer(self.layer);
        let (site, caps) = (&sites.qkv, rec.gpu().capabilities());
        let Some(batch) = t.lora.as_ref().filter(|batch| batch.adapts(site, factors)) else { return Ok(None) };
        // Room is made only for heads that lack something.
        if Cut::of(caps, t.rows, w.qkv.out_dim, w.qkv.in_dim).is_none()
            || !Heads::fit(caps, t.rows, &t.attention, batch.max_rank)
        {
            return Ok(None);
        }
        let heads = Heads::scratch(rec, t.rows, &t.attention, batch.max_rank)?;
        let qkv = self.dense(x, &w.qkv, site, &heads.qkv, false);
        let shrunk = qkv.record_shrink(rec, pass, |_, _| Ok(Some(heads.u.clone())))?;
        Ok(shrunk.map(|shrunk| (heads, shrunk)))
    }

    /// The MLP, or this rank's experts. Those are put in the place of `hidden`: added to it with `residual`, otherwise alone.
    /// What `hidden` lacks is added to it.
    pub fn record_mlp(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        residual: bool,
        lacks: Option<&Lacks>,
    ) -> Result<()> {
        let Self { model, weights: w, t, hidden, .. } = *self;
        let c = &model.config;
        let d = c.hidden;
        let (sites, _) = self.pool.layer(self.layer);
        let x = rec.scratch("x", (t.rows * d * 4) as u64)?;
        let normed = |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, reads: &Reads| match lacks {
            None => self.norm(&w.mlp_norm, &x).record_for(rec, pass, reads, None),
            Some(Lacks::Parts(parts)) => self.norm(&w.mlp_norm, &x).record_for(rec, pass, reads, Some(parts)),
            // Of few rows, which hardly anybody reads packed.
            Some(Lacks::Adapters(adapters)) => {
                let (rows, width, eps, weight) = (t.rows, d, c.rms_eps, &w.mlp_norm);
                ExpandNorm { rows, width, eps, x: hidden, weight, adapters, out: &x }.record(rec, pass)?;
                Ok(None)
            }
        };
        match &w.mlp {
            Mlp::Experts(moe) => {
                let tensors = MoeTensors { accumulate: residual, ..self.tensors(&x) };
                let packed = normed(rec, pass, &self.mlp_reads(rec.gpu().capabilities()))?;
                let routed = moe.record_rows(rec, pass, &tensors, packed.as_ref())?;
                if let Some(counts) = t.routing_counts {
                    let (valid_pairs, experts, topk_ids) = (t.rows * c.moe.top_k, c.moe.experts, &routed.topk_ids);
                    Count { valid_pairs, experts, layer: self.layer, topk_ids, counts }.record(rec, pass)?;
                }
                Ok(())
            }
            Mlp::Dense { gate_up, down } => {
                let f = c.dense_width;
                let packed = &normed(rec, pass, &self.mlp_reads(rec.gpu().capabilities()))?;
                let both = rec.scratch("dense gate_up", (t.rows * 2 * f * 4) as u64)?;
                let product = self.dense(&x, gate_up, &sites.gate_up, &both, false);
                Dense { packed: packed.as_ref(), ..product }.record(rec, pass)?;
                let h = rec.scratch("dense h", (t.rows * f * 4) as u64)?;
                let kind = crate::activation::Activation::Silu;
                Activate { rows: t.rows, width: f, kind, gate_up: &both, ids: None, h: &h }.record(rec, pass)?;
                self.dense(&h, down, &sites.down, hidden, true).record(rec, pass)
            }
        }
    }

    /// y = W·x for every row, or y += W·x, and what each row's adapter changes at `site`.
    fn dense<'b>(
        &'b self,
        x: &'b View,
        weights: &'b Weights,
        site: &'b LoraSite,
        y: &'b View,
        accumulate: bool,
    ) -> Dense<'b> {
        let (tokens, status, exact, adapters) = (self.t.rows, self.t.status, false, self.adapters(site));
        Dense { tokens, x, packed: None, weights, adapters, y, parts: 1, accumulate, exact, status }
    }

    /// Parts of the depth of a product of attention, for a reader that adds them up.
    fn parts(&self, caps: &Capabilities, weights: &Weights) -> usize {
        let parts = Dense::parts(caps, self.t.rows, weights, false);
        let fits = (parts * self.t.rows * weights.out_dim * 4) as u64 <= caps.max_binding_bytes;
        if fits { parts } else { 1 }
    }

    /// In which forms such a product reads x.
    fn reads(&self, caps: &Capabilities, weights: &Weights, site: &LoraSite) -> Reads {
        Dense::reads(caps, self.t.rows, weights, self.adapters(site), false)
    }

    /// In which forms the MLP reads x.
    fn mlp_reads(&self, caps: &Capabilities) -> Reads {
        match &self.weights.mlp {
            Mlp::Experts(moe) => moe.reads(caps, &self.tensors(self.hidden)),
            Mlp::Dense { gate_up, .. } => self.reads(caps, gate_up, &self.pool.layer(self.layer).0.gate_up),
        }
    }

    /// The tensors of the experts, with `x`.
    fn tensors<'b>(&'b self, x: &'b View) -> MoeTensors<'b> {
        let (sites, factors) = self.pool.layer(self.layer);
        let (tokens, status) = (self.t.rows, self.t.status);
        let lora = self.t.lora.as_ref().map(|batch| (batch, sites, factors));
        MoeTensors { tokens, x, out: self.hidden, accumulate: false, status, lora }
    }

    /// The adapters of the batch at a site of this layer.
    fn adapters<'b>(&'b self, site: &'b LoraSite) -> Option<Adapters<'b>> {
        let factors = self.pool.layer(self.layer).1;
        self.t.lora.as_ref().map(|batch| (batch, site, factors))
    }

    /// The norm of `hidden`.
    pub fn norm<'b>(&'b self, weight: &'b View, out: &'b View) -> Norm<'b> {
        let c = &self.model.config;
        let (rows, width, eps, x) = (self.t.rows, c.hidden, c.rms_eps, self.hidden);
        Norm { rows, width, eps, x, weight, gather: None, out }
    }
}
