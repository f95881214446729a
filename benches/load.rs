//! Loading a checkpoint of more than 1 GiB with 128 experts: bytes, host memory and speed, beside reading everything and
//! beside `dd`.
//!
//! `cargo bench --bench load [-- DEVICE]` writes the checkpoint three times (a tensor for each expert, fused arrays, fused
//! arrays in shards) to the temporary folder, so it needs 4 GB there, and reads it from the page cache.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::{Map, Value, json};
use wgmoe::placement::{PlacementRule, Topology};
use wgmoe::upload::{StreamOptions, Streamed};
use wgmoe::{Checkpoint, Gpu, GpuOptions, LoadOptions, Model};

const EXPERTS: usize = 128;
const HIDDEN: usize = 1024;
const WIDTH: usize = 768;
const LAYERS: usize = 2;
const VOCAB: usize = 4096;
const RANKS: usize = 8;
const RUNS: usize = 7;

fn main() {
    // cargo passes `--bench`.
    let device = std::env::args().skip(1).find(|a| !a.starts_with('-'));
    let gpu = Gpu::new(&GpuOptions { device, tier: None }).expect("a device");
    println!("{} | {} {}", gpu.info().name, gpu.info().driver, gpu.info().driver_info);
    let root = tempfile::tempdir().expect("a temporary folder");
    for (name, fused, shards) in [("per expert", false, 1), ("fused", true, 1), ("fused shards", true, 3)] {
        let dir = root.path().join(name.replace(' ', "-"));
        let files = write_checkpoint(&dir, fused, shards);
        let checkpoint = Checkpoint::open(&dir).expect("the checkpoint just written");
        println!("\n{name}: {:.2} GB in {} files", gigabytes(size(&files)), files.len());
        one_rank_of_eight(&gpu, &checkpoint);
        if shards == 1 {
            speed(&gpu, &checkpoint, &files);
        }
        std::fs::remove_dir_all(&dir).expect("a folder of our own");
    }
}

/// What one rank reads, next to everything, and the host memory it takes.
fn one_rank_of_eight(gpu: &Gpu, checkpoint: &Checkpoint) {
    for (what, ep) in [("all", 1), ("ep 8, linear", RANKS), ("ep 8, round-robin", RANKS)] {
        let placement = if what.ends_with("robin") { PlacementRule::RoundRobin } else { PlacementRule::Linear };
        let topology = Topology::new(None, Some(ep), ep / 2).expect("a rank");
        let options = LoadOptions { topology, placement, ..LoadOptions::default() };
        let (streamed, anonymous) = into_sink(gpu, checkpoint, &options);
        let expected = replicated_bytes() + expert_bytes() / ep as u64;
        println!(
            "  {what:<18} read {:>13} bytes (share and replicated part: {expected}) | staging {:>5.1} MiB, resident memory {:>+6.1} MiB",
            streamed.bytes_read,
            streamed.peak_staging_bytes as f64 / (1 << 20) as f64,
            anonymous as f64 / 1024.0,
        );
        assert_eq!(streamed.bytes_read, expected, "a rank reads its share, the replicated part, and nothing else");
    }
}

/// Reads into nothing: what was read, and by how many KiB the process's own memory grew meanwhile.
fn into_sink(gpu: &Gpu, checkpoint: &Checkpoint, options: &LoadOptions) -> (Streamed, i64) {
    let (_model, uploader) = Model::begin_load(gpu, checkpoint, options).expect("room");
    let before = anonymous_kib();
    let mut peak = before;
    let streamed = uploader
        .run_into(&options.stream, &mut |_, _| {}, &mut |_, _, _| {
            peak = peak.max(anonymous_kib());
            Ok(())
        })
        .expect("a readable file");
    (streamed, peak - before)
}

/// Bytes a second of `dd`, of reading into nothing, and of loading into device memory; all from the page cache.
fn speed(gpu: &Gpu, checkpoint: &Checkpoint, files: &[PathBuf]) {
    let n_bytes = size(files) as f64;
    let (mut dd, mut sink, mut device) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        dd.push(n_bytes / seconds(|| files.iter().for_each(|f| run_dd(f))));
        let (_model, uploader) = Model::begin_load(gpu, checkpoint, &LoadOptions::default()).expect("room");
        sink.push(
            n_bytes
                / seconds(|| {
                    let stream = StreamOptions::default();
                    uploader.run_into(&stream, &mut |_, _| {}, &mut |_, _, _| Ok(())).expect("a readable file");
                }),
        );
        let load = || drop(Model::load(gpu, checkpoint, &LoadOptions::default(), &mut |_, _| {}).expect("room"));
        device.push(n_bytes / seconds(load));
    }
    let [dd, sink, device] = [dd, sink, device].map(median);
    println!(
        "  dd {:.2} GB/s | file to staging {:.2} GB/s, {:.0} % of dd | into device memory {:.2} GB/s",
        dd / 1e9,
        sink / 1e9,
        100.0 * sink / dd,
        device / 1e9
    );
}

fn run_dd(file: &Path) {
    let status = Command::new("dd")
        .arg(format!("if={}", file.display()))
        .args(["of=/dev/null", "bs=4M", "status=none"])
        .status()
        .expect("dd");
    assert!(status.success());
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Memory of this process that is no file, in KiB; 0 where the system does not tell.
fn anonymous_kib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    line.and_then(|l| l.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0)
}

fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

fn size(files: &[PathBuf]) -> u64 {
    files.iter().map(|f| std::fs::metadata(f).expect("a file of our own").len()).sum()
}

fn expert_bytes() -> u64 {
    (LAYERS * EXPERTS * 3 * HIDDEN * WIDTH * 2) as u64
}

fn replicated_bytes() -> u64 {
    tensors(true).iter().filter(|(name, _)| !name.contains(".experts.")).map(|(_, shape)| n_bytes(shape)).sum()
}

fn n_bytes(shape: &[usize]) -> u64 {
    2 * shape.iter().product::<usize>() as u64
}

/// Name and shape of every tensor.
fn tensors(fused: bool) -> Vec<(String, Vec<usize>)> {
    let (d, f, e) = (HIDDEN, WIDTH, EXPERTS);
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, d]),
        ("lm_head.weight".to_owned(), vec![VOCAB, d]),
        ("model.norm.weight".to_owned(), vec![d]),
    ];
    for layer in 0..LAYERS {
        let mut push = |name: &str, shape: &[usize]| all.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        push("input_layernorm.weight", &[d]);
        push("post_attention_layernorm.weight", &[d]);
        for (name, shape) in [("q", [1024, d]), ("k", [256, d]), ("v", [256, d]), ("o", [d, 1024])] {
            push(&format!("self_attn.{name}_proj.weight"), &shape);
        }
        push("self_attn.q_norm.weight", &[128]);
        push("self_attn.k_norm.weight", &[128]);
        push("mlp.gate.weight", &[e, d]);
        if fused {
            push("mlp.experts.gate_up_proj", &[e, 2 * f, d]);
            push("mlp.experts.down_proj", &[e, d, f]);
            continue;
        }
        for expert in 0..e {
            for (part, shape) in [("gate", [f, d]), ("up", [f, d]), ("down", [d, f])] {
                push(&format!("mlp.experts.{expert}.{part}_proj.weight"), &shape);
            }
        }
    }
    all
}

/// Writes the folder and returns its weight files.
fn write_checkpoint(dir: &Path, fused: bool, shards: usize) -> Vec<PathBuf> {
    std::fs::create_dir_all(dir).expect("a temporary folder");
    let config = json!({
        "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_experts": EXPERTS,
        "num_experts_per_tok": 8, "moe_intermediate_size": WIDTH, "intermediate_size": WIDTH, "vocab_size": VOCAB,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 4096, "hidden_act": "silu", "norm_topk_prob": true,
        "tie_word_embeddings": false, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": false,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).expect("room for a file");
    let all = tensors(fused);
    let mut map = Map::new();
    let mut paths = Vec::new();
    for (i, part) in all.chunks(all.len().div_ceil(shards)).enumerate() {
        let name = if shards == 1 { "model.safetensors".to_owned() } else { format!("model-{i}.safetensors") };
        map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), Value::from(name.as_str()))));
        let path = dir.join(name);
        write_file(&path, part);
        paths.push(path);
    }
    if shards > 1 {
        let index = json!({ "weight_map": map }).to_string();
        std::fs::write(dir.join("model.safetensors.index.json"), index).expect("room for a file");
    }
    paths
}

fn write_file(path: &Path, tensors: &[(String, Vec<usize>)]) {
    let mut header = Map::new();
    let mut at = 0;
    for (name, shape) in tensors {
        let end = at + n_bytes(shape);
        header.insert(name.clone(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut file = BufWriter::new(File::create(path).expect("room for a file"));
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("room for a file");
    file.write_all(header.as_bytes()).expect("room for a file");
    // The values do not matter to a reader, only that no page is a hole.
    let block: Vec<u8> = (0..1u32 << 20).flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let mut left = at as usize;
    while left > 0 {
        let n = left.min(block.len());
        file.write_all(&block[..n]).expect("room for a file");
        left -= n;
    }
    file.flush().expect("room for a file");
}
