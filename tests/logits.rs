//! The whole decoder against logits and greedy tokens of transformers and PEFT, alone and in a mixed batch.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/difference.rs"]
mod difference;

use std::collections::BTreeMap;
use std::path::Path;

use difference::largest_difference;
use safetensors::SafeTensors;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::{Adapter, Checkpoint, Engine, EngineOptions, Event, Gpu, LoadOptions, Model, Request};

const FOLDER: &str = "tests/data/tiny/qwen3_moe";
const CASES: [&str; 11] = [
    "base",
    "all_linear",
    "attn_only",
    "down_only",
    "experts2d",
    "experts2d_down_only",
    "experts2d_rslora",
    "experts2d_some",
    "experts3d",
    "gate_up_only",
    "layer_subset",
];
/// Where the reference's best two logits are closer than this, either token is right.
const NEAR_TIE: f32 = 2e-3;

/// A request's logits `[tokens, vocab]` and answer.
type Answer = (Vec<f32>, Vec<u32>);

fn engine(gpu: &Gpu) -> Engine {
    let checkpoint = Checkpoint::open(Path::new(FOLDER)).unwrap();
    let (model, _) = Model::load(gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap();
    let mut engine = Engine::new(gpu, model, EngineOptions { adapter_slots: 4, ..EngineOptions::default() }).unwrap();
    for case in &CASES[1..] {
        let adapter = Adapter::open(&Path::new(FOLDER).join("adapters").join(case), engine.config()).unwrap();
        engine.load_adapter(case, &adapter).unwrap();
    }
    engine
}

/// Runs all requests in one batch.
fn run(engine: &mut Engine, requests: &[(&str, Vec<u32>, usize)]) -> Vec<Answer> {
    let ids: Vec<_> = requests
        .iter()
        .map(|(case, prompt, max_tokens)| {
            let adapter = engine.adapter(case);
            let request = Request {
                prompt: prompt.clone(),
                adapter,
                max_tokens: *max_tokens,
                logits: true,
                ..Request::default()
            };
            engine.submit(request).unwrap()
        })
        .collect();
    let mut answers: BTreeMap<_, Answer> = ids.iter().map(|id| (*id, Answer::default())).collect();
    while !engine.is_idle() {
        engine.begin_step().unwrap();
        for event in engine.wait().unwrap() {
            match event {
                Event::Logits { sequence, rows, .. } => answers.get_mut(&sequence).unwrap().0.extend(rows),
                Event::Token { sequence, id } => answers.get_mut(&sequence).unwrap().1.push(id),
                Event::Finished { .. } => {}
                Event::Failed { error, .. } => panic!("{error}"),
            }
        }
    }
    ids.iter().map(|id| answers.remove(id).unwrap()).collect()
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Option<Vec<f32>> {
    Some(bytemuck::pod_collect_to_vec(file.tensor(name).ok()?.data()))
}

fn tokens(file: &SafeTensors<'_>, name: &str) -> Option<Vec<u32>> {
    Some(bytemuck::pod_collect_to_vec(file.tensor(name).ok()?.data()))
}

/// Greedy answers agree up to the first near-tie, which sends the rest another way. The logits of the path are read by
/// scoring the reference's own answer.
fn check_greedy(engine: &mut Engine, case: &str, prompt: &[u32], expected: &[u32], got: &[u32]) -> Result<(), String> {
    let Some(at) = expected.iter().zip(got).position(|(e, g)| e != g) else { return Ok(()) };
    let mut path = prompt.to_vec();
    path.extend(&expected[..at]);
    let (logits, _) = run(engine, &[(case, path.clone(), 0)]).remove(0);
    let row = &logits[(path.len() - 1) * 256..];
    let gap = (row[expected[at] as usize] - row[got[at] as usize]).abs();
    if gap < NEAR_TIE {
        Ok(())
    } else {
        Err(format!("token {at}: expected {}, got {}, gap {gap}", expected[at], got[at]))
    }
}

#[test]
fn logits_and_greedy_tokens_match_both_references_alone_and_mixed() {
    for gpu in device::every_tier() {
        let mut engine = engine(&gpu);
        let mut failures = Vec::new();
        for version in ["v4", "v5"] {
            let bytes = std::fs::read(format!("{FOLDER}/reference_{version}.safetensors")).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let prompts: Vec<Vec<u32>> = (0..3).map(|i| tokens(&file, &format!("input_ids.{i}")).unwrap()).collect();
            let present: Vec<&str> =
                CASES.into_iter().filter(|c| file.tensor(&format!("{c}.logits.0")).is_ok()).collect();
            assert!(present.len() >= 6, "{version}: {present:?}");
            let requests: Vec<(&str, Vec<u32>, usize)> = present
                .iter()
                .flat_map(|case| {
                    prompts.iter().enumerate().map(|(i, p)| (*case, p.clone(), if i == 0 { 12 } else { 0 }))
                })
                .collect();
            let mixed = run(&mut engine, &requests);
            for ((case, prompt, max_tokens), (mixed_logits, mixed_answer)) in requests.iter().zip(&mixed) {
                let (logits, answer) = run(&mut engine, &[(case, prompt.clone(), *max_tokens)]).remove(0);
                let i = prompts.iter().position(|p| p == prompt).unwrap();
                let what = format!("{} {version} {case} prompt {i}", gpu.tier());
                let expected = floats(&file, &format!("{case}.logits.{i}")).unwrap();
                let off = largest_difference(&logits, &expected);
                if off > common::logit_tolerance(&gpu) {
                    failures.push(format!("{what}: logits differ by {off}"));
                }
                let off = largest_difference(&logits, mixed_logits);
                let allowed = if gpu.capabilities().matrix { common::TOL_MATRIX_LOGITS } else { 1e-4 };
                if off > allowed {
                    failures.push(format!("{what}: alone and mixed differ by {off}"));
                }
                if *max_tokens > 0 {
                    let greedy = tokens(&file, &format!("{case}.greedy.0")).unwrap();
                    if let Err(e) = check_greedy(&mut engine, case, prompt, &greedy, &answer) {
                        failures.push(format!("{what}: {e}"));
                    }
                    if *mixed_answer != answer {
                        failures.push(format!("{what}: alone {answer:?}, mixed {mixed_answer:?}"));
                    }
                }
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}

/// Requests that make a step of few rows each: prompts alone and together, then rows that decode.
const FEW: [&[(&str, usize)]; 4] = [
    &[("all_linear", 1)],
    &[("base", 2)],
    &[("attn_only", 5)],
    &[("layer_subset", 3), ("base", 1), ("all_linear", 2), ("experts2d_rslora", 2)],
];

#[test]
fn few_rows_give_the_same_logits_where_lanes_lie_along_the_depth() {
    for gpu in device::every_along_depth() {
        let ordinary = Capabilities { along_depth: false, ..gpu.capabilities().clone() };
        let mut engines = [engine(&gpu.with_capabilities(ordinary)), engine(&gpu)];
        for few in FEW {
            let request = |(i, (case, rows)): (usize, &(&'static str, usize))| {
                (*case, (0..*rows as u32).map(|t| 7 + 31 * t + i as u32).collect::<Vec<u32>>(), 4)
            };
            let requests: Vec<_> = few.iter().enumerate().map(request).collect();
            let [expected, got] = engines.each_mut().map(|engine| run(engine, &requests));
            for ((case, prompt, _), (expected, got)) in requests.iter().zip(expected.iter().zip(&got)) {
                let off = largest_difference(&got.0, &expected.0);
                // Elsewhere some of these rows may run on cooperative matrices.
                let allowed = if gpu.capabilities().matrix { common::TOL_MATRIX_LOGITS } else { 1e-4 };
                assert!(off < allowed, "{} {case}: logits differ by {off}", gpu.tier());
                // What decoding led to is scored as a prompt, on the ordinary way.
                check_greedy(&mut engines[0], case, prompt, &expected.1, &got.1).unwrap();
            }
        }
    }
}

#[test]
fn adapters_of_attention_add_no_stage_to_few_rows() {
    for gpu in device::every_along_depth() {
        let mut engine = engine(&gpu);
        engine.labels();
        let mut labels = |case| {
            run(&mut engine, &[(case, vec![7, 8], 0)]);
            engine.labels()
        };
        let [base, adapted] = ["base", "attn_only"].map(&mut labels);
        let stem = |label: &String| label.split('[').next().unwrap_or_default().to_owned();
        let expanded = |label: &String| if stem(label) == "expand_norm" { "norm".to_owned() } else { stem(label) };
        assert_eq!(
            adapted.iter().map(expanded).filter(|stem| stem != "remap").collect::<Vec<_>>(),
            base.iter().map(stem).collect::<Vec<_>>()
        );
        let layers = engine.config().layers.len();
        let with = |word: &str| adapted.iter().filter(|label| label.split(' ').any(|w| w == word)).count();
        assert_eq!(
            (with("shrinks"), adapted.iter().filter(|l| l.starts_with("expand_norm[")).count()),
            (2 * layers, layers)
        );
        assert_eq!(with("lora"), layers, "{adapted:?}");
    }
}
