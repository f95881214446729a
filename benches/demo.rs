//! The demonstration model: one sequence without adapter, and thirty sequences with five adapters in one batch.
//!
//! `cargo bench --bench demo [-- DEVICE]` prints the medians of five runs for every tier of the device.

use std::path::Path;
use std::time::Instant;

use wgmoe::{Adapter, Checkpoint, Engine, EngineOptions, Event, Gpu, GpuOptions, LoadOptions, Model, Request};

const FOLDER: &str = "examples/demo";
const ADAPTERS: [&str; 4] = ["shout", "mirror", "piglatin", "rot13"];
const RUNS: usize = 5;

fn main() {
    // cargo passes `--bench`.
    let device = std::env::args().skip(1).find(|a| !a.starts_with('-'));
    let best = Gpu::new(&GpuOptions { device: device.clone(), tier: None }).expect("a device");
    let info = best.info().clone();
    println!("{} | {} {}", info.name, info.driver, info.driver_info);
    for tier in &info.tiers {
        let gpu = Gpu::new(&GpuOptions { device: device.clone(), tier: Some(*tier) }).expect("a device");
        let mut engine = engine(&gpu);
        let one = median(|| decode_one(&mut engine));
        let thirty = median(|| batch_of_thirty(&mut engine));
        println!(
            "{tier:>9}: one sequence {one:7.1} tokens/s decoded | thirty sequences {thirty:7.1} tokens/s, prompts included in the time"
        );
    }
}

fn engine(gpu: &Gpu) -> Engine {
    let checkpoint = Checkpoint::open(&Path::new(FOLDER).join("base")).expect("the demonstration model");
    let (model, _) = Model::load(gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).expect("a model");
    let mut engine = Engine::new(gpu, model, EngineOptions::default()).expect("an engine");
    for name in ADAPTERS {
        let adapter =
            Adapter::open(&Path::new(FOLDER).join("adapters").join(name), engine.config()).expect("an adapter");
        engine.load_adapter(name, &adapter).expect("a slot");
    }
    engine
}

/// The demonstration tokenizer maps a printable byte to its place in the byte alphabet, a space and a newline behind it.
fn ids(text: &str) -> Vec<u32> {
    text.bytes()
        .map(|b| match b {
            b' ' => 222,
            b'\n' => 200,
            b => u32::from(b) - 31,
        })
        .collect()
}

/// Tokens a second of one greedy answer of 100 tokens, from its first token to its last.
fn decode_one(engine: &mut Engine) -> f64 {
    let request = Request { prompt: ids("mixture of experts\n"), max_tokens: 100, ..Request::default() };
    engine.submit(request).expect("a valid request");
    let (mut first, mut tokens) = (None, 0);
    drive(engine, |_| {
        first.get_or_insert_with(Instant::now);
        tokens += 1;
    });
    f64::from(tokens - 1) / first.expect("a token").elapsed().as_secs_f64()
}

/// Tokens a second of the thirty answers, from submission to the last token.
fn batch_of_thirty(engine: &mut Engine) -> f64 {
    let prompts = [
        "mixture of experts",
        "hello world",
        "low rank adapters",
        "every gpu speaks wgsl",
        "quick brown fox",
        "minus one",
    ];
    let begin = Instant::now();
    for prompt in prompts {
        for adapter in [None].into_iter().chain(ADAPTERS.map(Some)) {
            let adapter = adapter.map(|name| engine.adapter(name).expect("loaded above"));
            let prompt = ids(&format!("{prompt}\n"));
            engine
                .submit(Request { prompt, adapter, max_tokens: 64, stop_ids: vec![0], ..Request::default() })
                .expect("a valid request");
        }
    }
    let mut tokens = 0;
    drive(engine, |_| tokens += 1);
    f64::from(tokens) / begin.elapsed().as_secs_f64()
}

fn drive(engine: &mut Engine, mut on_token: impl FnMut(u32)) {
    while !engine.is_idle() {
        while engine.begin_step().expect("a step") {}
        for event in engine.wait().expect("a device") {
            match event {
                Event::Token { id, .. } => on_token(id),
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }
}

fn median(mut run: impl FnMut() -> f64) -> f64 {
    run();
    let mut rates: Vec<f64> = (0..RUNS).map(|_| run()).collect();
    rates.sort_by(f64::total_cmp);
    rates[RUNS / 2]
}
