//! Attention over the paged cache, by the device's own clock: the shape of Qwen3-30B-A3B.
//!
//! `cargo bench --bench attention [-- tiny] [search]` prints microseconds a layer for prompts and for single rows of some
//! sequences: each row on its own as in software, split along the context, and with prompts on cooperative matrices where
//! the device has them; and how far each is from the first. Layers have caches of their own, together larger than the
//! device's own cache. `tiny` is a shape for software devices; `search` tries other cuts.

use std::time::{Duration, Instant};

use wgmoe::kernels::attention::Attention;
use wgmoe::kernels::rope::AttentionShape;
use wgmoe::kernels::{Recording, View};
use wgmoe::plan::attention::{AttentionCut, AttentionWork};
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::{Gpu, GpuOptions};

const RUNS: usize = 9;
const WARM_UP: Duration = Duration::from_millis(250);
const BLOCK_SIZE: usize = 16;
/// Bytes of keys and values that runs go through before they meet the same again.
const WORKING_SET: usize = 192 << 20;

const CUTS: [AttentionCut; 3] = [
    AttentionCut { subgroups: 8, positions: 32, strip: 32 },
    AttentionCut { subgroups: 4, positions: 64, strip: 16 },
    AttentionCut { subgroups: 4, positions: 32, strip: 32 },
];
const WORKGROUPS: [usize; 3] = [256, 512, 1024];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| words.iter().any(|w| w == word);
    let gpu = Gpu::new(&GpuOptions::default()).expect("a device");
    let info = gpu.info();
    println!("{} | {} {} | tier {}", info.name, info.driver, info.driver_info, gpu.tier());
    let (heads, kv_heads, head_dim) = if has("tiny") { (4, 2, 64) } else { (32, 4, 128) };
    // (sequences, positions in the cache before the step, rows a sequence)
    let cases: &[(usize, usize, usize)] = if has("tiny") {
        &[(1, 0, 48), (1, 99, 1), (4, 49, 1)]
    } else {
        &[(1, 0, 512), (1, 0, 4096), (1, 3584, 512), (1, 999, 1), (1, 32_767, 1), (64, 499, 1)]
    };
    let own = gpu.capabilities().clone();
    let tier = |split_attention, matrix| {
        gpu.with_capabilities(Capabilities { split_attention, matrix: matrix && own.matrix, ..own.clone() })
    };
    let (single, split, matrix) = (tier(false, false), tier(true, false), tier(true, true));
    println!(
        "{:>5} {:>8} {:>6} {:>12} {:>12} {:>12} {:>9} {:>9} {:>10}",
        "T", "context", "", "a row, us", "split, us", "matrix, us", "off by", "off by", "GB/s"
    );
    for &(sequences, before, rows) in cases {
        let context = before + rows;
        let shape =
            AttentionShape { heads, kv_heads, head_dim, block_size: BLOCK_SIZE, max_blocks: context.div_ceil(16) };
        let bench = Bench::new(&gpu, shape, sequences, before, rows);
        let work = |gpu: &Gpu| AttentionWork::new(gpu.capabilities(), &shape, &bench.rows);
        // A long prompt row by row takes a tenth of a second a layer.
        let layers = if rows > 1 { 1 } else { bench.caches.len() };
        let (old, expected) = bench.measure(&single, &work(&single), layers, if rows > 1 { 1 } else { RUNS });
        let (new, got) = bench.measure(&split, &work(&split), bench.caches.len(), if rows > 1 { 3 } else { RUNS });
        let off = difference(&got, &expected);
        print!(
            "{:>5} {context:>8} {:>6} {old:>12.1} {new:>12.1}",
            sequences * rows,
            if rows > 1 { "prompt" } else { "" }
        );
        if rows > 1 {
            let (tiles, got) = bench.measure(&matrix, &work(&matrix), bench.caches.len(), RUNS);
            println!(" {tiles:>12.1} {off:>9.1e} {:>9.1e}", difference(&got, &expected));
        } else {
            let bytes = (sequences * context * kv_heads * head_dim * 8) as f64;
            println!(" {:>12} {off:>9.1e} {:>9} {:>10.0}", "", "", bytes / new / 1000.0);
        }
        if has("search") && rows > 1 && matrix.capabilities().matrix {
            for cut in CUTS {
                let work = AttentionWork::with_cut(matrix.capabilities(), &shape, &bench.rows, cut, 256);
                let (us, got) = bench.measure(&matrix, &work, bench.caches.len(), RUNS);
                println!("      {cut:?}: {us:.1} us, off by {:.1e}", difference(&got, &expected));
            }
        } else if has("search") && rows == 1 {
            for workgroups in WORKGROUPS {
                let caps = split.capabilities();
                let work = AttentionWork::with_cut(caps, &shape, &bench.rows, CUTS[0], workgroups);
                let (us, got) = bench.measure(&split, &work, bench.caches.len(), RUNS);
                let off = difference(&got, &expected);
                println!("      {workgroups} workgroups, {} splits: {us:.1} us, off by {off:.1e}", work.splits);
            }
        }
    }
}

/// Largest difference over the largest value; a NaN is a difference.
fn difference(got: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    let off = |(g, e): (&f32, &f32)| if (g - e).is_nan() { f32::INFINITY } else { (g - e).abs() };
    got.iter().zip(expected).map(off).fold(0f32, f32::max) / largest
}

/// Uniform values in [-scale, scale), from splitmix64.
fn random(n: usize, scale: f32, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut values = Vec::with_capacity(n);
    for _ in 0..n {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^= z >> 27;
        values.push(((z >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale);
    }
    values
}

struct Bench {
    shape: AttentionShape,
    rows: Vec<[i32; 4]>,
    row_table: View,
    blocks: View,
    q: View,
    out: View,
    /// Keys and values of each layer.
    caches: Vec<(View, View)>,
}

impl Bench {
    fn new(gpu: &Gpu, shape: AttentionShape, sequences: usize, before: usize, rows: usize) -> Self {
        let storage =
            |bytes: usize| View::whole(&gpu.buffer("bench", bytes as u64, wgpu::BufferUsages::empty()).expect("room"));
        let upload = |bytes: &[u8]| {
            let view = storage(bytes.len());
            gpu.queue().write_buffer(&view.buffer, 0, bytes);
            view
        };
        let table: Vec<[i32; 4]> =
            (0..sequences).flat_map(|s| (before..before + rows).map(move |p| [0, p as i32, s as i32, -1])).collect();
        // The blocks of a sequence lie apart: 7 has no factor in common with their number, or they lie in order.
        let n = sequences * shape.max_blocks;
        let step = if n.is_multiple_of(7) { 1 } else { 7 };
        let blocks: Vec<u32> = (0..n).map(|b| (b * step % n) as u32).collect();
        let cell = shape.kv_heads * shape.head_dim;
        let values = n * BLOCK_SIZE * cell;
        let some = random((values).min(4 << 20), 2.0, 1);
        let cache = || {
            let view = storage(values * 4);
            for begin in (0..values).step_by(some.len()) {
                let part = &some[..some.len().min(values - begin)];
                gpu.queue().write_buffer(&view.buffer, begin as u64 * 4, bytemuck::cast_slice(part));
            }
            gpu.queue().submit([]);
            gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("a device");
            view
        };
        let q = random(table.len() * shape.heads * shape.head_dim, 2.0, 2);
        let layers = (WORKING_SET / (values * 8)).clamp(2, 32);
        Self {
            shape,
            row_table: upload(bytemuck::cast_slice(&table)),
            blocks: upload(bytemuck::cast_slice(&blocks)),
            q: upload(bytemuck::cast_slice(&q)),
            out: storage(q.len() * 4),
            caches: (0..layers).map(|_| (cache(), cache())).collect(),
            rows: table,
        }
    }

    /// Median time of a layer in microseconds, and the output.
    fn measure(&self, gpu: &Gpu, work: &AttentionWork, layers: usize, runs: usize) -> (f64, Vec<f32>) {
        let items = gpu
            .buffer("items", (work.table.len() * 16).max(16) as u64, wgpu::BufferUsages::empty())
            .map(|b| View::whole(&b))
            .expect("room");
        gpu.queue().write_buffer(&items.buffer, 0, bytemuck::cast_slice(&work.table));
        let queries = gpu.device().create_query_set(&wgpu::QuerySetDescriptor {
            label: None,
            ty: wgpu::QueryType::Timestamp,
            count: 2 * runs as u32,
        });
        let mut rec = Recording::new(gpu);
        let mut once = |run: Option<usize>| {
            rec.reset();
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: None,
                timestamp_writes: run.map(|run| wgpu::ComputePassTimestampWrites {
                    query_set: &queries,
                    beginning_of_pass_write_index: Some(2 * run as u32),
                    end_of_pass_write_index: Some(2 * run as u32 + 1),
                }),
            });
            for (k_cache, v_cache) in &self.caches[..layers] {
                let attention = Attention {
                    rows: self.rows.len(),
                    shape: self.shape,
                    q: &self.q,
                    k_cache,
                    v_cache,
                    row_table: &self.row_table,
                    blocks: &self.blocks,
                    work,
                    items: &items,
                    out: &self.out,
                };
                attention.record(&mut rec, &mut pass).expect("a recording");
            }
            drop(pass);
            rec.flush();
            gpu.queue().submit([encoder.finish()]);
        };
        once(None);
        let n = self.rows.len() * self.shape.heads * self.shape.head_dim * 4;
        let bytes = gpu.read(&self.out.buffer, 0, n as u64).expect("a device");
        // What the next kernel does not write is seen.
        gpu.queue().write_buffer(&self.out.buffer, 0, &vec![0xff; n]);
        let begin = Instant::now();
        while runs > 1 && begin.elapsed() < WARM_UP {
            once(None);
            gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("a device");
        }
        for run in 0..runs {
            once(Some(run));
        }
        let size = 2 * runs as u64 * 8;
        let resolved = gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        encoder.resolve_query_set(&queries, 0..2 * runs as u32, &resolved, 0);
        gpu.queue().submit([encoder.finish()]);
        let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&gpu.read(&resolved, 0, size).expect("a device"));
        let mut times: Vec<u64> = ticks.chunks(2).map(|run| run[1] - run[0]).collect();
        times.sort_unstable();
        let us = times[runs / 2] as f64 * f64::from(gpu.queue().get_timestamp_period()) / 1000.0 / layers as f64;
        gpu.queue().write_buffer(&self.out.buffer, 0, &vec![0xff; n]);
        (us, bytemuck::pod_collect_to_vec(&bytes))
    }
}
