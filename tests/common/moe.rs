//! A small mixture-of-experts layer on the device and in the oracle, with adapters of any sites, ranks and types.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use wgmoe::activation::Activation;
use wgmoe::adapter::pool::{AdapterId, AdapterPool};
use wgmoe::adapter::sites::LayerSites;
use wgmoe::adapter::{Factor, Matrix, Site};
use wgmoe::checkpoint::MlpKind;
use wgmoe::dtype::DType;
use wgmoe::kernels::{Recording, View};
use wgmoe::layer::{LoraBatch, MoeTensors};
use wgmoe::placement::Placement;
use wgmoe::reference::{self, MoeOutput};
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;
use wgmoe::{Adapter, Gpu, ModelConfig, MoeLayer};

use crate::common::{Rng, UNWRITTEN_I32};
use crate::gpu_run::{Output, run_in, upload, weights};

pub const SHAPE: MoeShape = MoeShape { experts: 8, top_k: 3, hidden: 24, expert_width: 16 };
/// Every scratch buffer of a layer, and bytes that are enough for each.
const SCRATCH: [&str; 13] = [
    "router logits",
    "topk_ids",
    "topk_weights",
    "local_ids",
    "virtual_topk_ids",
    "lora_mask",
    "gate_up",
    "expert h",
    "expert y",
    "lora u",
    "expert tiles",
    "virtual tiles",
    "adapter tiles",
];
const SCRATCH_WORDS: usize = 1 << 15;

/// Site, global expert, scale, A and B of one factor.
type Decoded = (Site, usize, f32, Vec<f32>, Vec<f32>);

/// One layer, twice.
pub struct Twin {
    pub device: MoeLayer,
    pub placement: Placement,
    pub router: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

impl Twin {
    pub fn new(gpu: &Gpu, dtype: DType, placement: Placement) -> Self {
        let MoeShape { experts: e, hidden: d, expert_width: f, .. } = SHAPE;
        let (owned, mut rng) = (placement.owned(), Rng::new(61));
        let held = owned.len();
        // Every rank draws all experts and keeps its own.
        let mut stack = |all: usize, kept: &[usize], out: usize, inner: usize| {
            let values: Vec<f32> = rng.floats(all * out * inner).iter().map(|v| v * 0.5).collect();
            let kept_values: Vec<f32> =
                kept.iter().flat_map(|e| values[e * out * inner..(e + 1) * out * inner].to_vec()).collect();
            weights(gpu, dtype, [kept.len(), out, inner], &kept_values, u64::MAX)
        };
        let (router_weights, router) = stack(1, &[0], e, d);
        let (gate_up_weights, gate_up) = stack(e, &owned, 2 * f, d);
        let (down_weights, down) = stack(e, &owned, d, f);
        let device = MoeLayer {
            shape: SHAPE,
            experts: held,
            local_table: (!placement.is_identity()).then(|| upload(gpu, placement.local_table())),
            router: router_weights,
            options: RouteOptions::default(),
            gate_up: gate_up_weights,
            down: down_weights,
            activation: Activation::Silu,
        };
        Self { device, placement, router, gate_up, down }
    }

    /// An empty pool for this layer alone.
    pub fn pool(&self, gpu: &Gpu, slots: usize) -> AdapterPool {
        let mut config = ModelConfig::open(Path::new("tests/data/tiny/qwen3_moe")).unwrap();
        (config.hidden, config.moe) = (SHAPE.hidden, SHAPE);
        let sites = LayerSites::new(&config, MlpKind::Experts, self.device.experts, slots);
        AdapterPool::new(gpu, vec![(sites, Some(self.placement.clone()))], slots).unwrap()
    }

    /// The oracle; `adapters[slot]` is what the slot holds.
    pub fn expected(&self, x: &[f32], mapping: &[i32], adapters: &[Option<&Adapter>]) -> MoeOutput {
        let layer = reference::MoeLayer {
            shape: SHAPE,
            options: self.device.options,
            activation: self.device.activation,
            table: self.placement.local_table(),
            router: &self.router,
            router_bias: None,
            gate_up: &self.gate_up,
            gate_up_bias: None,
            down: &self.down,
            down_bias: None,
        };
        let owned = self.placement.owned();
        let decoded: Vec<Vec<Decoded>> = adapters
            .iter()
            .map(|adapter| {
                let factors = adapter.iter().flat_map(|a| &a.factors);
                factors
                    .map(|f| {
                        let values = |m: &Matrix| m.dtype.decode(&m.bytes);
                        (f.site, f.expert, f.scale, values(&f.a), values(&f.b))
                    })
                    .collect()
            })
            .collect();
        let factors = |site: Site, v: usize| {
            let (slot, expert) = (v / owned.len(), owned[v % owned.len()]);
            let (_, _, scale, a, b) = decoded[slot].iter().find(|(s, e, ..)| (*s, *e) == (site, expert))?;
            let inner = if site == Site::ExpertDown { SHAPE.expert_width } else { SHAPE.hidden };
            Some(reference::Factors { rank: a.len() / inner, scale: *scale, a, b })
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
}

impl OnDevice {
    pub fn new(gpu: &Gpu, batch: &Batch) -> Self {
        let tokens = batch.mapping.len();
        let unwritten = vec![f32::NAN; tokens * SHAPE.hidden];
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
                    adapters: held().count().max(1),
                    max_rank: held().map(|s| pool.max_rank(s)).max().unwrap_or(0),
                    aligned: None,
                };
                Some((batch.prepare(rec, pass, self.tokens, sites.router.iter())?, sites, factors))
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
        layer.record(rec, pass, &tensors)
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
    for label in SCRATCH.into_iter().chain(["align work"]) {
        let scratch = rec.scratch(label, SCRATCH_WORDS as u64 * 4).unwrap();
        gpu.queue().write_buffer(&scratch.buffer, 0, bytemuck::cast_slice(&vec![UNWRITTEN_I32; SCRATCH_WORDS]));
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
    let MoeShape { experts, hidden: d, expert_width: f, .. } = SHAPE;
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
            factors.push(Factor { layer: 0, site, expert, rank, scale, a, b: matrix(out, rank) });
        }
    }
    factors.sort_by_key(Factor::place);
    Adapter { path: PathBuf::new(), factors, bytes_read: 0 }
}

/// Makes an adapter resident and pins it.
pub fn pin(pool: &mut AdapterPool, number: u64, adapter: &Adapter) -> Option<usize> {
    pool.pin(AdapterId::new(number), adapter).unwrap()
}
