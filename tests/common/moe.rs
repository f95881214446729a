//! A small mixture-of-experts layer on the device and in the oracle, with adapters of any sites, ranks and types.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use wgmoe::activation::Activation;
use wgmoe::adapter::pool::{AdapterId, AdapterPool, PoolOptions};
use wgmoe::adapter::sites::LayerSites;
use wgmoe::adapter::{Factor, Matrix, Site};
use wgmoe::checkpoint::MlpKind;
use wgmoe::dtype::DType;
use wgmoe::kernels::localise::Owners;
use wgmoe::kernels::{Recording, View};
use wgmoe::layer::{LoraBatch, MoeTensors};
use wgmoe::placement::{ExpertShare, Placement, RankShare};
use wgmoe::reference::{self, MoeOutput};
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;
use wgmoe::{Adapter, Gpu, ModelConfig, MoeLayer};

use crate::common::{Rng, UNWRITTEN_I32};
use crate::gpu_run::{Output, run_in, upload, weights};

pub const SHAPE: MoeShape = MoeShape { experts: 8, top_k: 3, hidden: 24, expert_width: 16 };
/// Every scratch buffer of a layer, and words that are enough for each.
const SCRATCH: [&str; 27] = [
    "router logits",
    "topk_ids",
    "topk",
    "topk_weights",
    "local_ids",
    "quotas",
    "virtual_topk_ids",
    "lora_mask",
    "gate_up",
    "expert h",
    "expert y",
    "packed x",
    "packed x in blocks",
    "adapter runs",
    "adapter chunks",
    "expert chunks",
    "packed h",
    "lora u",
    "pair sums",
    "packed",
    "packed blocks",
    "x in blocks",
    "h in blocks",
    "u in blocks",
    "expert tiles",
    "virtual tiles",
    "adapter tiles",
];
const SCRATCH_WORDS: usize = 3 << 16;

/// Site, global expert, scale, A, B and bias of one factor.
type Decoded = (Site, usize, f32, Vec<f32>, Vec<f32>, Option<Vec<f32>>);

/// One layer, twice.
pub struct Twin {
    pub shape: MoeShape,
    pub device: MoeLayer,
    pub share: ExpertShare,
    pub router: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

impl Twin {
    /// A layer of [`SHAPE`] with experts in their whole width.
    pub fn new(gpu: &Gpu, dtype: DType, placement: Placement) -> Self {
        Self::of(gpu, dtype, SHAPE, ExpertShare::of(placement, SHAPE.expert_width))
    }

    /// The part `share` of a layer of any shape. The oracle's weights are cut to the experts only.
    pub fn of(gpu: &Gpu, dtype: DType, shape: MoeShape, share: ExpertShare) -> Self {
        let MoeShape { experts: e, hidden: d, expert_width: f, .. } = shape;
        let (owned, mut rng) = (share.placement().owned(), Rng::new(61));
        // Every rank draws all experts and keeps its own.
        let mut draw = |all: usize, kept: &[usize], size: usize| -> Vec<f32> {
            let values: Vec<f32> = rng.floats(all * size).iter().map(|v| v * 0.5).collect();
            kept.iter().flat_map(|e| values[e * size..(e + 1) * size].to_vec()).collect()
        };
        let (router, gate_up, down) = (draw(1, &[0], e * d), draw(e, &owned, 2 * f * d), draw(e, &owned, d * f));
        // gate, up and down in the columns of this rank, then zeros.
        let (columns, width) = (share.width(), share.padded_width());
        let mut halves = Vec::new();
        for half in gate_up.chunks(f * d) {
            halves.extend_from_slice(&half[columns.start * d..columns.end * d]);
            halves.resize(halves.len() + (width - columns.len()) * d, 0.0);
        }
        let mut rows = Vec::new();
        for row in down.chunks(f) {
            rows.extend_from_slice(&row[columns.clone()]);
            rows.resize(rows.len() + width - columns.len(), 0.0);
        }
        let n = owned.len();
        let decoded = |values: &[f32]| dtype.decode(&dtype.encode(values));
        let device = MoeLayer {
            shape,
            experts: n,
            width,
            owners: Owners::upload(gpu, share.placement()).unwrap(),
            router: weights(gpu, dtype, [1, e, d], &router, u64::MAX).0,
            options: RouteOptions::default(),
            gate_up: weights(gpu, dtype, [n, 2 * width, d], &halves, u64::MAX).0,
            down: weights(gpu, dtype, [n, d, width], &rows, u64::MAX).0,
            activation: Activation::Silu,
        };
        let [router, gate_up, down] = [router, gate_up, down].map(|values| decoded(&values));
        Self { shape, device, share, router, gate_up, down }
    }

    /// What a pool for this layer alone is made of.
    pub fn pool_options(&self, slots: usize) -> PoolOptions {
        let sites = LayerSites::new(&config(self.shape), MlpKind::Experts, &rank_share(self.shape, &self.share), slots);
        PoolOptions { layers: vec![(sites, Some(self.share.clone()))], ends: None, slots, budget: None }
    }

    /// An empty pool for this layer alone.
    pub fn pool(&self, gpu: &Gpu, slots: usize) -> AdapterPool {
        AdapterPool::with_options(gpu, self.pool_options(slots)).unwrap()
    }

    /// The oracle; `adapters[slot]` is what the slot holds.
    pub fn expected(&self, x: &[f32], mapping: &[i32], adapters: &[Option<&Adapter>]) -> MoeOutput {
        let layer = reference::MoeLayer {
            shape: self.shape,
            options: self.device.options,
            activation: self.device.activation,
            placement: self.share.placement(),
            router: &self.router,
            router_bias: None,
            gate_up: &self.gate_up,
            gate_up_bias: None,
            down: &self.down,
            down_bias: None,
        };
        let owned = self.share.placement().owned();
        let decoded: Vec<Vec<Decoded>> = adapters
            .iter()
            .map(|adapter| {
                let factors = adapter.iter().flat_map(|a| &a.factors);
                factors
                    .map(|f| {
                        let values = |m: &Matrix| m.dtype.decode(&m.bytes);
                        (f.site, f.expert, f.scale, values(&f.a), values(&f.b), f.bias.as_deref().map(values))
                    })
                    .collect()
            })
            .collect();
        let factors = |site: Site, v: usize| {
            let (slot, expert) = (v / owned.len(), owned[v % owned.len()]);
            let (_, _, scale, a, b, bias) = decoded[slot].iter().find(|(s, e, ..)| (*s, *e) == (site, expert))?;
            let inner = if site == Site::ExpertDown { self.shape.expert_width } else { self.shape.hidden };
            Some(reference::Factors { rank: a.len() / inner, scale: *scale, a, b, bias: bias.as_deref() })
        };
        reference::moe_layer(&layer, x, mapping, adapters.len(), &factors)
    }
}

/// What every test gives a layer: tokens, the slot of each, and the residual.
pub struct Batch {
    pub x: Vec<f32>,
    pub mapping: Vec<i32>,
    pub residual: Option<Vec<f32>>,
}

/// A batch on the device, to be recorded once.
pub struct OnDevice {
    x: View,
    mapping: View,
    out: Output<f32>,
    status: Output<u32>,
    tokens: usize,
    accumulate: bool,
    slots: Vec<i32>,
    everyone: bool,
}

impl OnDevice {
    pub fn new(gpu: &Gpu, batch: &Batch) -> Self {
        let tokens = batch.mapping.len();
        let unwritten = vec![f32::NAN; batch.x.len()];
        let mut slots: Vec<i32> = batch.mapping.iter().copied().filter(|s| *s >= 0).collect();
        slots.sort_unstable();
        slots.dedup();
        Self {
            x: upload(gpu, &batch.x),
            mapping: upload(gpu, &batch.mapping),
            out: Output::of(gpu, batch.residual.as_ref().unwrap_or(&unwritten), f32::NAN),
            status: Output::new(gpu, 1, 0),
            tokens,
            accumulate: batch.residual.is_some(),
            slots,
            everyone: batch.mapping.iter().all(|s| *s >= 0),
        }
    }

    /// Records the layer as the decoder does; without a pool, no adapter stage runs.
    pub fn record(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        layer: &MoeLayer,
        pool: Option<&AdapterPool>,
    ) -> wgmoe::Result<()> {
        let lora = match pool {
            None => None,
            Some(pool) => {
                let (sites, factors) = pool.layer(0);
                let held = || self.slots.iter().map(|s| *s as usize).filter(|s| *s < pool.slots());
                let batch = LoraBatch {
                    token_lora_mapping: self.mapping.clone(),
                    slots: pool.slots(),
                    used: held().collect(),
                    max_rank: held().map(|s| pool.max_rank(s)).max().unwrap_or(0),
                    folds: held().all(|s| pool.folds(s)),
                    reach: held().map(|s| pool.reach(s)).fold(0.0, f32::max),
                    everyone: self.everyone && self.slots.iter().all(|s| (*s as usize) < pool.slots()),
                    aligned: None,
                    chunks: None,
                    matrix_runs: None,
                };
                Some((batch.prepare(rec, pass, self.tokens, sites.router.iter(), &self.status.view)?, sites, factors))
            }
        };
        let tensors = MoeTensors {
            tokens: self.tokens,
            x: &self.x,
            out: &self.out.view,
            accumulate: self.accumulate,
            status: &self.status.view,
            lora: lora.as_ref().map(|(batch, sites, factors)| (batch, *sites, *factors)),
        };
        layer.record(rec, pass, &tensors)?;
        Ok(())
    }

    /// Where the output and the status word lie.
    pub fn results(&self) -> [&View; 2] {
        [&self.out.view, &self.status.view]
    }

    pub fn read(&self, gpu: &Gpu) -> (Vec<f32>, u32) {
        (self.out.read(gpu), self.status.read(gpu)[0])
    }
}

/// A recording whose scratch holds 0x7fffffff everywhere: no id, and NaN as a float.
pub fn poisoned(gpu: &Gpu) -> Recording {
    let mut rec = Recording::new(gpu);
    let words = SCRATCH_WORDS.min(gpu.capabilities().max_binding_bytes as usize / 4);
    for label in SCRATCH.into_iter().chain(["align counts", "align places"]) {
        let scratch = rec.scratch(label, words as u64 * 4).unwrap();
        gpu.queue().write_buffer(&scratch.buffer, 0, bytemuck::cast_slice(&vec![UNWRITTEN_I32; words]));
    }
    rec
}

/// One batch through the layer: its output and status.
pub fn forward(gpu: &Gpu, layer: &MoeLayer, pool: Option<&AdapterPool>, batch: &Batch) -> (Vec<f32>, u32) {
    let on_device = OnDevice::new(gpu, batch);
    run_in(&mut poisoned(gpu), |rec, pass| on_device.record(rec, pass, layer, pool));
    on_device.read(gpu)
}

/// An adapter of layer 0 on `sites`, with a value of its own in every factor; with `fused`, gate and up share A.
pub fn adapter(seed: u64, rank: usize, dtype: DType, sites: &[Site], fused: bool) -> Adapter {
    adapter_of(SHAPE, seed, rank, dtype, sites, fused)
}

/// The same for a layer of any shape.
pub fn adapter_of(shape: MoeShape, seed: u64, rank: usize, dtype: DType, sites: &[Site], fused: bool) -> Adapter {
    let MoeShape { experts, hidden: d, expert_width: f, .. } = shape;
    let mut rng = Rng::new(seed);
    let mut matrix = |rows: usize, cols: usize| {
        let bytes = dtype.encode(&rng.floats(rows * cols));
        Arc::new(Matrix { dtype, rows, cols, bytes })
    };
    let mut factors: Vec<Factor> = Vec::new();
    for &site in sites {
        let (out, inner, n) = match site {
            Site::Router => (experts, d, 1),
            Site::ExpertGate | Site::ExpertUp => (f, d, experts),
            Site::ExpertDown => (d, f, experts),
            _ => (d, d, 1),
        };
        for expert in 0..n {
            let shared = factors
                .iter()
                .find(|f| fused && f.expert == expert && (f.site, site) == (Site::ExpertGate, Site::ExpertUp));
            let a = shared.map(|f| f.a.clone()).unwrap_or_else(|| matrix(rank, inner));
            let scale = 0.5 / rank as f32;
            factors.push(Factor { layer: 0, site, expert, rank, scale, a, b: matrix(out, rank), bias: None });
        }
    }
    factors.sort_by_key(Factor::place);
    Adapter { path: PathBuf::new(), factors, bytes_read: 0, share: None }
}

/// A model of layers of this shape.
fn config(shape: MoeShape) -> ModelConfig {
    let mut config = ModelConfig::open(Path::new("tests/data/tiny/qwen3_moe")).unwrap();
    (config.hidden, config.moe) = (shape.hidden, shape);
    // Every attention projection is square.
    (config.heads, config.kv_heads, config.head_dim) = (1, 1, shape.hidden);
    config
}

/// `experts` beside all heads.
pub fn rank_share(shape: MoeShape, experts: &ExpertShare) -> RankShare {
    RankShare::of_experts(&config(shape), experts.clone())
}

/// The same adapter with a bias of `dtype` on every second factor.
pub fn biased(seed: u64, dtype: DType, mut adapter: Adapter) -> Adapter {
    let mut rng = Rng::new(seed);
    for f in adapter.factors.iter_mut().step_by(2) {
        let bytes = dtype.encode(&rng.floats(f.b.rows));
        f.bias = Some(Arc::new(Matrix { dtype, rows: f.b.rows, cols: 1, bytes }));
    }
    adapter
}

/// What a rank that holds `share` reads of an adapter for a layer of this shape.
pub fn cut(shape: MoeShape, adapter: &Adapter, share: &ExpertShare) -> Adapter {
    let columns = share.width();
    let part = |m: &Matrix, rows: Range<usize>, cols: Range<usize>| {
        let size = m.dtype.size();
        let row = |r: usize| &m.bytes[(r * m.cols + cols.start) * size..(r * m.cols + cols.end) * size];
        let bytes = rows.clone().flat_map(|r| row(r).to_vec()).collect();
        Arc::new(Matrix { dtype: m.dtype, rows: rows.len(), cols: cols.len(), bytes })
    };
    let of_expert = |site| matches!(site, Site::ExpertGate | Site::ExpertUp | Site::ExpertDown);
    let held = adapter.factors.iter().filter(|f| !of_expert(f.site) || share.placement().local(f.expert).is_some());
    let factors = held.map(|f| {
        let mut f = f.clone();
        match f.site {
            Site::ExpertDown => {
                f.a = part(&f.a, 0..f.a.rows, columns.clone());
                // The rank with the first columns adds it.
                f.bias = f.bias.filter(|_| columns.start == 0);
            }
            site if of_expert(site) => {
                f.b = part(&f.b, columns.clone(), 0..f.b.cols);
                f.bias = f.bias.map(|bias| part(&bias, columns.clone(), 0..1));
            }
            _ => {}
        }
        f
    });
    Adapter { factors: factors.collect(), share: Some(rank_share(shape, share)), ..adapter.clone() }
}

/// Makes an adapter resident and pins it.
pub fn pin(pool: &mut AdapterPool, number: u64, adapter: &Adapter) -> Option<usize> {
    pool.pin(AdapterId::new(number), adapter).unwrap()
}
