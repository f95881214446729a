//! The demonstration model against its references: a sample of the phrases and of the perplexities. `make demo-full`
//! does them all.

#[path = "common/device.rs"]
mod device;
#[path = "common/difference.rs"]
mod difference;

use std::collections::BTreeMap;
use std::path::Path;

use difference::largest_difference;
use safetensors::SafeTensors;
use wgmoe::{Adapter, Checkpoint, Engine, EngineOptions, Event, Gpu, LoadOptions, Model, Request};

const FOLDER: &str = "examples/demo";
const ADAPTERS: [&str; 4] = ["shout", "mirror", "piglatin", "rot13"];

fn engine(gpu: &Gpu) -> Engine {
    let checkpoint = Checkpoint::open(&Path::new(FOLDER).join("base")).unwrap();
    let (model, _) = Model::load(gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap();
    let mut engine = Engine::new(gpu, model, EngineOptions::default()).unwrap();
    for name in ADAPTERS {
        let adapter = Adapter::open(&Path::new(FOLDER).join("adapters").join(name), engine.config()).unwrap();
        engine.load_adapter(name, &adapter).unwrap();
    }
    engine
}

/// (tokens, logits) of each request, all in one batch.
fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<(Vec<u32>, Vec<f32>)> {
    let ids: Vec<_> = requests.into_iter().map(|r| engine.submit(r).unwrap()).collect();
    let mut answers: BTreeMap<_, (Vec<u32>, Vec<f32>)> = BTreeMap::new();
    while !engine.is_idle() {
        while engine.begin_step().unwrap() {}
        for event in engine.wait().unwrap() {
            match event {
                Event::Token { sequence, id } => answers.entry(sequence).or_default().0.push(id),
                Event::Logits { sequence, rows, .. } => answers.entry(sequence).or_default().1.extend(rows),
                Event::Failed { error, .. } => panic!("{error}"),
                Event::Finished { .. } => {}
            }
        }
    }
    ids.iter().map(|id| answers.remove(id).unwrap_or_default()).collect()
}

fn numbers(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

#[test]
fn thirty_greedy_answers_in_one_batch_equal_the_reference_token_for_token() {
    let text = std::fs::read_to_string(format!("{FOLDER}/reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    let greedy = reference["greedy"].as_array().unwrap();
    assert_eq!(greedy.len(), 30);
    let bytes = std::fs::read(format!("{FOLDER}/reference.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for gpu in device::every_tier() {
        let mut engine = engine(&gpu);
        let requests = greedy
            .iter()
            .map(|g| Request {
                prompt: numbers(&g["prompt_ids"]),
                adapter: g["adapter"].as_str().map(|name| engine.adapter(name).unwrap()),
                max_tokens: 64,
                stop_ids: vec![0],
                logits: true,
                ..Request::default()
            })
            .collect();
        let answers = run(&mut engine, requests);
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        for (g, (tokens, logits)) in greedy.iter().zip(&answers) {
            assert_eq!(*tokens, numbers(&g["output_ids"]), "{} {g}", gpu.tier());
            let name = g["adapter"].as_str().unwrap_or("base");
            let k = seen.entry(name).or_default();
            let expected: Vec<f32> =
                bytemuck::pod_collect_to_vec(file.tensor(&format!("{name}.logits.{k}")).unwrap().data());
            *k += 1;
            assert_eq!(logits.len(), expected.len());
            // The trained model's logits reach 50, so the bound is relative to them.
            let most = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
            let off = largest_difference(logits, &expected);
            // With f16 operands a router's close call may go the other way.
            let allowed = if gpu.capabilities().matrix { 5e-2 } else { 1e-4 } * most;
            assert!(off <= allowed, "{} {name} {k}: off by {off} of {most}", gpu.tier());
        }
    }
}

#[test]
fn perplexities_of_every_adapter_on_a_task_of_its_own_and_of_another_match() {
    let text = std::fs::read_to_string(format!("{FOLDER}/reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    let bytes = std::fs::read(format!("{FOLDER}/eval.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let names = [None, Some("shout"), Some("mirror"), Some("piglatin"), Some("rot13")];
    let tasks = ["echo", "shout", "mirror", "piglatin", "rot13"];
    // The best tier does; the baseline tier runs all pairs in `make demo-full`.
    for gpu in device::every_tier().into_iter().rev().take(1) {
        let mut engine = engine(&gpu);
        for (i, name) in names.iter().enumerate() {
            for task in [tasks[i], tasks[(i + 1) % 5]] {
                let ids: Vec<i32> = bytemuck::pod_collect_to_vec(file.tensor(&format!("{task}.ids")).unwrap().data());
                let starts: Vec<i32> =
                    bytemuck::pod_collect_to_vec(file.tensor(&format!("{task}.answer_start")).unwrap().data());
                let width = ids.len() / starts.len();
                let rows: Vec<Vec<u32>> =
                    ids.chunks(width).map(|r| r.iter().filter(|t| **t >= 0).map(|t| *t as u32).collect()).collect();
                let adapter = name.map(|n| engine.adapter(n).unwrap());
                let requests = rows
                    .iter()
                    .map(|r| Request { prompt: r.clone(), adapter, logits: true, ..Request::default() })
                    .collect();
                let (mut nll, mut tokens) = (0.0, 0);
                for ((row, start), (_, logits)) in rows.iter().zip(&starts).zip(run(&mut engine, requests)) {
                    for at in *start as usize..row.len() {
                        let before = &logits[(at - 1) * 258..at * 258];
                        let most = before.iter().fold(f64::MIN, |m, v| m.max(f64::from(*v)));
                        let sum: f64 = before.iter().map(|v| (f64::from(*v) - most).exp()).sum();
                        nll -= f64::from(before[row[at] as usize]) - most - sum.ln();
                        tokens += 1;
                    }
                }
                let got = (nll / f64::from(tokens)).exp();
                let expected = reference["perplexity"][name.unwrap_or("base")][task].as_f64().unwrap();
                let bound = if expected > 1000.0 { 0.01 } else { 0.005 };
                assert!((got / expected - 1.0).abs() < bound, "{name:?} on {task}: {got}, expected {expected}");
            }
        }
    }
}
