//! The engine: sequences join, leave and are cancelled between steps, and none of it changes anybody's numbers.

#[path = "common/device.rs"]
mod device;
#[path = "common/difference.rs"]
mod difference;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use difference::largest_difference;
use wgmoe::adapter::{Factor, Matrix, Site};
use wgmoe::dtype::DType;
use wgmoe::engine::SequenceId;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::{
    Adapter, Checkpoint, Engine, EngineOptions, ErrorKind, Event, FinishReason, Gpu, LoadOptions, Model, Request,
    Sampling,
};

const FOLDER: &str = "examples/demo";
const ADAPTERS: [&str; 4] = ["shout", "mirror", "piglatin", "rot13"];

fn engine(gpu: &Gpu, options: EngineOptions) -> Engine {
    let checkpoint = Checkpoint::open(&Path::new(FOLDER).join("base")).unwrap();
    let (model, _) = Model::load(gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap();
    Engine::new(gpu, model, options).unwrap()
}

fn adapter(engine: &Engine, name: &str) -> Adapter {
    Adapter::open(&Path::new(FOLDER).join("adapters").join(name), engine.config()).unwrap()
}

fn with_adapters(gpu: &Gpu, options: EngineOptions) -> Engine {
    let mut engine = engine(gpu, options);
    for name in ADAPTERS {
        let adapter = adapter(&engine, name);
        engine.load_adapter(name, &adapter).unwrap();
    }
    engine
}

/// The demonstration tokenizer: printable bytes from 2 on, then space and newline in the byte alphabet.
fn ids(text: &str) -> Vec<u32> {
    let id = |b: u8| match b {
        b' ' => 222,
        b'\n' => 200,
        b => u32::from(b) - 31,
    };
    text.bytes().map(id).chain([200]).collect()
}

fn text(tokens: &[u32]) -> String {
    let byte = |t: &u32| match t {
        0 => '.',
        222 => ' ',
        t => char::from_u32(t + 31).unwrap_or('?'),
    };
    tokens.iter().map(byte).collect()
}

fn greedy(engine: &Engine, adapter: Option<&str>, prompt: &str) -> Request {
    Request {
        prompt: ids(prompt),
        adapter: adapter.map(|name| engine.adapter(name).unwrap()),
        max_tokens: 64,
        stop_ids: vec![0],
        ..Request::default()
    }
}

#[derive(Default)]
struct Outcome {
    tokens: BTreeMap<SequenceId, Vec<u32>>,
    ends: BTreeMap<SequenceId, FinishReason>,
}

impl Outcome {
    fn take(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Token { sequence, id } => {
                    assert!(!self.ends.contains_key(&sequence), "a token after the end");
                    self.tokens.entry(sequence).or_default().push(id);
                }
                Event::Finished { sequence, reason } => {
                    assert!(self.ends.insert(sequence, reason).is_none(), "two ends")
                }
                Event::Failed { error, .. } => panic!("{error}"),
                Event::Logits { .. } => {}
            }
        }
    }
}

fn drain(engine: &mut Engine, outcome: &mut Outcome) {
    while !engine.is_idle() {
        while engine.begin_step().unwrap() {}
        outcome.take(engine.wait().unwrap());
    }
}

fn answer(engine: &mut Engine, request: Request) -> Vec<u32> {
    let id = engine.submit(request).unwrap();
    let mut outcome = Outcome::default();
    drain(engine, &mut outcome);
    outcome.tokens.remove(&id).unwrap_or_default()
}

#[test]
fn more_adapters_than_slots_take_turns_and_answer_right() {
    for gpu in device::every_tier() {
        let mut engine = with_adapters(&gpu, EngineOptions { adapter_slots: 2, ..EngineOptions::default() });
        let expected = ["HELLO WORLD.", "dlrow olleh.", "ellohay orldway.", "uryyb jbeyq."];
        for _ in 0..2 {
            let sent: Vec<SequenceId> = ADAPTERS
                .iter()
                .map(|name| {
                    let request = greedy(&engine, Some(name), "hello world");
                    engine.submit(request).unwrap()
                })
                .collect();
            let base = greedy(&engine, None, "hello world");
            let base = engine.submit(base).unwrap();
            let mut outcome = Outcome::default();
            drain(&mut engine, &mut outcome);
            for (id, expected) in sent.iter().zip(expected) {
                assert_eq!(text(&outcome.tokens[id]), expected, "{}", gpu.tier());
                assert_eq!(outcome.ends[id], FinishReason::Stop);
            }
            assert_eq!(text(&outcome.tokens[&base]), "hello world.");
        }
    }
}

#[test]
fn sequences_join_leave_and_are_cancelled_between_steps() {
    for gpu in device::every_tier() {
        let mut engine = with_adapters(&gpu, EngineOptions { max_sequences: 3, ..EngineOptions::default() });
        let mut outcome = Outcome::default();
        let first = engine.submit(greedy(&engine, Some("mirror"), "quick brown fox")).unwrap();
        let doomed = engine.submit(greedy(&engine, None, "minus one")).unwrap();
        let mut late = Vec::new();
        for step in 0..12 {
            engine.begin_step().unwrap();
            outcome.take(engine.wait().unwrap());
            if step == 4 {
                engine.cancel(doomed);
            }
            if step % 3 == 0 {
                late.push(engine.submit(greedy(&engine, Some("shout"), "minus one")).unwrap());
            }
        }
        drain(&mut engine, &mut outcome);
        assert_eq!(text(&outcome.tokens[&first]), "xof nworb kciuq.");
        assert_eq!(outcome.ends[&doomed], FinishReason::Cancelled);
        assert!(outcome.tokens[&doomed].len() < "minus one.".len());
        for id in late {
            assert_eq!(text(&outcome.tokens[&id]), "MINUS ONE.");
        }
    }
}

#[test]
fn a_seed_gives_the_same_answer_alone_and_in_any_company() {
    for gpu in device::every_tier() {
        let mut engine = with_adapters(&gpu, EngineOptions::default());
        let sampled = |engine: &Engine, seed| Request {
            sampling: Sampling { temperature: 20.0, top_k: 100, top_p: 0.95, seed },
            stop_ids: Vec::new(),
            max_tokens: 12,
            ..greedy(engine, Some("rot13"), "low rank adapters")
        };
        let request = sampled(&engine, 7);
        let alone = answer(&mut engine, request);
        let request = sampled(&engine, 8);
        let other_seed = answer(&mut engine, request);
        assert_ne!(alone, other_seed);
        let mut outcome = Outcome::default();
        for prompt in ["a", "every gpu speaks wgsl", "hello"] {
            engine.submit(greedy(&engine, Some("piglatin"), prompt)).unwrap();
        }
        let id = engine.submit(sampled(&engine, 7)).unwrap();
        drain(&mut engine, &mut outcome);
        assert_eq!(outcome.tokens[&id], alone, "{}", gpu.tier());
    }
}

#[test]
fn a_long_prompt_is_read_in_parts_with_the_same_result() {
    for gpu in device::every_tier() {
        let whole = engine(&gpu, EngineOptions::default());
        let parts = engine(&gpu, EngineOptions { max_sequences: 1, max_step_tokens: 7, ..EngineOptions::default() });
        let answers: Vec<(Vec<f32>, Vec<u32>)> = [whole, parts]
            .into_iter()
            .map(|mut engine| {
                let request = Request { logits: true, ..greedy(&engine, None, "every gpu speaks wgsl") };
                engine.submit(request).unwrap();
                let (mut logits, mut tokens) = (Vec::new(), Vec::new());
                while !engine.is_idle() {
                    engine.begin_step().unwrap();
                    for event in engine.wait().unwrap() {
                        match event {
                            Event::Logits { position, rows, .. } => {
                                assert_eq!(position, logits.len() / 258);
                                logits.extend(rows);
                            }
                            Event::Token { id, .. } => tokens.push(id),
                            _ => {}
                        }
                    }
                }
                (logits, tokens)
            })
            .collect();
        assert_eq!(text(&answers[0].1), "every gpu speaks wgsl.");
        assert_eq!(answers[0].1, answers[1].1);
        assert_eq!(answers[0].0.len(), 22 * 258);
        let off = largest_difference(&answers[0].0, &answers[1].0);
        // On the matrix tier parts of few rows are computed in f32, and the whole in f16.
        let most = answers[0].0.iter().fold(0f32, |m, v| m.max(v.abs()));
        let allowed = if gpu.capabilities().matrix { 5e-2 * most } else { 1e-3 };
        assert!(off < allowed, "{} off by {off} of {most}", gpu.tier());
    }
}

#[test]
fn a_name_taken_by_another_adapter_leaves_running_sequences_alone() {
    for gpu in device::every_tier().into_iter().take(1) {
        let mut engine = engine(&gpu, EngineOptions { adapter_slots: 2, ..EngineOptions::default() });
        let shout = adapter(&engine, "shout");
        let mirror = adapter(&engine, "mirror");
        let old = engine.load_adapter("it", &shout).unwrap();
        let mut outcome = Outcome::default();
        let first = engine.submit(greedy(&engine, Some("it"), "hello world")).unwrap();
        engine.begin_step().unwrap();
        let new = engine.load_adapter("it", &mirror).unwrap();
        assert_ne!(old, new);
        let second = engine.submit(greedy(&engine, Some("it"), "hello world")).unwrap();
        drain(&mut engine, &mut outcome);
        assert_eq!(text(&outcome.tokens[&first]), "HELLO WORLD.");
        assert_eq!(text(&outcome.tokens[&second]), "dlrow olleh.");
        let gone = Request { adapter: Some(old), ..greedy(&engine, None, "hello world") };
        assert_eq!(engine.submit(gone).unwrap_err().kind(), ErrorKind::Adapter);
        engine.unload_adapter(new).unwrap();
        assert!(engine.adapter("it").is_none());
        assert_eq!(engine.unload_adapter(new).unwrap_err().kind(), ErrorKind::Adapter);
    }
}

#[test]
fn choices_of_experts_are_counted_when_asked_and_nothing_is_lost_between_readings() {
    for gpu in device::every_tier().into_iter().take(1) {
        let options = EngineOptions { max_step_tokens: 7, max_sequences: 2, ..EngineOptions::default() };
        let mut silent = engine(&gpu, options.clone());
        assert_eq!(silent.routing_counts().unwrap(), None);
        let mut engine = engine(&gpu, EngineOptions { count_routing: true, ..options });
        let top_k = engine.config().moe.top_k as u64;
        let mut tokens = 0;
        for n in 1..=3 {
            let prompt = greedy(&engine, None, "quick brown fox");
            // The last token of an answer goes through no layer.
            tokens += n * (prompt.prompt.len() as u64 + 3);
            for _ in 0..n {
                engine.submit(Request { max_tokens: 4, stop_ids: Vec::new(), ..prompt.clone() }).unwrap();
            }
            drain(&mut engine, &mut Outcome::default());
            let counts = engine.routing_counts().unwrap().unwrap();
            assert_eq!(engine.routing_counts().unwrap(), Some(counts.clone()));
            assert_eq!((counts.tokens, counts.layers.len()), (tokens, 4));
            assert!(counts.layers.iter().all(|layer| layer.iter().sum::<u64>() == tokens * top_k), "{counts:?}");
            // No token takes an expert twice.
            assert!(counts.layers.iter().flatten().all(|n| *n <= tokens), "{counts:?}");
        }
    }
}

#[test]
fn a_full_cache_makes_sequences_wait_and_a_full_context_ends_them() {
    for gpu in device::every_tier().into_iter().take(1) {
        // Room for two sequences of two blocks, although eight may run.
        let options = EngineOptions { max_sequences: 8, max_context: 32, ..EngineOptions::default() };
        let mut engine = engine(&gpu, options);
        assert_eq!(engine.max_context(), 32);
        let mut outcome = Outcome::default();
        let sent: Vec<SequenceId> = (0..10)
            .map(|_| {
                engine.submit(Request { stop_ids: Vec::new(), ..greedy(&engine, None, "quick brown fox") }).unwrap()
            })
            .collect();
        drain(&mut engine, &mut outcome);
        for id in sent {
            assert_eq!(outcome.tokens[&id].len(), 32 - 16);
            assert_eq!(outcome.ends[&id], FinishReason::Length);
        }
        for (request, word) in [
            (Request::default(), "empty"),
            (Request { prompt: vec![258], max_tokens: 1, ..Request::default() }, "258"),
            (Request { prompt: vec![5; 32], max_tokens: 1, ..Request::default() }, "context"),
            (
                Request {
                    prompt: vec![5],
                    sampling: Sampling { top_p: 0.0, ..Sampling::default() },
                    ..Request::default()
                },
                "top_p",
            ),
        ] {
            let error = engine.submit(request).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Request);
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}

#[test]
fn adapters_that_do_not_fit_together_take_turns() {
    for gpu in device::every_tier() {
        // A layer of `mirror` takes about 280 KiB, one of `piglatin` 350. The experts' weights come in pieces, too.
        let limit = 400 << 10;
        let small = gpu.with_capabilities(Capabilities { max_binding_bytes: limit, ..gpu.capabilities().clone() });
        let mut engine = with_adapters(&small, EngineOptions { max_sequences: 4, ..EngineOptions::default() });
        assert!(engine.options().max_step_tokens < 64, "{:?}", engine.options());
        let mut outcome = Outcome::default();
        let sent: Vec<SequenceId> = ["mirror", "piglatin", "mirror", "rot13"]
            .map(|name| engine.submit(greedy(&engine, Some(name), "minus one")).unwrap())
            .into();
        drain(&mut engine, &mut outcome);
        for (id, expected) in sent.iter().zip(["eno sunim.", "inusmay oneway.", "eno sunim.", "zvahf bar."]) {
            assert_eq!(text(&outcome.tokens[id]), expected, "{}", gpu.tier());
        }
    }
}

#[test]
fn adapters_keep_within_their_memory_and_one_that_cannot_is_refused_when_loaded() {
    for gpu in device::every_tier() {
        let mut needed = Vec::new();
        let mut probe = engine(&gpu, EngineOptions { adapter_memory: Some(16), ..EngineOptions::default() });
        for name in ADAPTERS {
            let error = probe.load_adapter(name, &adapter(&probe, name)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Limit);
            let text = error.to_string();
            assert!(text.contains(name) && text.ends_with("the budget is 16"), "{text}");
            let words: Vec<&str> = text.split(' ').collect();
            let at = words.iter().position(|w| *w == "bytes").unwrap();
            needed.push(words[at - 1].parse::<u64>().unwrap());
        }
        // Room for the largest alone: all take turns.
        let budget = needed.iter().max().copied();
        let mut engine = with_adapters(&gpu, EngineOptions { adapter_memory: budget, ..EngineOptions::default() });
        let mut outcome = Outcome::default();
        let sent: Vec<SequenceId> = ADAPTERS
            .into_iter()
            .chain(ADAPTERS)
            .map(|name| engine.submit(greedy(&engine, Some(name), "hello world")).unwrap())
            .collect();
        drain(&mut engine, &mut outcome);
        let expected = ["HELLO WORLD.", "dlrow olleh.", "ellohay orldway.", "uryyb jbeyq."];
        for (id, expected) in sent.iter().zip(expected.into_iter().chain(expected)) {
            assert_eq!(text(&outcome.tokens[id]), expected, "{}", gpu.tier());
        }
    }
}

/// The factors of `adapter` that `keep` keeps, made anew with constants: A of 0.25, B of `fill`.
fn remade(adapter: &Adapter, rank: usize, fill: f32, keep: &dyn Fn(Site) -> bool) -> Adapter {
    let matrix = |dtype: DType, rows: usize, cols: usize, fill: f32| {
        Arc::new(Matrix { dtype, rows, cols, bytes: dtype.encode(&vec![fill; rows * cols]) })
    };
    let factors = adapter.factors.iter().filter(|f| keep(f.site)).map(|f| Factor {
        rank,
        a: matrix(DType::F32, rank, f.a.cols, 0.25),
        b: matrix(DType::F32, f.b.rows, rank, fill),
        ..f.clone()
    });
    Adapter { factors: factors.collect(), ..adapter.clone() }
}

#[test]
fn a_slot_reused_by_an_attention_adapter_shows_nothing_of_its_former_tenant() {
    for gpu in device::every_tier() {
        let options = EngineOptions { adapter_slots: 1, ..EngineOptions::default() };
        let mut used = engine(&gpu, options.clone());
        let everything = adapter(&used, "mirror");
        let attention = |site| matches!(site, Site::Q | Site::K | Site::V | Site::O);
        assert!(
            everything.factors.iter().any(|f| attention(f.site))
                && everything.factors.iter().any(|f| !attention(f.site))
        );
        let loud = remade(&everything, 64, 0.125, &|_| true);
        let silent = remade(&everything, 2, 0.0, &attention);
        let quiet = remade(&everything, 2, 0.001, &attention);
        let logits = |engine: &mut Engine, adapter: Option<&Adapter>| {
            let adapter = adapter.map(|a| engine.load_adapter("it", a).unwrap());
            let prompt = ids("hello world");
            engine.submit(Request { prompt, adapter, logits: true, ..Request::default() }).unwrap();
            let mut bits = Vec::new();
            while !engine.is_idle() {
                engine.begin_step().unwrap();
                for event in engine.wait().unwrap() {
                    if let Event::Logits { rows, .. } = event {
                        bits.extend(rows.iter().map(|v| v.to_bits()));
                    }
                }
            }
            bits
        };
        let base = logits(&mut used, None);
        assert_ne!(logits(&mut used, Some(&loud)), base);
        assert_eq!(logits(&mut used, Some(&silent)), base, "{}: factors of zeros are the base", gpu.tier());
        assert_ne!(logits(&mut used, Some(&loud)), base);
        let fresh = logits(&mut engine(&gpu, options), Some(&quiet));
        assert_ne!(fresh, base);
        assert_eq!(logits(&mut used, Some(&quiet)), fresh, "{}", gpu.tier());
    }
}

#[test]
fn an_adapter_opened_for_another_model_is_refused() {
    for gpu in device::every_tier().into_iter().take(1) {
        let mut engine = engine(&gpu, EngineOptions::default());
        let other = Path::new("tests/data/tiny/qwen3_moe");
        let config = Checkpoint::open(other).unwrap().config().clone();
        let stranger = Adapter::open(&other.join("adapters/attn_only"), &config).unwrap();
        let error = engine.load_adapter("stranger", &stranger).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Adapter);
        assert!(error.to_string().contains("layer 0 Q"), "{error}");
        assert!(engine.adapter("stranger").is_none());
    }
}

#[test]
fn a_layer_a_submission_gives_the_same_answer() {
    for gpu in device::every_tier() {
        let mut engine = with_adapters(&gpu.with_macs_per_submission(1), EngineOptions::default());
        let sent = engine.submit(greedy(&engine, Some("mirror"), "minus one")).unwrap();
        let mut outcome = Outcome::default();
        drain(&mut engine, &mut outcome);
        assert_eq!(text(&outcome.tokens[&sent]), "eno sunim.", "{}", gpu.tier());
    }
}
