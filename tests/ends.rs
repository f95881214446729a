//! Adapters of the embedding and of the LM head in the whole decoder: what they add is what merged weights would.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/difference.rs"]
mod difference;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use common::{Rng, TOL_MATRIX_LOGITS, folds, logit_tolerance};
use difference::largest_difference;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use tempfile::TempDir;
use wgmoe::adapter::{Factor, Matrix, Site};
use wgmoe::dtype::DType;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::tuning::Tuning;
use wgmoe::{Adapter, Checkpoint, Engine, EngineOptions, ErrorKind, Event, Gpu, LoadOptions, Model, Request};

const FOLDER: &str = "tests/data/tiny/qwen3_moe";
const LAYERS: usize = 3;
const VOCAB: usize = 256;
const D: usize = 64;

/// The tensors of the model, and in f32 the two that change.
#[derive(Clone)]
struct Weights {
    others: Vec<u8>,
    embedding: Vec<f32>,
    lm_head: Vec<f32>,
}

impl Weights {
    fn open(tied: bool) -> Self {
        let others = std::fs::read(Path::new(FOLDER).join("model.safetensors")).unwrap();
        let values = |name: &str| {
            let file = SafeTensors::deserialize(&others).unwrap();
            DType::Bf16.decode(file.tensor(name).unwrap().data())
        };
        let embedding = values("model.embed_tokens.weight");
        let lm_head = if tied { embedding.clone() } else { values("lm_head.weight") };
        Self { others, embedding, lm_head }
    }

    /// The same with `scale · B · A` added to both matrices where the adapter has it.
    fn merged(&self, adapter: &Adapter) -> Self {
        let mut merged = self.clone();
        for f in &adapter.factors {
            let (a, b) = (f.a.dtype.decode(&f.a.bytes), f.b.dtype.decode(&f.b.bytes));
            for o in 0..f.b.rows {
                for i in 0..f.a.cols {
                    let sum: f32 = (0..f.rank).map(|r| b[o * f.rank + r] * a[r * f.a.cols + i]).sum();
                    match f.site {
                        // The table is the transposed matrix.
                        Site::Embedding => merged.embedding[i * D + o] += f.scale * sum,
                        Site::LmHead => merged.lm_head[o * D + i] += f.scale * sum,
                        _ => {}
                    }
                }
            }
        }
        merged
    }

    /// A model folder with both matrices in `dtype`; a tied one has no LM head of its own.
    fn folder(&self, tied: bool, dtype: DType) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        let config = std::fs::read_to_string(Path::new(FOLDER).join("config.json")).unwrap();
        let config = config.replace("\"tie_word_embeddings\": false", &format!("\"tie_word_embeddings\": {tied}"));
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let (embedding, lm_head) = (dtype.encode(&self.embedding), dtype.encode(&self.lm_head));
        let stored = match dtype {
            DType::Bf16 => safetensors::Dtype::BF16,
            DType::F16 => safetensors::Dtype::F16,
            _ => safetensors::Dtype::F32,
        };
        let file = SafeTensors::deserialize(&self.others).unwrap();
        let tensors: BTreeMap<String, TensorView<'_>> = file
            .tensors()
            .into_iter()
            .filter(|(name, _)| !tied || name != "lm_head.weight")
            .map(|(name, view)| {
                let of = |bytes| TensorView::new(stored, vec![VOCAB, D], bytes).unwrap();
                let view = match name.as_str() {
                    "model.embed_tokens.weight" => of(&embedding),
                    "lm_head.weight" => of(&lm_head),
                    _ => view,
                };
                (name, view)
            })
            .collect();
        let bytes = safetensors::serialize(tensors, None).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        dir
    }
}

/// Factors of the sites outside the layers, at rank `rank`.
fn ends(seed: u64, rank: usize, dtype: DType, sites: &[Site]) -> Vec<Factor> {
    let mut rng = Rng::new(seed);
    let mut matrix = |rows: usize, cols: usize, scale: f32| {
        let values: Vec<f32> = rng.floats(rows * cols).iter().map(|v| v * scale).collect();
        Arc::new(Matrix { dtype, rows, cols, bytes: dtype.encode(&values) })
    };
    let factors = sites.iter().map(|site| {
        let [out, input] = if *site == Site::LmHead { [VOCAB, D] } else { [D, VOCAB] };
        let (a, b) = (matrix(rank, input, 1.0), matrix(out, rank, 0.05));
        Factor { layer: LAYERS, site: *site, expert: 0, rank, scale: 0.5, a, b, bias: None }
    });
    factors.collect()
}

fn engine(gpu: &Gpu, folder: &Path, options: EngineOptions) -> Engine {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let (model, _) = Model::load(gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap();
    Engine::new(gpu, model, options).unwrap()
}

/// Logits of the prompt and the answer of each request, all in one batch.
fn run(engine: &mut Engine, requests: &[(Option<&str>, Vec<u32>)]) -> Vec<(Vec<f32>, Vec<u32>)> {
    let ids: Vec<_> = requests
        .iter()
        .map(|(name, prompt)| {
            let adapter = name.map(|name| engine.adapter(name).unwrap());
            let prompt = prompt.clone();
            engine.submit(Request { prompt, adapter, max_tokens: 5, logits: true, ..Request::default() }).unwrap()
        })
        .collect();
    let mut answers = vec![(Vec::new(), Vec::new()); ids.len()];
    while !engine.is_idle() {
        engine.begin_step().unwrap();
        for event in engine.wait().unwrap() {
            let at = |sequence| ids.iter().position(|id| *id == sequence).unwrap();
            match event {
                Event::Logits { sequence, rows, .. } => answers[at(sequence)].0.extend(rows),
                Event::Token { sequence, id } => answers[at(sequence)].1.push(id),
                Event::Failed { error, .. } => panic!("{error}"),
                Event::Finished { .. } => {}
            }
        }
    }
    answers
}

/// Prompts of different lengths: pairs one by one, tiles of 4 and tiles of 8.
fn prompts() -> Vec<Vec<u32>> {
    let mut rng = Rng::new(7);
    [1, 4, 19].iter().map(|n| (0..*n).map(|_| rng.below(VOCAB) as u32).collect()).collect()
}

#[test]
fn adapters_of_embedding_and_head_equal_merged_weights_alone_and_mixed() {
    let config = Checkpoint::open(Path::new(FOLDER)).unwrap().config().clone();
    let inner = Adapter::open(&Path::new(FOLDER).join("adapters/attn_only"), &config).unwrap();
    let both = [Site::Embedding, Site::LmHead];
    let cases: [(&str, Vec<Factor>, bool); 5] = [
        ("head", ends(1, 8, DType::F32, &[Site::LmHead]), false),
        ("embedding", ends(2, 3, DType::F32, &[Site::Embedding]), false),
        ("both", ends(3, 17, DType::Bf16, &both), false),
        ("with attention", ends(4, 8, DType::F16, &both), true),
        ("attention", Vec::new(), true),
    ];
    let adapters: Vec<(&str, Adapter, Option<Adapter>)> = cases
        .into_iter()
        .map(|(name, ends, attention)| {
            let layers = if attention { inner.factors.clone() } else { Vec::new() };
            let adapter = Adapter { factors: [layers, ends].concat(), ..inner.clone() };
            (name, adapter, attention.then(|| inner.clone()))
        })
        .collect();
    let mut failures = Vec::new();
    for gpu in device::every_way_to_decode() {
        for tied in [false, true] {
            let base = Weights::open(tied);
            let mut mixed = engine(&gpu, base.folder(tied, DType::F32).path(), EngineOptions::default());
            let mut requests = Vec::new();
            let mut expected = Vec::new();
            for (name, adapter, inner) in &adapters {
                mixed.load_adapter(name, adapter).unwrap();
                let mut merged =
                    engine(&gpu, base.merged(adapter).folder(false, DType::F32).path(), EngineOptions::default());
                if let Some(inner) = inner {
                    merged.load_adapter("inner", inner).unwrap();
                }
                for prompt in prompts() {
                    requests.push((Some(*name), prompt.clone()));
                    let inner = inner.as_ref().map(|_| "inner");
                    expected.push(run(&mut merged, &[(inner, prompt)]).remove(0));
                }
            }
            let mut plain = engine(&gpu, base.folder(tied, DType::F32).path(), EngineOptions::default());
            for prompt in prompts() {
                requests.push((None, prompt.clone()));
                expected.push(run(&mut plain, &[(None, prompt)]).remove(0));
            }
            assert!(
                largest_difference(&expected[2].0, &expected[expected.len() - 1].0) > 0.05,
                "the head does nothing"
            );
            assert!(
                largest_difference(&expected[5].0, &expected[expected.len() - 1].0) > 0.05,
                "the embedding does nothing"
            );
            let mut check = |what: &str, at: usize, got: &(Vec<f32>, Vec<u32>)| {
                let (name, prompt) = &requests[at];
                let off = largest_difference(&got.0, &expected[at].0);
                // f16 operands are rounded anew for each number of rows, which a close call of ids may show.
                let matrix = gpu.capabilities().matrix;
                let allowed = if matrix { TOL_MATRIX_LOGITS } else { 1e-4 };
                if off > allowed || !matrix && got.1 != expected[at].1 {
                    let what = format!("{} tied {tied} {name:?} {what} {} tokens", gpu.tier(), prompt.len());
                    failures.push(format!("{what}: off by {off}, {:?} for {:?}", got.1, expected[at].1));
                }
            };
            for (at, got) in run(&mut mixed, &requests).iter().enumerate() {
                check("mixed", at, got);
            }
            for (at, request) in requests.iter().enumerate() {
                check("alone", at, &run(&mut mixed, std::slice::from_ref(request))[0]);
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Keeps the labels of what the engine dispatches; `None` where the device cannot.
fn watch(gpu: &Gpu, engine: &mut Engine) -> Option<()> {
    if !gpu.device().features().contains(wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES) {
        return None;
    }
    let count = wgpu::QUERY_SET_MAX_QUERIES;
    let desc = wgpu::QuerySetDescriptor { label: Some("stages"), ty: wgpu::QueryType::Timestamp, count };
    engine.profile(&gpu.device().create_query_set(&desc), count as usize);
    Some(())
}

#[test]
fn adapters_of_a_head_in_two_bytes_equal_merged_weights() {
    let config = Checkpoint::open(Path::new(FOLDER)).unwrap().config().clone();
    let inner = Adapter::open(&Path::new(FOLDER).join("adapters/attn_only"), &config).unwrap();
    // Together no longer than a row of the head.
    let adapters = [("f32", 8, DType::F32), ("bf16", 17, DType::Bf16)].map(|(name, rank, dtype)| {
        (name, Adapter { factors: ends(rank as u64, rank, dtype, &[Site::LmHead]), ..inner.clone() })
    });
    let mut rng = Rng::new(8);
    let prompts = [19, 40].map(|n| (0..n).map(|_| rng.below(VOCAB) as u32).collect::<Vec<u32>>());
    let requests: Vec<(Option<&str>, Vec<u32>)> = prompts
        .iter()
        .flat_map(|prompt| [Some("f32"), None, Some("bf16")].map(|name| (name, prompt.clone())))
        .collect();
    let base = Weights::open(false);
    for gpu in device::every_tier() {
        let mut plain = engine(&gpu, base.folder(false, DType::F32).path(), EngineOptions::default());
        let mut merged = adapters.each_ref().map(|(_, adapter)| {
            engine(&gpu, base.merged(adapter).folder(false, DType::F32).path(), EngineOptions::default())
        });
        let expected: Vec<Vec<f32>> = requests
            .iter()
            .map(|(name, prompt)| {
                let at = adapters.iter().position(|(of, _)| Some(*of) == *name);
                let engine = at.map_or(&mut plain, |at| &mut merged[at]);
                run(engine, &[(None, prompt.clone())]).remove(0).0
            })
            .collect();
        let (caps, allowed) = (gpu.capabilities(), logit_tolerance(&gpu));
        for of_prompt in expected.chunks(3) {
            for adapted in [0, 2] {
                let least = largest_difference(&of_prompt[adapted], &of_prompt[1]);
                assert!(least > 5.0 * TOL_MATRIX_LOGITS, "an adapter changes logits by {least}");
            }
        }
        // Where products on cooperative matrices add adapters, one sorts tokens for it, the other takes each alone.
        let ways: &[usize] = if caps.matrix { &[1, 512] } else { &[512] };
        for (apart_tokens, dtype) in ways.iter().flat_map(|n| [DType::Bf16, DType::F16].map(|dtype| (*n, dtype))) {
            let gpu =
                gpu.with_capabilities(Capabilities { tuning: Tuning { apart_tokens, ..caps.tuning }, ..caps.clone() });
            let mut engine = engine(&gpu, base.folder(false, dtype).path(), EngineOptions::default());
            for (name, adapter) in &adapters {
                engine.load_adapter(name, adapter).unwrap();
            }
            let watched = watch(&gpu, &mut engine);
            for (at, (got, _)) in run(&mut engine, &requests).iter().enumerate() {
                let off = largest_difference(got, &expected[at]);
                let (name, tier) = (requests[at].0, gpu.tier());
                assert!(off <= allowed, "{tier} {dtype:?} {name:?} {apart_tokens}: off by {off}");
            }
            let labels = engine.profiled();
            let sampled = labels.iter().position(|label| label.starts_with("sample["));
            // The last product of the first step that comes to an end of prompts is that of the head.
            let head = sampled.and_then(|at| folds(&labels[..at]).pop());
            assert_eq!(head, (caps.matrix && watched.is_some()).then_some(true), "{apart_tokens}: {labels:?}");
        }
    }
}

#[test]
fn factors_outside_the_layers_that_do_not_fit_are_refused_when_loaded() {
    for gpu in device::every_tier().into_iter().take(1) {
        let config = Checkpoint::open(Path::new(FOLDER)).unwrap().config().clone();
        let inner = Adapter::open(&Path::new(FOLDER).join("adapters/attn_only"), &config).unwrap();
        let with = |factors: Vec<Factor>| Adapter { factors, ..inner.clone() };
        let changed = |site: Site, change: &dyn Fn(&mut Factor)| {
            let mut factors = ends(5, 8, DType::F32, &[site]);
            change(&mut factors[0]);
            with(factors)
        };
        let cases = [
            ("in a layer", changed(Site::LmHead, &|f| f.layer = 0), ErrorKind::Adapter, "layer 0 LmHead"),
            ("past the end", changed(Site::LmHead, &|f| f.layer = 4), ErrorKind::Adapter, "no such layer"),
            ("exchanged", changed(Site::Embedding, &|f| f.site = Site::LmHead), ErrorKind::Adapter, "B [256, 8]"),
            ("a bias", changed(Site::Embedding, &|f| f.bias = Some(f.a.clone())), ErrorKind::Adapter, "no bias"),
            ("too large", with(ends(6, 128, DType::F32, &[Site::LmHead])), ErrorKind::Limit, "for `lm_head`"),
        ];
        // Wide enough for the model, not for 256 rows of rank 128.
        let limit = 128 << 10;
        let narrow = gpu.with_capabilities(Capabilities { max_binding_bytes: limit, ..gpu.capabilities().clone() });
        let options =
            EngineOptions { max_sequences: 2, max_context: 32, max_step_tokens: 8, ..EngineOptions::default() };
        let mut narrow = engine(&narrow, Path::new(FOLDER), options.clone());
        let mut failures = Vec::new();
        for (name, adapter, kind, words) in &cases {
            match narrow.load_adapter("it", adapter) {
                Err(e) if e.kind() == *kind && e.to_string().contains(words) => {}
                other => failures.push(format!("{name}: {other:?}")),
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
        // Both together exceed the limit, neither does alone.
        let both = with(ends(7, 64, DType::F32, &[Site::Embedding, Site::LmHead]));
        let bytes: usize = both.factors.iter().map(|f| f.a.bytes.len() + f.b.bytes.len()).sum();
        assert!(bytes as u64 > limit, "{bytes}");
        let mut wide = engine(&gpu, Path::new(FOLDER), options);
        let answers = [&mut narrow, &mut wide].map(|engine| {
            engine.load_adapter("it", &both).unwrap();
            run(engine, &[(Some("it"), vec![3, 1, 4])])
        });
        assert_eq!(answers[0], answers[1]);
    }
}
