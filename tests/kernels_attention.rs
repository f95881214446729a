//! Rotary position, the paged cache and attention on the device against the oracle.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use common::{Rng, TOL_F32, UNWRITTEN_F32, each_case, rel_err, tolerance};
use gpu_run::{Output, replayed, run, upload};
use wgmoe::Gpu;
use wgmoe::kernels::View;
use wgmoe::kernels::attention::Attention;
use wgmoe::kernels::rope::{AttentionShape, Rope, rotary_table};
use wgmoe::plan::attention::AttentionWork;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::matrix::DEPTH_PARTS;
use wgmoe::reference;

const THETA: f64 = 10_000.0;
const EPS: f64 = 1e-6;

/// What one sequence should have: q `[S, heads, head_dim]`, k and v `[S, kv_heads, head_dim]`, out as q.
struct Sequence {
    qkv: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
}

/// `value` is a factor on the values at a position.
fn sequence(rng: &mut Rng, s: &AttentionShape, length: usize, norms: &[f32], value: impl Fn(usize) -> f32) -> Sequence {
    let (d, h, kv) = (s.head_dim, s.heads, s.kv_heads);
    let row = (h + 2 * kv) * d;
    // Large enough that the softmax is far from flat.
    let mut qkv: Vec<f32> = rng.floats(length * row).iter().map(|v| v * 3.0).collect();
    for t in 0..length {
        qkv[t * row + (h + kv) * d..(t + 1) * row].iter_mut().for_each(|v| *v *= value(t));
    }
    let part = |begin: usize, n: usize| -> Vec<f32> {
        (0..length).flat_map(|t| qkv[t * row + begin * d..][..n * d].to_vec()).collect()
    };
    let (mut q, mut k, v) = (part(0, h), part(h, kv), part(h + kv, kv));
    let positions: Vec<u32> = (0..length as u32).collect();
    let frequencies = reference::inverse_frequencies(THETA, d);
    reference::rope(&mut q, Some(&norms[..d]), EPS, &positions, h, d, &frequencies);
    reference::rope(&mut k, Some(&norms[d..]), EPS, &positions, kv, d, &frequencies);
    let shape = reference::AttentionShape { heads: h, kv_heads: kv, head_dim: d, scale: 1.0 / (d as f32).sqrt() };
    let mut out = vec![0.0; q.len()];
    reference::attention(&q, &k, &v, 0, &shape, &mut out);
    Sequence { qkv, q, k, v, out }
}

struct Cache {
    k: Output<f32>,
    v: Output<f32>,
    norms: View,
    table: View,
    blocks: View,
}

/// Runs rope, then attention, on `rows` of (sequence, position); returns q and out.
fn step(gpu: &Gpu, shape: AttentionShape, cache: &Cache, all: &[Sequence], rows: &[(usize, usize)]) -> [Vec<f32>; 2] {
    let row = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    let qkv: Vec<f32> = rows.iter().flat_map(|(s, t)| all[*s].qkv[t * row..(t + 1) * row].to_vec()).collect();
    // Of an odd number of rows in parts, of which one has the value and the others nothing.
    let parts = if rows.len() % 2 == 1 { DEPTH_PARTS } else { 1 };
    let part = |p: usize| qkv.iter().enumerate().map(move |(i, v)| if i % parts == p { *v } else { 0.0 });
    let qkv: Vec<f32> = (0..parts).flat_map(part).collect();
    let row_table: Vec<[i32; 4]> = rows.iter().map(|(s, t)| [0, *t as i32, *s as i32, -1]).collect();
    let work = AttentionWork::new(gpu.capabilities(), &shape, &row_table);
    let items = if work.table.is_empty() { upload(gpu, &[[0; 4]]) } else { upload(gpu, &work.table) };
    let (qkv, row_table) = (upload(gpu, &qkv), upload(gpu, &row_table));
    let n = rows.len() * shape.heads * shape.head_dim;
    let (q, out) = (Output::new(gpu, n, UNWRITTEN_F32), Output::new(gpu, n, UNWRITTEN_F32));
    run(gpu, |rec, pass| {
        Rope {
            rows: rows.len(),
            shape,
            eps: EPS,
            qkv: &qkv,
            parts,
            norms: &cache.norms,
            table: &cache.table,
            row_table: &row_table,
            blocks: &cache.blocks,
            q: &q.view,
            k_cache: &cache.k.view,
            v_cache: &cache.v.view,
            adapters: None,
        }
        .record(rec, pass)?;
        Attention {
            rows: rows.len(),
            shape,
            q: &q.view,
            k_cache: &cache.k.view,
            v_cache: &cache.v.view,
            row_table: &row_table,
            blocks: &cache.blocks,
            work: &work,
            items: &items,
            out: &out.view,
        }
        .record(rec, pass)
    });
    [q.read(gpu), out.read(gpu)]
}

fn close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) -> Result<(), String> {
    let off = rel_err(got, expected);
    if off > tolerance { Err(format!("{what} is off by {off}")) } else { Ok(()) }
}

/// Every variant of attention, each once: also the one of software devices on others, and the other way.
fn every_variant() -> Vec<Gpu> {
    let mut all: Vec<Gpu> = Vec::new();
    for gpu in device::every_variant() {
        let own = gpu.capabilities().clone();
        let other = Capabilities { split_attention: !own.split_attention, matrix: false, ..own.clone() };
        for caps in [own, other] {
            // The split kernel is the same with and without subgroups.
            let decides =
                |c: &Capabilities| (c.split_attention, c.matrix, c.along_depth, !c.split_attention && c.one_subgroup);
            if all.iter().all(|gpu| decides(gpu.capabilities()) != decides(&caps)) {
                all.push(gpu.with_capabilities(caps));
            }
        }
    }
    all
}

#[derive(Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    block_size: usize,
}

/// Sequences of every length up to `lengths`, prompts first and the last token of each in a step of its own.
fn check(gpu: &Gpu, case: &Case, lengths: &[usize]) -> Result<(), String> {
    let Case { heads, kv_heads, head_dim, block_size } = *case;
    let mut rng = Rng::new(41);
    let longest = *lengths.iter().max().unwrap();
    let max_blocks = longest.div_ceil(block_size) + 1;
    let shape = AttentionShape { heads, kv_heads, head_dim, block_size, max_blocks };
    let norms: Vec<f32> = rng.floats(2 * head_dim).iter().map(|v| v + 1.5).collect();
    let all: Vec<Sequence> = lengths.iter().map(|n| sequence(&mut rng, &shape, *n, &norms, |_| 1.0)).collect();

    // Blocks of all sequences, shuffled; a third of the cache belongs to nobody and stays NaN.
    let used = lengths.len() * max_blocks;
    let n_blocks = used * 3 / 2;
    let mut blocks: Vec<u32> = (0..n_blocks as u32).collect();
    for i in (1..n_blocks).rev() {
        blocks.swap(i, rng.below(i + 1));
    }
    blocks.truncate(used);
    let cells = n_blocks * block_size * kv_heads * head_dim;
    let cache = Cache {
        k: Output::new(gpu, cells, UNWRITTEN_F32),
        v: Output::new(gpu, cells, UNWRITTEN_F32),
        norms: upload(gpu, &norms),
        table: upload(gpu, &rotary_table(longest, head_dim, THETA)),
        blocks: upload(gpu, &blocks),
    };
    let prompts: Vec<(usize, usize)> =
        (0..lengths.len()).flat_map(|s| (0..lengths[s] - 1).map(move |t| (s, t))).collect();
    let last: Vec<(usize, usize)> = (0..lengths.len()).rev().map(|s| (s, lengths[s] - 1)).collect();
    for rows in [prompts, last] {
        let [q, out] = step(gpu, shape, &cache, &all, &rows);
        let width = heads * head_dim;
        let pick = |of: &dyn Fn(&Sequence) -> &[f32]| -> Vec<f32> {
            rows.iter().flat_map(|(s, t)| of(&all[*s])[t * width..(t + 1) * width].to_vec()).collect()
        };
        close("q", &q, &pick(&|s| &s.q), TOL_F32)?;
        close("out", &out, &pick(&|s| &s.out), tolerance(gpu))?;
    }

    // The cache holds every key and value at its place, and nothing else.
    let (mut k, mut v) = (cache.k.read(gpu), cache.v.read(gpu));
    let width = kv_heads * head_dim;
    for (s, sequence) in all.iter().enumerate() {
        for t in 0..lengths[s] {
            let block = blocks[s * max_blocks + t / block_size] as usize;
            let at = (block * block_size + t % block_size) * width;
            let cell = at..at + width;
            close("a key", &k[cell.clone()], &sequence.k[t * width..(t + 1) * width], TOL_F32)?;
            if v[cell.clone()] != sequence.v[t * width..(t + 1) * width] {
                return Err(format!("value {t} of sequence {s} differs"));
            }
            k[cell.clone()].fill(f32::NAN);
            v[cell].fill(f32::NAN);
        }
    }
    if k.iter().chain(&v).all(|c| c.is_nan()) { Ok(()) } else { Err("a place of nobody was written".to_owned()) }
}

#[test]
fn attention_over_shuffled_blocks_equals_the_oracle_for_every_head_width() {
    let mut cases = Vec::new();
    for (head_dim, heads, kv_heads) in [(8, 2, 2), (24, 4, 2), (32, 6, 2), (64, 4, 1), (128, 2, 1), (256, 1, 1)] {
        for block_size in [16, 5] {
            cases.push(Case { heads, kv_heads, head_dim, block_size });
        }
    }
    for gpu in every_variant() {
        each_case(&cases, |case| check(&gpu, case, &[17, 1, 5, 33, 2]));
    }
}

#[test]
fn attention_equals_the_oracle_for_every_length_around_a_round_of_lanes() {
    // Of so many rows that a workgroup has several heads, and the last one fewer.
    let case = Case { heads: 3, kv_heads: 1, head_dim: 16, block_size: 16 };
    for gpu in every_variant() {
        each_case(&[case.block_size], |_| check(&gpu, &case, &[70, 63, 64, 65, 66, 1, 2, 3, 4, 8, 9, 15, 16]));
    }
}

/// Blocks of all sequences in reverse, in a cache of NaN.
fn cache(gpu: &Gpu, shape: &AttentionShape, sequences: usize, norms: &[f32], longest: usize) -> Cache {
    let n_blocks = sequences * shape.max_blocks;
    let blocks: Vec<u32> = (0..n_blocks as u32).rev().collect();
    let cells = n_blocks * shape.block_size * shape.kv_heads * shape.head_dim;
    Cache {
        k: Output::new(gpu, cells, UNWRITTEN_F32),
        v: Output::new(gpu, cells, UNWRITTEN_F32),
        norms: upload(gpu, norms),
        table: upload(gpu, &rotary_table(longest, shape.head_dim, THETA)),
        blocks: upload(gpu, &blocks),
    }
}

/// Steps as an engine makes them: (sequence, first position, rows), decodes before prompts.
const STEPS: [&[(usize, usize, usize)]; 4] = [
    &[(0, 0, 37), (1, 0, 5)],
    &[(0, 37, 1), (1, 5, 21), (2, 0, 70)],
    &[(0, 38, 1), (1, 26, 1), (2, 70, 21), (3, 0, 16), (4, 0, 1)],
    &[(2, 91, 1), (0, 39, 1), (1, 27, 1), (3, 16, 1), (4, 1, 17)],
];
const LENGTHS: [usize; 5] = [40, 28, 92, 17, 18];

/// Runs [`STEPS`]; the worst row must be within the tolerance of the tier, by the largest value of that row.
fn check_steps(gpu: &Gpu, case: &Case, norms: [f32; 2], value: impl Fn(usize) -> f32) -> Result<(), String> {
    let Case { heads, kv_heads, head_dim, block_size } = *case;
    let longest = *LENGTHS.iter().max().unwrap();
    let shape = AttentionShape { heads, kv_heads, head_dim, block_size, max_blocks: longest.div_ceil(block_size) + 1 };
    let mut rng = Rng::new(43);
    let spread =
        |n: f32, rng: &mut Rng| -> Vec<f32> { rng.floats(head_dim).iter().map(|v| (v + 3.0) / 3.0 * n).collect() };
    let norms = [spread(norms[0], &mut rng), spread(norms[1], &mut rng)].concat();
    let all: Vec<Sequence> = LENGTHS.iter().map(|n| sequence(&mut rng, &shape, *n, &norms, &value)).collect();
    let cache = cache(gpu, &shape, all.len(), &norms, longest);
    let width = heads * head_dim;
    for step_rows in STEPS {
        let rows: Vec<(usize, usize)> =
            step_rows.iter().flat_map(|&(s, from, n)| (from..from + n).map(move |t| (s, t))).collect();
        let [_, out] = step(gpu, shape, &cache, &all, &rows);
        for ((s, t), got) in rows.iter().zip(out.chunks(width)) {
            close(&format!("sequence {s} at {t}"), got, &all[*s].out[t * width..(t + 1) * width], tolerance(gpu))?;
        }
    }
    Ok(())
}

#[test]
fn mixed_batches_of_prompts_chunks_and_decodes_equal_the_oracle() {
    let cases: Vec<Case> = [(64, 8, 2), (128, 8, 1), (64, 2, 2), (128, 7, 1), (32, 4, 1), (64, 12, 1)]
        .into_iter()
        .zip([16, 5, 16, 16, 7, 16])
        .map(|((head_dim, heads, kv_heads), block_size)| Case { heads, kv_heads, head_dim, block_size })
        .collect();
    for gpu in every_variant() {
        each_case(&cases, |case| check_steps(&gpu, case, [1.0, 1.0], |_| 1.0));
    }
}

#[test]
fn large_and_small_values_equal_the_oracle() {
    let case = Case { heads: 8, kv_heads: 2, head_dim: 64, block_size: 16 };
    type Factor = fn(usize) -> f32;
    let factors: [([f32; 2], Factor); 7] = [
        ([1e6, 1e-6], |_| 1e6),
        ([1e-6, 1e6], |_| 1e-6),
        ([1e-12, 1e12], |_| 1e20),
        // Blocks of very different range, growing, shrinking and in turn.
        ([1.0, 1.0], |t| 10f32.powi(t as i32 / 12 - 6)),
        ([1.0, 1.0], |t| 10f32.powi(6 - t as i32 / 12)),
        ([1.0, 1.0], |t| if t / 64 % 2 == 0 { 1e-6 } else { 1e6 }),
        ([1.0, 1.0], |t| if t < 64 { 1e-20 } else { 0.0 }),
    ];
    let numbers: Vec<usize> = (0..factors.len()).collect();
    for gpu in every_variant() {
        each_case(&numbers, |i| check_steps(&gpu, &case, factors[*i].0, factors[*i].1));
    }
}

#[test]
fn scores_beyond_any_weight_stay_finite() {
    let shape = AttentionShape { heads: 4, kv_heads: 1, head_dim: 64, block_size: 16, max_blocks: 8 };
    let norms: Vec<f32> = vec![1e6; 128];
    for gpu in every_variant() {
        let mut rng = Rng::new(47);
        let all = [sequence(&mut rng, &shape, 100, &norms, |_| 1.0)];
        let cache = cache(&gpu, &shape, 1, &norms, 100);
        let rows: Vec<(usize, usize)> = (0..100).map(|t| (0, t)).collect();
        let [_, out] = step(&gpu, shape, &cache, &all, &rows);
        let worst = out.iter().fold(0f32, |m, v| if v.is_nan() { f32::INFINITY } else { m.max(v.abs()) });
        assert!(worst > 0.0 && worst < 3.01, "values within 3 became {worst}");
        // The first row has one key.
        assert!(rel_err(&out[..256], &all[0].out[..256]) <= tolerance(&gpu));
    }
}

#[test]
#[ignore = "repeats MSL on the CPU: portability/steps/msl-run.sh"]
fn prompts_on_matrices_of_8_equal_the_oracle() {
    let gpu = replayed::device(|tuning| tuning);
    let case = |(head_dim, heads, kv_heads), block_size| Case { heads, kv_heads, head_dim, block_size };
    each_case(&[case((64, 8, 2), 16), case((128, 7, 1), 5)], |case| check_steps(&gpu, case, [1.0, 1.0], |_| 1.0));
    // Blocks of very different range: sums are rescaled.
    let case = case((64, 8, 2), 16);
    each_case(&[(6, -1), (-6, 1)], |(first, step)| {
        check_steps(&gpu, &case, [1.0, 1.0], |t| 10f32.powi(first + step * (t as i32 / 12)))
    });
}
