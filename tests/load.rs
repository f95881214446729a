//! Loading by rank: what every rank reads, from every kind of file, and that what it holds adds up to the whole layer.

#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
mod common;
mod files;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Rng, TOL_F32, rel_err};
use files::zip::torch_save;
use files::{TINY, Table, Tensor, data, encode, folder, json_file, patched, read};
use gpu_run::{Output, run, upload};
use serde_json::json;
use tempfile::TempDir;
use wgmoe::checkpoint::Block;
use wgmoe::dtype::DType;
use wgmoe::family::class::Group;
use wgmoe::layer::MoeTensors;
use wgmoe::placement::{PlacementRule, Topology};
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::read::{ReadPlan, ScalePolicy, StoredLayout};
use wgmoe::plan::resident::{self, Stack};
use wgmoe::upload::{StreamOptions, Uploader};
use wgmoe::{Checkpoint, ErrorKind, Gpu, LoadOptions, Model};

const TOKENS: usize = 5;
/// Layers of the tiny model that have experts.
const MOE_LAYERS: [usize; 2] = [0, 2];

/// The experts of each layer in one array each.
fn fused(tensors: &[Tensor]) -> Vec<Tensor> {
    let mut arrays = BTreeMap::<String, Tensor>::new();
    let mut rest = Vec::new();
    for tensor in tensors {
        let Some((module, name)) = tensor.name.split_once(".experts.") else {
            rest.push(tensor.clone());
            continue;
        };
        let (expert, part) = name.split_once('.').unwrap();
        let part = part.strip_suffix("_proj.weight").unwrap();
        let array = if part == "down" { "down_proj" } else { "gate_up_proj" };
        let array = arrays.entry(format!("{module}.experts.{array}")).or_insert_with_key(|name| {
            let [out, inn] = tensor.shape[..] else { unreachable!() };
            let out = if part == "down" { out } else { 2 * out };
            Tensor::zeros(name, &tensor.dtype, &[8, out, inn], 2)
        });
        let n = tensor.bytes.len();
        let row = expert.parse::<usize>().unwrap() * if part == "down" { 1 } else { 2 } + usize::from(part == "up");
        array.bytes[row * n..(row + 1) * n].copy_from_slice(&tensor.bytes);
    }
    rest.extend(arrays.into_values());
    rest
}

/// Two files and their index.
fn shards(tensors: &[Tensor]) -> Vec<(&'static str, Vec<u8>)> {
    let (a, b) = tensors.split_at(tensors.len() / 2);
    let names = a.iter().map(|t| (t, "a.safetensors")).chain(b.iter().map(|t| (t, "b.safetensors")));
    let map: serde_json::Map<_, _> = names.map(|(t, file)| (t.name.clone(), file.into())).collect();
    let index = json!({"weight_map": map}).to_string().into();
    vec![("model.safetensors.index.json", index), ("a.safetensors", encode(a)), ("b.safetensors", encode(b))]
}

/// The tiny model as every kind of folder.
fn folders() -> Vec<(&'static str, TempDir)> {
    let tensors = read(&data(TINY).join("model.safetensors"));
    let config = std::fs::read(data(TINY).join("config.json")).unwrap();
    let make = |files: Vec<(&str, Vec<u8>)>| {
        let mut all = vec![("config.json", config.clone())];
        all.extend(files);
        folder(&all)
    };
    vec![
        ("per expert", make(vec![("model.safetensors", encode(&tensors))])),
        ("fused", make(vec![("model.safetensors", encode(&fused(&tensors)))])),
        ("fused shards", make(shards(&fused(&tensors)))),
        ("torch", make(vec![("pytorch_model.bin", torch_save(&tensors))])),
    ]
}

/// Placements over `groups` groups of experts: the last gives experts several owners.
fn rules(groups: usize) -> Vec<PlacementRule> {
    let copies = (0..8).map(|e| (0..1 + e % groups).map(|i| (e + i) % groups).collect()).collect();
    vec![PlacementRule::Linear, PlacementRule::RoundRobin, PlacementRule::Table(copies)]
}

/// What a rank reads of attention in all three layers: bf16 weights for 4 heads of 24, of which 2 of keys and values.
fn attention_bytes(tp: Option<usize>) -> u64 {
    let (heads, kv_heads) = match tp {
        Some(2) => (2, 1),
        Some(4) => (1, 1),
        _ => (4, 2),
    };
    3 * 2 * 64 * 24 * 2 * (heads + kv_heads)
}

/// The output of one layer of a loaded model.
fn forward(gpu: &Gpu, model: &Model, layer: usize, x: &[f32]) -> Vec<f32> {
    let out = Output::new(gpu, x.len(), f32::NAN);
    let (x, status) = (upload(gpu, x), upload(gpu, &[0u32]));
    let tensors = MoeTensors { tokens: TOKENS, x: &x, out: &out.view, accumulate: false, status: &status, lora: None };
    run(gpu, |rec, pass| model.moe_layer(layer).unwrap().record(rec, pass, &tensors));
    out.read(gpu)
}

#[test]
fn every_rank_reads_its_share_and_the_ranks_add_up() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    let mut table = Table::default();
    for (format, dir) in folders() {
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let x = Rng::new(5).floats(TOKENS * checkpoint.config().hidden);
        let (whole, _) = Model::load(&gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap();
        let expected = MOE_LAYERS.map(|layer| forward(&gpu, &whole, layer, &x));
        // Every format reads the same bytes, so the products are shared out thoroughly only once.
        let worlds: &[usize] = if format == "per expert" { &[1, 2, 3, 4, 8] } else { &[3, 4] };
        let worlds =
            worlds.iter().flat_map(|&tp| (1..=tp).filter(move |ep| tp % ep == 0).map(move |ep| (Some(tp), ep)));
        for (tp, ep) in worlds.chain([(None, 2), (None, 4)]) {
            for rule in rules(ep) {
                let case = format!("{format}, tp {tp:?}, ep {ep}, {rule:?}");
                let mut sums = expected.each_ref().map(|e| vec![0.0; e.len()]);
                for rank in 0..tp.unwrap_or(ep) {
                    let topology = Topology::new(tp, Some(ep), rank).unwrap();
                    let options = LoadOptions { topology, placement: rule.clone(), ..LoadOptions::default() };
                    let before = checkpoint.bytes_read();
                    let (model, streamed) = Model::load(&gpu, &checkpoint, &options, &mut |_, _| {}).unwrap();
                    let layout = StoredLayout::of(checkpoint.config());
                    let plan = ReadPlan::new(checkpoint.headers(), &layout, &rule, topology, ScalePolicy::Owned);
                    let counts = [streamed.bytes_read, checkpoint.bytes_read() - before];
                    let plan = plan.unwrap();
                    let planned = plan.read_bytes();
                    let of_attention = plan.bills[&Group::Attention].read_bytes;
                    let want = attention_bytes(tp);
                    table.holds(&case, of_attention == want, format_args!("attention {of_attention}, expected {want}"));
                    table.holds(&case, counts == [planned; 2], format_args!("read {counts:?}, planned {planned}"));
                    table.holds(&case, streamed.bytes_written == model.bytes_resident(), "buffers are not full");
                    let stacks = resident::stacks(&checkpoint, &rule, topology).unwrap();
                    let kept: u64 = stacks.iter().map(Stack::n_bytes).sum();
                    table.holds(&case, kept == model.bytes_resident(), format_args!("planned to keep {kept}"));
                    for (sum, layer) in sums.iter_mut().zip(MOE_LAYERS) {
                        for (sum, part) in sum.iter_mut().zip(forward(&gpu, &model, layer, &x)) {
                            *sum += part;
                        }
                    }
                }
                for (sum, expected) in sums.iter().zip(&expected) {
                    let error = rel_err(sum, expected);
                    table.holds(&case, error <= TOL_F32, format_args!("differs by {error}"));
                }
            }
        }
    }
    table.finish();
}

/// The tiny model with experts of `width` columns, or of all 40 with zeros past `width`.
fn narrow(width: usize, cut: bool) -> TempDir {
    let mut tensors = read(&data(TINY).join("model.safetensors"));
    for tensor in tensors.iter_mut().filter(|t| t.name.contains(".experts.")) {
        let down = tensor.name.contains("down_proj");
        let [rows, cols] = tensor.shape[..] else { unreachable!() };
        let row_bytes = cols * 2;
        let mut bytes = Vec::new();
        for row in 0..rows {
            let stored = &tensor.bytes[row * row_bytes..(row + 1) * row_bytes];
            let kept = if down {
                width * 2
            } else if row < width {
                row_bytes
            } else {
                0
            };
            bytes.extend_from_slice(&stored[..kept]);
            if !cut {
                bytes.resize((row + 1) * row_bytes, 0);
            }
        }
        tensor.bytes = bytes;
        if cut {
            tensor.shape[usize::from(down)] = width;
        }
    }
    let config = json_file(&data(TINY).join("config.json"));
    let config = if cut { patched(config, &json!({"moe_intermediate_size": width})) } else { config };
    folder(&[("config.json", config.to_string().into()), ("model.safetensors", encode(&tensors))])
}

#[test]
fn experts_of_any_width_are_padded_with_zeros() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    for width in [33, 36] {
        let outputs = [true, false].map(|cut| {
            let dir = narrow(width, cut);
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            let (model, _) = Model::load(&gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap();
            let x = Rng::new(5).floats(TOKENS * checkpoint.config().hidden);
            forward(&gpu, &model, MOE_LAYERS[0], &x)
        });
        assert!(outputs[0] == outputs[1] && outputs[0].iter().any(|v| *v != 0.0), "{width}");
    }
}

#[test]
fn a_load_can_be_cancelled_and_staging_is_bounded() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    let checkpoint = Checkpoint::open(&data(TINY)).unwrap();
    let cancel = AtomicBool::new(false);
    let mut calls = 0;
    let stream = StreamOptions { cancel: Some(&cancel), ..StreamOptions::default() };
    let options = LoadOptions { stream, ..LoadOptions::default() };
    let result = Model::load(&gpu, &checkpoint, &options, &mut |done, total| {
        assert!(done <= total);
        calls += 1;
        cancel.store(calls == 3, Ordering::Relaxed);
    });
    assert_eq!((result.unwrap_err().kind(), calls), (ErrorKind::Cancelled, 3));

    for staging_bytes in [1, 4 << 20, 32 << 20] {
        let stream = StreamOptions { readers: 3, staging_bytes, cancel: None };
        let options = LoadOptions { stream, ..LoadOptions::default() };
        let (_, streamed) = Model::load(&gpu, &checkpoint, &options, &mut |_, _| {}).unwrap();
        assert!(streamed.peak_staging_bytes <= staging_bytes.max(4 << 20), "{streamed:?}");
    }
}

#[test]
fn a_file_that_shrank_is_an_error() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        let to: PathBuf = dir.path().join(name);
        std::fs::copy(data(TINY).join(name), &to).unwrap();
        to
    };
    copy("config.json");
    let weights = copy("model.safetensors");
    // Long runs are read by position, so that the end of the file is noticed.
    let tensors = read(&weights);
    let big = tensors.iter().max_by_key(|t| t.bytes.len()).unwrap();
    assert!(big.bytes.len() >= 32 << 10, "{}", big.name);
    let mut ordered: Vec<_> = tensors.iter().filter(|t| t.name != big.name).cloned().collect();
    ordered.push(big.clone());
    std::fs::write(&weights, encode(&ordered)).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let size = std::fs::metadata(&weights).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&weights).unwrap().set_len(size - 64).unwrap();
    let error = Model::load(&gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap_err();
    let text = error.to_string();
    assert!(error.kind() == ErrorKind::Io && text.contains("model.safetensors") && text.contains(&big.name), "{text}");
}

#[test]
fn weights_are_measured_for_the_matrix_tier_wherever_they_are_cut() {
    let Some(gpu) = device::every_tier().into_iter().next() else { return };
    let own = gpu.capabilities().clone();
    // Matrices of 2 MiB in two blocks, the lower one narrower: chunks and bindings end within them.
    let [rows, cols, narrow] = [1024, 1024, 1000];
    let mut values = Rng::new(8).floats(3 * rows * cols);
    let mut measured = |at: usize, value: f32, binding: u64, matrix: bool| {
        let before = std::mem::replace(&mut values[at], value);
        let bytes = DType::Bf16.encode(&values);
        values[at] = before;
        let limit = own.max_binding_bytes.min(binding);
        let gpu = gpu.with_capabilities(Capabilities { matrix, max_binding_bytes: limit, ..own.clone() });
        let mut uploader = Uploader::new(&gpu);
        let blocks = |m: usize| {
            let upper = &bytes[m * rows * cols * 2..][..rows * cols];
            let lower = &bytes[(2 * m + 1) * rows * cols..][..rows / 2 * narrow * 2];
            let block = |cols, bytes| Block::borrowed(DType::Bf16, [rows / 2, cols], bytes);
            Ok(vec![block(cols, upper)?, block(narrow, lower)?])
        };
        let weights = uploader.stack("measured", 3, [rows, cols], &blocks).unwrap();
        assert_eq!(weights.magnitude.exponent(), None, "nothing has been read");
        uploader.run_into(&StreamOptions::default(), &mut |_, _| {}, &mut |_, _, _| Ok(())).unwrap();
        weights.magnitude.exponent()
    };
    // The last value of each half of each matrix.
    let ends = (0..3).flat_map(|m| [rows / 2 * cols, rows / 2 * (cols + narrow)].map(|end| m * rows * cols + end - 1));
    for at in ends {
        for binding in [u64::MAX, 1 << 20, 5 << 18] {
            assert_eq!(measured(at, 0.5, binding, true), Some(0), "{at} {binding}");
            assert_eq!(measured(at, -100_000.0, binding, true), Some(-2), "{at} {binding}");
            assert_eq!(measured(at, f32::NAN, binding, true), None, "{at} {binding}");
        }
    }
    assert_eq!(measured(0, 0.5, u64::MAX, false), None, "without the tier");
}
