//! One mixture-of-experts layer, route to combine, by the device's own clock.
//!
//! `cargo bench --bench layer [-- tiny]` prints microseconds a layer without adapters and with eight adapters of rank 16
//! mixed over the tokens (gate, up and down of every expert), for the layer of Qwen3-30B-A3B in bf16 with random weights.
//! `tiny` is a shape for software devices.

use std::path::PathBuf;
use std::sync::Arc;

use wgmoe::activation::Activation;
use wgmoe::adapter::pool::{AdapterId, AdapterPool};
use wgmoe::adapter::sites::LayerSites;
use wgmoe::adapter::{Adapter, Factor, Matrix, Site};
use wgmoe::checkpoint::{Block, MlpKind, ModelConfig};
use wgmoe::dtype::DType;
use wgmoe::family::Family;
use wgmoe::kernels::{Recording, View};
use wgmoe::layer::{LoraBatch, MoeLayer, MoeTensors};
use wgmoe::placement::ExpertShare;
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;
use wgmoe::upload::{StreamOptions, Uploader};
use wgmoe::{Gpu, GpuOptions};

const ADAPTERS: usize = 8;
const RANK: usize = 16;
const RUNS: usize = 21;

fn main() {
    let tiny = std::env::args().any(|a| a == "tiny");
    let (shape, tokens): (_, &[usize]) = if tiny {
        (MoeShape { experts: 16, top_k: 4, hidden: 128, expert_width: 64 }, &[1, 16, 64])
    } else {
        (MoeShape { experts: 128, top_k: 8, hidden: 2048, expert_width: 768 }, &[1, 4, 16, 64, 256, 1024, 4096])
    };
    let gpu = Gpu::new(&GpuOptions::default()).expect("a device");
    assert!(gpu.device().features().contains(wgpu::Features::TIMESTAMP_QUERY), "the device has no timestamps");
    let info = gpu.info();
    println!("{} | {} {} | tier {} | {shape:?} bf16", info.name, info.driver, info.driver_info, gpu.tier());
    let bench = Bench::new(&gpu, shape);
    println!("{:>6} {:>14} {:>24} {:>7}", "T", "without, us", "8 adapters of r16, us", "ratio");
    for &t in tokens {
        let without = bench.median_us(t, false);
        let with = bench.median_us(t, true);
        println!("{t:>6} {without:>14.1} {with:>24.1} {:>7.2}", with / without);
    }
}

struct Bench {
    gpu: Gpu,
    layer: MoeLayer,
    pool: AdapterPool,
}

/// Uniform values in [-scale, scale) as bf16, from splitmix64.
fn random(n: usize, scale: f32, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut values = Vec::with_capacity(n);
    for _ in 0..n {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^= z >> 27;
        values.push(((z >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale);
    }
    DType::Bf16.encode(&values)
}

impl Bench {
    fn new(gpu: &Gpu, shape: MoeShape) -> Self {
        let MoeShape { experts, hidden: d, expert_width: f, .. } = shape;
        let mut up = Uploader::new(gpu);
        let scale = 1.0 / (d as f32).sqrt();
        // One expert's bytes at a time would need an owner each; a single random block, entered at other places, is as
        // random for a kernel.
        let size = 2 * f * d * 2;
        let block = random((size + 2 * experts * 64) / 2, scale, 1);
        let window = |e: usize, rows: usize, cols: usize| {
            Ok(vec![Block::borrowed(DType::Bf16, [rows, cols], &block[e * 64..e * 64 + rows * cols * 2])?])
        };
        let router = random(experts * d, scale, 2);
        let layer = MoeLayer {
            shape,
            experts,
            width: f,
            owners: None,
            router: up
                .stack("router", 1, [experts, d], &|_| Ok(vec![Block::borrowed(DType::Bf16, [experts, d], &router)?]))
                .expect("room"),
            options: RouteOptions::default(),
            gate_up: up.stack("gate_up", experts, [2 * f, d], &|e| window(e, 2 * f, d)).expect("room"),
            down: up.stack("down", experts, [d, f], &|e| window(e, d, f)).expect("room"),
            activation: Activation::Silu,
        };
        up.run(&StreamOptions::default(), &mut |_, _| {}).expect("a device");
        let share = ExpertShare::whole(experts, f).expect("one rank");
        let sites = LayerSites::new(&config(shape), MlpKind::Experts, &share, ADAPTERS);
        let mut pool = AdapterPool::new(gpu, vec![(sites, Some(share))], ADAPTERS).expect("room");
        for a in 0..ADAPTERS {
            let adapter = adapter(shape, a as u64);
            pool.pin(AdapterId::new(a as u64), &adapter).expect("room").expect("a slot");
        }
        Self { gpu: gpu.clone(), layer, pool }
    }

    /// Median time of the whole layer, each run with other tokens.
    fn median_us(&self, tokens: usize, adapters: bool) -> f64 {
        let d = self.layer.shape.hidden;
        let storage = |bytes: usize| {
            View::whole(&self.gpu.buffer("bench", bytes as u64, wgpu::BufferUsages::empty()).expect("room"))
        };
        let (x, out, status, mapping) =
            (storage(tokens * d * 4), storage(tokens * d * 4), storage(4), storage(tokens * 4));
        let device = self.gpu.device();
        let queries = device.create_query_set(&wgpu::QuerySetDescriptor {
            label: None,
            ty: wgpu::QueryType::Timestamp,
            count: 2,
        });
        let resolved = device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 16,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let mut rec = Recording::new(&self.gpu);
        let mut times = Vec::new();
        for run in 0..RUNS + 3 {
            let rows = DType::Bf16.decode(&random(tokens * d, 1.0, 1000 + run as u64));
            self.gpu.queue().write_buffer(&x.buffer, 0, bytemuck::cast_slice(&rows));
            let slots: Vec<i32> = (0..tokens).map(|t| ((t * 5 + run) % ADAPTERS) as i32).collect();
            self.gpu.queue().write_buffer(&mapping.buffer, 0, bytemuck::cast_slice(&slots));
            let batch = LoraBatch {
                token_lora_mapping: mapping.clone(),
                slots: ADAPTERS,
                adapters: ADAPTERS.min(tokens),
                max_rank: RANK,
                aligned: None,
            };
            rec.reset();
            let mut encoder = device.create_command_encoder(&Default::default());
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                    label: None,
                    timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                        query_set: &queries,
                        beginning_of_pass_write_index: Some(0),
                        end_of_pass_write_index: Some(1),
                    }),
                });
                let (sites, factors) = self.pool.layer(0);
                let lora = adapters.then_some((&batch, sites, factors));
                let tensors = MoeTensors { tokens, x: &x, out: &out, accumulate: false, status: &status, lora };
                self.layer.record(&mut rec, &mut pass, &tensors).expect("a recording");
            }
            encoder.resolve_query_set(&queries, 0..2, &resolved, 0);
            rec.flush();
            self.gpu.queue().submit([encoder.finish()]);
            let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&self.gpu.read(&resolved, 0, 16).expect("a device"));
            // The first runs compile shaders and wake the device.
            if run >= 3 {
                times.push((ticks[1] - ticks[0]) as f64 * f64::from(self.gpu.queue().get_timestamp_period()) / 1000.0);
            }
        }
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }
}

fn adapter(shape: MoeShape, seed: u64) -> Adapter {
    let MoeShape { experts, hidden: d, expert_width: f, .. } = shape;
    let matrix = |rows: usize, cols: usize, seed: u64| {
        Arc::new(Matrix { dtype: DType::Bf16, rows, cols, bytes: random(rows * cols, 0.05, seed) })
    };
    let mut factors = Vec::new();
    for (i, (site, out, input)) in
        [(Site::ExpertGate, f, d), (Site::ExpertUp, f, d), (Site::ExpertDown, d, f)].into_iter().enumerate()
    {
        for expert in 0..experts {
            let seed = (seed * 1000 + expert as u64) * 8 + i as u64 * 2;
            let (a, b) = (matrix(RANK, input, seed), matrix(out, RANK, seed + 1));
            factors.push(Factor { layer: 0, site, expert, rank: RANK, scale: 2.0, a, b, bias: None });
        }
    }
    Adapter { path: PathBuf::from("random"), factors, bytes_read: 0, share: None }
}

fn config(shape: MoeShape) -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3Moe,
        hidden: shape.hidden,
        vocab: 8,
        heads: 8,
        kv_heads: 1,
        head_dim: 8,
        rms_eps: 1e-6,
        rope_theta: 1e6,
        max_positions: 8,
        tie_embeddings: true,
        dense_width: 8,
        shared_width: 0,
        moe: shape,
        norm_topk_prob: true,
        layers: vec![MlpKind::Experts],
        mixers: Vec::new(),
        stop_ids: Vec::new(),
    }
}
