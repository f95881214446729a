//! A layer with random weights, and random adapters for it.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use wgmoe::adapter::pool::{AdapterId, AdapterPool};
use wgmoe::adapter::sites::LayerSites;
use wgmoe::adapter::{Adapter, Factor, Matrix, Site};
use wgmoe::checkpoint::{Block, MlpKind, ModelConfig};
use wgmoe::dtype::DType;
use wgmoe::gpu::Gpu;
use wgmoe::kernels::random::Random;
use wgmoe::layer::MoeLayer;
use wgmoe::placement::{ExpertShare, RankShare};
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;
use wgmoe::upload::{StreamOptions, Uploader};

use crate::bench::routing;
use crate::bench::shape::{Routing, Shape};

/// Seeds of the parts of a layer.
const ROUTER: u32 = 1;
const GATE_UP: u32 = 2;
const DOWN: u32 = 3;

/// One layer on the device, with what the oracle needs to know of it.
pub struct Synthetic {
    pub layer: MoeLayer,
    pub router: Vec<f32>,
    pub gate_up: Random,
    pub down: Random,
    pub pool: AdapterPool,
    pub adapters: Vec<Adapter>,
}

impl Synthetic {
    /// `ranks` has one for each adapter.
    pub fn new(gpu: &Gpu, shape: &Shape, dtype: DType, routing: Routing, ranks: &[usize]) -> anyhow::Result<Self> {
        let moe = shape.config.moe;
        let MoeShape { experts, hidden: d, expert_width: f, .. } = moe;
        let values = routing::router(&moe, routing, ROUTER);
        let stored = DType::Bf16.encode(&values);
        let mut up = Uploader::new(gpu);
        let router =
            up.stack("router", 1, [experts, d], &|_| Ok(vec![Block::borrowed(DType::Bf16, [experts, d], &stored)?]))?;
        let values = [Random::for_rows(dtype, d, GATE_UP), Random::for_rows(dtype, f, DOWN)];
        let gate_up = up.random("gate_up", experts, [2 * f, d], values[0])?;
        let down = up.random("down", experts, [d, f], values[1])?;
        up.run(&StreamOptions::default(), &mut |_, _| {})?;
        let options = RouteOptions { renormalise: shape.config.norm_topk_prob, ..RouteOptions::default() };
        let activation = shape.activation;
        let layer =
            MoeLayer { shape: moe, experts, width: f, owners: None, router, options, gate_up, down, activation };

        let slots = ranks.len().max(1);
        let share = ExpertShare::whole(experts, f)?;
        let config = ModelConfig { layers: vec![MlpKind::Experts], ..shape.config.clone() };
        let held = RankShare::of_experts(&config, share.clone());
        let sites = LayerSites::new(&config, MlpKind::Experts, &held, slots);
        let mut pool = AdapterPool::new(gpu, vec![(sites, Some(share))], slots)?;
        let adapters: Vec<Adapter> =
            ranks.iter().enumerate().map(|(i, rank)| adapter(&moe, *rank, 100 + i as u32)).collect();
        for (id, adapter) in adapters.iter().enumerate() {
            // What is pinned stays, so that a load says what is missing instead of waiting.
            let id = AdapterId::new(id as u64);
            pool.load(id, adapter).with_context(|| format!("no room for {} adapters", ranks.len()))?;
            pool.pin(id, adapter)?;
        }
        let router = DType::Bf16.decode(&stored);
        Ok(Self { layer, router, gate_up: values[0], down: values[1], pool, adapters })
    }
}

/// An adapter of gate, up and down of every expert.
fn adapter(shape: &MoeShape, rank: usize, seed: u32) -> Adapter {
    let parts = expert_parts(shape, rank, seed);
    let factors = parts.iter().flat_map(|part| (0..shape.experts).map(|expert| part.factor(0, expert))).collect();
    Adapter { path: PathBuf::from("random"), factors, bytes_read: 0, share: None }
}

/// An adapter of attention and of every expert of a model, as far as a rank with `share` of it needs it. The rank must hold
/// whole experts and all heads.
pub fn model_adapter(config: &ModelConfig, share: &RankShare, rank: usize, seed: u32) -> Adapter {
    let (d, q, kv) = (config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let attention = [(Site::Q, q, d), (Site::K, kv, d), (Site::V, kv, d), (Site::O, d, q)];
    let attention = Part::all(&attention, rank, seed.wrapping_mul(2).wrapping_add(1 << 20));
    let experts = expert_parts(&config.moe, rank, seed.wrapping_mul(2).wrapping_add((1 << 20) + 1));
    // Layers share host memory, but nothing on the device.
    let owned = share.experts.placement().owned();
    let attention: Vec<Factor> = attention.iter().map(|part| part.factor(0, 0)).collect();
    let experts: Vec<Factor> =
        experts.iter().flat_map(|part| owned.iter().map(move |expert| part.factor(0, *expert))).collect();
    let mut factors = Vec::new();
    for (layer, kind) in config.layers.iter().enumerate() {
        let experts = experts.iter().filter(|_| *kind == MlpKind::Experts);
        factors.extend(attention.iter().chain(experts).map(|factor| Factor { layer, ..factor.clone() }));
    }
    factors.sort_by_key(Factor::place);
    Adapter { path: PathBuf::from("random"), factors, bytes_read: 0, share: Some(share.clone()) }
}

/// Both factors of a projection, the same in every layer and expert.
struct Part {
    site: Site,
    a: Matrix,
    b: Matrix,
}

fn expert_parts(shape: &MoeShape, rank: usize, seed: u32) -> Vec<Part> {
    let (d, f) = (shape.hidden, shape.expert_width);
    Part::all(&[(Site::ExpertGate, f, d), (Site::ExpertUp, f, d), (Site::ExpertDown, d, f)], rank, seed)
}

impl Part {
    /// Parts of sites with their outputs and inputs.
    fn all(sites: &[(Site, usize, usize)], rank: usize, seed: u32) -> Vec<Self> {
        let matrix = |rows: usize, cols: usize, seed: u32| {
            let random = Random { dtype: DType::Bf16, exponent: -4, seed };
            let values: Vec<f32> = (0..rows * cols).map(|i| random.value(i as u32)).collect();
            Matrix { dtype: DType::Bf16, rows, cols, bytes: DType::Bf16.encode(&values) }
        };
        let seeds = (seed.wrapping_mul(16)..).step_by(2);
        let part = |((site, out, inner), seed): (&(Site, usize, usize), u32)| Self {
            site: *site,
            a: matrix(rank, *inner, seed),
            b: matrix(*out, rank, seed + 1),
        };
        sites.iter().zip(seeds).map(part).collect()
    }

    fn factor(&self, layer: usize, expert: usize) -> Factor {
        // Copies: factors of a site that share host memory would share their place on the device, too.
        let [a, b] = [&self.a, &self.b].map(|m| Arc::new(m.clone()));
        Factor { layer, site: self.site, expert, rank: a.rows, scale: 2.0, a, b, bias: None }
    }
}
