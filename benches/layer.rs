//! One mixture-of-experts layer, route to combine, by the device's own clock.
//!
//! `cargo bench --bench layer [-- tiny] [profile] [TIER] [T ...]` prints microseconds a layer without adapters and with
//! eight adapters of rank 16 mixed over the tokens (gate, up and down of every expert), for the layer of Qwen3-30B-A3B in
//! bf16 with random weights, and how far the output is from that of f32 arithmetic. `tiny` is a shape for software devices;
//! `profile` adds the time of every dispatch.

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
use wgmoe::placement::{ExpertShare, RankShare};
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;
use wgmoe::upload::{StreamOptions, Uploader};
use wgmoe::{Gpu, GpuOptions};

const ADAPTERS: usize = 8;
const RANK: usize = 16;
const RUNS: usize = 21;
/// Sets of tokens that runs take in turn.
const INPUTS: usize = 4;
/// How long the device works before it is timed.
const WARM_UP: std::time::Duration = std::time::Duration::from_millis(150);
/// Dispatches that a profile has room for.
const STAGES: u32 = 64;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| words.iter().any(|w| w == word);
    let (shape, all): (_, &[usize]) = if has("tiny") {
        (MoeShape { experts: 16, top_k: 4, hidden: 128, expert_width: 64 }, &[1, 16, 64])
    } else {
        (MoeShape { experts: 128, top_k: 8, hidden: 2048, expert_width: 768 }, &[1, 4, 16, 64, 256, 1024, 4096])
    };
    let asked: Vec<usize> = words.iter().filter_map(|w| w.parse().ok()).collect();
    let tokens = if asked.is_empty() { all.to_vec() } else { asked };
    let tier = words.iter().find_map(|w| w.parse().ok());
    let gpu = Gpu::new(&GpuOptions { tier, ..GpuOptions::default() }).expect("a device");
    assert!(gpu.device().features().contains(wgpu::Features::TIMESTAMP_QUERY), "the device has no timestamps");
    let info = gpu.info();
    println!("{} | {} {} | tier {} | {shape:?} bf16", info.name, info.driver, info.driver_info, gpu.tier());
    let bench = Bench::new(&gpu, shape);
    println!("{:>6} {:>14} {:>24} {:>7} {:>10}", "T", "without, us", "8 adapters of r16, us", "ratio", "off by");
    for &t in &tokens {
        let (without, plain) = bench.measure(&gpu, t, false, RUNS, false);
        let (with, adapted) = bench.measure(&gpu, t, true, RUNS, false);
        // The same layer in f32 arithmetic and by other shaders.
        let plain_tier = Capabilities { matrix: false, along_depth: false, ..gpu.capabilities().clone() };
        let f32_tier = gpu.with_capabilities(plain_tier);
        let off = [(false, plain), (true, adapted)]
            .map(|(adapters, got)| difference(&got, &bench.measure(&f32_tier, t, adapters, 1, false).1));
        let off = off[0].max(off[1]);
        println!("{t:>6} {without:>14.1} {with:>24.1} {:>7.2} {off:>10.1e}", with / without);
        assert!(off < 2e-3, "the tiers differ");
        if has("profile") {
            bench.measure(&gpu, t, false, RUNS, true);
            bench.measure(&gpu, t, true, RUNS, true);
        }
    }
}

/// Largest difference over the largest value; a NaN is a difference.
fn difference(got: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    let off = |(g, e): (&f32, &f32)| if (g - e).is_nan() { f32::INFINITY } else { (g - e).abs() };
    got.iter().zip(expected).map(off).fold(0f32, f32::max) / largest
}

struct Bench {
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
        let config = config(shape);
        let held = RankShare::of_experts(&config, share.clone());
        let sites = LayerSites::new(&config, MlpKind::Experts, &held, ADAPTERS);
        let mut pool = AdapterPool::new(gpu, vec![(sites, Some(share))], ADAPTERS).expect("room");
        for a in 0..ADAPTERS {
            let adapter = adapter(shape, a as u64);
            pool.pin(AdapterId::new(a as u64), &adapter).expect("room").expect("a slot");
        }
        Self { layer, pool }
    }

    /// Median time of the whole layer in microseconds, over runs with rotating tokens, and the output for the first
    /// tokens. The device never waits between runs: an idle GPU lowers its clock. With `profile` the median time of each
    /// dispatch is printed.
    fn measure(&self, gpu: &Gpu, tokens: usize, adapters: bool, runs: usize, profile: bool) -> (f64, Vec<f32>) {
        let d = self.layer.shape.hidden;
        let storage =
            |bytes: usize| View::whole(&gpu.buffer("bench", bytes as u64, wgpu::BufferUsages::empty()).expect("room"));
        let (out, status) = (storage(tokens * d * 4), storage(4));
        let inputs: Vec<(View, View)> = (0..INPUTS)
            .map(|i| {
                let (x, mapping) = (storage(tokens * d * 4), storage(tokens * 4));
                let rows = DType::Bf16.decode(&random(tokens * d, 1.0, 1000 + i as u64));
                gpu.queue().write_buffer(&x.buffer, 0, bytemuck::cast_slice(&rows));
                let slots: Vec<i32> = (0..tokens).map(|t| ((t * 5 + i) % ADAPTERS) as i32).collect();
                gpu.queue().write_buffer(&mapping.buffer, 0, bytemuck::cast_slice(&slots));
                (x, mapping)
            })
            .collect();
        let mut times = Times::new(gpu, runs);
        let mut rec = Recording::new(gpu);
        let mut once = |times: Option<(&Times, usize)>, i: usize| {
            let (x, mapping) = &inputs[i % INPUTS];
            let batch = LoraBatch {
                token_lora_mapping: mapping.clone(),
                slots: ADAPTERS,
                adapters: ADAPTERS.min(tokens),
                max_rank: RANK,
                aligned: None,
            };
            rec.reset();
            if let Some((times, run)) = times.filter(|_| profile) {
                rec.profile(&times.stages[run], STAGES as usize);
            }
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                    label: None,
                    timestamp_writes: times.map(|(times, run)| wgpu::ComputePassTimestampWrites {
                        query_set: &times.ends,
                        beginning_of_pass_write_index: Some(2 * run as u32),
                        end_of_pass_write_index: Some(2 * run as u32 + 1),
                    }),
                });
                let (sites, factors) = self.pool.layer(0);
                let lora = adapters.then_some((&batch, sites, factors));
                let tensors = MoeTensors { tokens, x, out: &out, accumulate: false, status: &status, lora };
                self.layer.record(&mut rec, &mut pass, &tensors).expect("a recording");
            }
            rec.flush();
            gpu.queue().submit([encoder.finish()]);
            rec.profiled()
        };
        // Compiles shaders, then keeps the device busy until its clock is up.
        once(None, 0);
        let bytes = gpu.read(&out.buffer, 0, (tokens * d * 4) as u64).expect("a device");
        let begin = std::time::Instant::now();
        while runs > 1 && begin.elapsed() < WARM_UP {
            for i in 0..8 {
                once(None, i);
            }
            gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("a device");
        }
        for run in 0..runs {
            times.labels = once(Some((&times, run)), run);
        }
        (times.report(gpu), bytemuck::pod_collect_to_vec(&bytes))
    }
}

/// Timestamps of some runs: both ends of each, and the end of each dispatch.
struct Times {
    runs: usize,
    ends: wgpu::QuerySet,
    stages: Vec<wgpu::QuerySet>,
    labels: Vec<String>,
}

impl Times {
    fn new(gpu: &Gpu, runs: usize) -> Self {
        let set = |count: u32| {
            let ty = wgpu::QueryType::Timestamp;
            gpu.device().create_query_set(&wgpu::QuerySetDescriptor { label: None, ty, count })
        };
        let stages = (0..runs).map(|_| set(STAGES)).collect();
        Self { runs, ends: set(2 * runs as u32), stages, labels: Vec::new() }
    }

    /// Prints the median of each dispatch, if there are any; the median of the whole.
    fn report(&self, gpu: &Gpu) -> f64 {
        let ends = Self::microseconds(gpu, &self.ends, 2 * self.runs);
        if !self.labels.is_empty() {
            let stages: Vec<Vec<f64>> =
                self.stages.iter().map(|set| Self::microseconds(gpu, set, self.labels.len())).collect();
            for (i, label) in self.labels.iter().enumerate() {
                let before = |run: usize| if i == 0 { ends[2 * run] } else { stages[run][i - 1] };
                let part = median((0..self.runs).map(|run| stages[run][i] - before(run)).collect());
                println!("       {part:>9.1} us  {label}");
            }
        }
        median(ends.chunks(2).map(|run| run[1] - run[0]).collect())
    }

    fn microseconds(gpu: &Gpu, set: &wgpu::QuerySet, n: usize) -> Vec<f64> {
        let resolved = gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: n as u64 * 8,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        encoder.resolve_query_set(set, 0..n as u32, &resolved, 0);
        gpu.queue().submit([encoder.finish()]);
        let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&gpu.read(&resolved, 0, n as u64 * 8).expect("a device"));
        ticks.into_iter().map(|t| t as f64 * f64::from(gpu.queue().get_timestamp_period()) / 1000.0).collect()
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
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
