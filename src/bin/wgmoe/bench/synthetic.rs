//! A layer with random weights, and random adapters for it.

use std::path::PathBuf;
use std::sync::Arc;

use wgmoe::adapter::pool::{AdapterId, AdapterPool};
use wgmoe::adapter::sites::LayerSites;
use wgmoe::adapter::{Adapter, Factor, Matrix, Site};
use wgmoe::checkpoint::{Block, MlpKind, ModelConfig};
use wgmoe::dtype::DType;
use wgmoe::gpu::Gpu;
use wgmoe::kernels::Recording;
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
        let random = |seed: u32, inner: usize| Random { dtype, exponent: -((inner as f32).log2() / 2.0) as i32, seed };
        let (gate_up, down) = (random(GATE_UP, d), random(DOWN, f));
        let values = routing::router(&moe, routing, ROUTER);
        let stored = DType::Bf16.encode(&values);
        let mut up = Uploader::new(gpu);
        let router =
            up.stack("router", 1, [experts, d], &|_| Ok(vec![Block::borrowed(DType::Bf16, [experts, d], &stored)?]))?;
        up.run(&StreamOptions::default(), &mut |_, _| {})?;
        let mut rec = Recording::new(gpu);
        let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let layer = {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            MoeLayer {
                shape: moe,
                experts,
                width: f,
                owners: None,
                router,
                options: RouteOptions { renormalise: shape.config.norm_topk_prob, ..RouteOptions::default() },
                gate_up: gate_up.weights(&mut rec, &mut pass, "gate_up", [experts, 2 * f, d])?,
                down: down.weights(&mut rec, &mut pass, "down", [experts, d, f])?,
                activation: shape.activation,
            }
        };
        rec.flush();
        gpu.queue().submit([encoder.finish()]);

        let slots = ranks.len().max(1);
        let share = ExpertShare::whole(experts, f)?;
        let config = ModelConfig { layers: vec![MlpKind::Experts], ..shape.config.clone() };
        let held = RankShare::of_experts(&config, share.clone());
        let sites = LayerSites::new(&config, MlpKind::Experts, &held, slots);
        let mut pool = AdapterPool::new(gpu, vec![(sites, Some(share))], slots)?;
        let adapters: Vec<Adapter> =
            ranks.iter().enumerate().map(|(i, rank)| adapter(&moe, *rank, 1, 100 + i as u32)).collect();
        for (id, adapter) in adapters.iter().enumerate() {
            pool.pin(AdapterId::new(id as u64), adapter)?
                .ok_or_else(|| anyhow::anyhow!("no room for {} adapters", ranks.len()))?;
        }
        let router = DType::Bf16.decode(&stored);
        Ok(Self { layer, router, gate_up, down, pool, adapters })
    }
}

/// An adapter of gate, up and down of every expert of `layers` layers. Experts share their host memory, not their place on
/// the device.
pub fn adapter(shape: &MoeShape, rank: usize, layers: usize, seed: u32) -> Adapter {
    let MoeShape { experts, hidden: d, expert_width: f, .. } = *shape;
    let matrix = |rows: usize, cols: usize, seed: u32| {
        let random = Random { dtype: DType::Bf16, exponent: -4, seed };
        let values: Vec<f32> = (0..rows * cols).map(|i| random.value(i as u32)).collect();
        Arc::new(Matrix { dtype: DType::Bf16, rows, cols, bytes: DType::Bf16.encode(&values) })
    };
    let sites = [(Site::ExpertGate, f, d), (Site::ExpertUp, f, d), (Site::ExpertDown, d, f)];
    let parts: Vec<_> = sites
        .into_iter()
        .enumerate()
        .map(|(i, (site, out, inner))| {
            let seed = seed * 8 + i as u32 * 2;
            (site, matrix(rank, inner, seed), matrix(out, rank, seed + 1))
        })
        .collect();
    let mut factors = Vec::new();
    for layer in 0..layers {
        for (site, a, b) in &parts {
            for expert in 0..experts {
                let (a, b) = (a.clone(), b.clone());
                factors.push(Factor { layer, site: *site, expert, rank, scale: 2.0, a, b, bias: None });
            }
        }
    }
    Adapter { path: PathBuf::from("random"), factors, bytes_read: 0, share: None }
}
