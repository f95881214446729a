//! Adapters as PEFT saved them, of every version and layout that its models have, against the logits that PEFT computed.

#[path = "common/device.rs"]
mod device;
#[path = "common/difference.rs"]
mod difference;

use std::path::{Path, PathBuf};

use difference::largest_difference;
use safetensors::SafeTensors;
use wgmoe::{Adapter, Checkpoint, Engine, EngineOptions, Event, Gpu, LoadOptions, Model, Request};

const FOLDER: &str = "tests/data/peft";

/// The cases whose model has a decoder here: (name, folder, base).
fn cases() -> Vec<(String, PathBuf, PathBuf)> {
    let mut all: Vec<_> = std::fs::read_dir(FOLDER)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("qwen3_moe__")))
        .map(|path| {
            let meta = std::fs::read_to_string(path.join("meta.json")).unwrap();
            let meta: serde_json::Value = serde_json::from_str(&meta).unwrap();
            let base = Path::new(FOLDER).join(meta["base"].as_str().unwrap());
            (path.file_name().unwrap().to_string_lossy().into_owned(), path, base)
        })
        .collect();
    all.sort();
    all
}

/// Logits `[sum of tokens, vocab]` of prompts with the adapter, or with the base, in one batch.
fn logits(gpu: &Gpu, base: &Path, adapter: Option<&Path>, prompts: &[Vec<u32>]) -> Vec<f32> {
    let checkpoint = Checkpoint::open(base).unwrap();
    let (model, _) = Model::load(gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap();
    let mut engine = Engine::new(gpu, model, EngineOptions::default()).unwrap();
    let adapter = adapter.map(|path| {
        let adapter = Adapter::open(path, engine.config()).unwrap();
        engine.load_adapter("it", &adapter).unwrap()
    });
    let ids: Vec<_> = prompts
        .iter()
        .map(|p| engine.submit(Request { prompt: p.clone(), adapter, logits: true, ..Request::default() }).unwrap())
        .collect();
    let mut parts = vec![Vec::new(); ids.len()];
    while !engine.is_idle() {
        engine.begin_step().unwrap();
        for event in engine.wait().unwrap() {
            match event {
                Event::Logits { sequence, rows, .. } => {
                    parts[ids.iter().position(|id| *id == sequence).unwrap()].extend(rows);
                }
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }
    parts.concat()
}

#[test]
fn logits_with_every_saved_adapter_equal_those_of_peft() {
    let cases = cases();
    assert!(cases.len() >= 9, "{}", cases.len());
    let mut failures = Vec::new();
    for gpu in device::every_tier() {
        for (name, folder, base) in &cases {
            let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let ids = file.tensor("input_ids").unwrap();
            let width = ids.shape()[1];
            let ids: Vec<u32> = match ids.dtype() {
                safetensors::Dtype::I64 => {
                    bytemuck::pod_collect_to_vec::<u8, i64>(ids.data()).into_iter().map(|i| i as u32).collect()
                }
                _ => bytemuck::pod_collect_to_vec(ids.data()),
            };
            let prompts: Vec<Vec<u32>> = ids.chunks(width).map(<[u32]>::to_vec).collect();
            for (what, adapter) in [("logits_base", None), ("logits_adapter", Some(folder.join("adapter")))] {
                let expected: Vec<f32> = bytemuck::pod_collect_to_vec(file.tensor(what).unwrap().data());
                let got = logits(&gpu, base, adapter.as_deref(), &prompts);
                assert_eq!(got.len(), expected.len(), "{name} {what}");
                let off = largest_difference(&got, &expected);
                // NaN compares as false.
                if off > if gpu.capabilities().matrix { 5e-2 } else { 1e-4 } {
                    failures.push(format!("{} {name} {what}: off by {off}", gpu.tier()));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
