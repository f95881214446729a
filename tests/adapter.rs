//! Adapter folders: what PEFT saved decodes to what PEFT computed, and what is not plain LoRA on this model is refused.

mod files;

use std::path::Path;

use files::{Table, Tensor, data, encode, folder, json_file, patched, read};
use proptest::prelude::*;
use serde_json::{Value, json};
use wgmoe::adapter::{Adapter, Factor, Site};
use wgmoe::checkpoint::{MlpKind, ModelConfig, SafetensorsFile};
use wgmoe::{ErrorKind, Result};

/// Largest difference between a decoded weight change and PEFT's own, f32 against f32.
const DELTA_TOLERANCE: f64 = 1e-5;

const TINY: &str = "tiny/qwen3_moe";

fn tiny() -> ModelConfig {
    ModelConfig::open(&data(TINY)).unwrap()
}

/// `scale · B · A`, `[out, in]`.
fn delta(factor: &Factor) -> Vec<f64> {
    let (a, b) = (factor.a.dtype.decode(&factor.a.bytes), factor.b.dtype.decode(&factor.b.bytes));
    let (out, inn, rank) = (factor.b.rows, factor.a.cols, factor.rank);
    assert_eq!((factor.a.rows, factor.b.cols), (rank, rank));
    let mut delta = vec![0.0; out * inn];
    for o in 0..out {
        for i in 0..inn {
            for r in 0..rank {
                delta[o * inn + i] += f64::from(factor.scale) * f64::from(b[o * rank + r]) * f64::from(a[r * inn + i]);
            }
        }
    }
    delta
}

/// The change of a fused parameter, `[E, out, in]`, put together from the factors of its experts.
fn fused_delta(adapter: &Adapter, layer: usize, sites: &[Site], experts: usize) -> Vec<f64> {
    let mut all = Vec::new();
    for expert in 0..experts {
        for site in sites {
            let factor = adapter.factors.iter().find(|f| f.place() == (layer, *site, expert));
            all.extend(delta(factor.unwrap_or_else(|| panic!("no factor for {layer} {site:?} {expert}"))));
        }
    }
    all
}

/// Compares every `delta_out_in` of a case with the decoded adapter; returns how many there were.
fn check_deltas(table: &mut Table, case: &str, model: &ModelConfig) -> usize {
    let dir = data("peft").join(case);
    let adapter = Adapter::open(&dir.join("adapter"), model).unwrap_or_else(|e| panic!("{case}: {e}"));
    let expected = SafetensorsFile::open(&dir.join("expected.safetensors")).unwrap();
    let mut n_checked = 0;
    for name in expected.names().filter(|n| n.starts_with("delta_out_in.")) {
        let layer = name.split('.').nth(3).unwrap().parse().unwrap();
        let sites: &[Site] =
            if name.ends_with("gate_up_proj") { &[Site::ExpertGate, Site::ExpertUp] } else { &[Site::ExpertDown] };
        let want = expected.tensor(name).unwrap().to_f32();
        let got = fused_delta(&adapter, layer, sites, model.moe.experts);
        let worst = got.iter().zip(&want).map(|(g, w)| (g - f64::from(*w)).abs()).fold(0.0, f64::max);
        let size = want.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        let ok = got.len() == want.len() && worst <= DELTA_TOLERANCE && size > 0.01;
        table.holds(&format!("{case} {name}"), ok, (worst, size));
        n_checked += 1;
    }
    n_checked
}

#[test]
fn fused_experts_of_every_peft_version_decode_to_what_it_computed() {
    let model = ModelConfig::open(&data("peft/bases/qwen3_moe-f9628232")).unwrap();
    let mut table = Table::default();
    let cases = [
        ("qwen3_moe__params__peft0181_tf524", 4),
        ("qwen3_moe__params__peft0190_tf524", 4),
        ("qwen3_moe__params__peft0212_tf524", 4),
        ("qwen3_moe__only_down__peft0212_tf524", 2),
        ("qwen3_moe__only_gateup__peft0191_tf524", 2),
        ("qwen3_moe__rankpat_rslora__peft0191_tf524", 4),
        ("qwen3_moe__v4style__peft0191_tf524", 4),
    ];
    for (case, n_deltas) in cases {
        let n = check_deltas(&mut table, case, &model);
        table.holds(case, n == n_deltas, n);
    }
    table.finish();
}

/// A model whose gate_up parameter is square (2F = D), so that only the version tells the orientation.
fn square() -> ModelConfig {
    let mut model = ModelConfig::open(&data("peft/bases/qwen3_moe-f9628232")).unwrap();
    model.moe.expert_width = 32;
    model
}

#[test]
fn square_parameters_are_decoded_by_version() {
    let mut table = Table::default();
    for case in ["olmoe_square__params__peft0181_tf524", "olmoe_square__params__peft0212_tf524"] {
        let n = check_deltas(&mut table, case, &square());
        table.holds(case, n == 4, n);
        let dir = data("peft").join(case).join("adapter");
        for version in ["<absent>", "main", "0.19.1.dev0"] {
            let config = patched(json_file(&dir.join("adapter_config.json")), &json!({"peft_version": version}));
            let got = open(&config, &read(&dir.join("adapter_model.safetensors")), &square());
            table.fails(&format!("{case} {version}"), got, ErrorKind::Adapter, &["square", "peft_version"]);
        }
    }
    table.finish();
}

#[test]
fn gate_and_up_of_a_fused_parameter_share_a() {
    let model = ModelConfig::open(&data("peft/bases/qwen3_moe-f9628232")).unwrap();
    let adapter = Adapter::open(&data("peft/qwen3_moe__only_gateup__peft0191_tf524/adapter"), &model).unwrap();
    let of = |site| adapter.factors.iter().filter(move |f| f.site == site);
    assert_eq!(adapter.factors.len(), 2 * 6 * 2);
    assert!(of(Site::ExpertGate).zip(of(Site::ExpertUp)).all(|(g, u)| std::sync::Arc::ptr_eq(&g.a, &u.a)));
}

#[test]
fn every_saved_adapter_of_the_tiny_model_opens() {
    // Factors: (layer, expert) pairs times projections; two layers have 8 experts, one is dense.
    let cases = [
        ("all_linear", 2 * 8 * 3 + 2 + 3 + 3 * 4),
        ("attn_only", 3 * 4),
        ("down_only", 2 * 8 + 3),
        ("experts2d", 2 * 8 * 3 + 3 + 3 * 4),
        ("experts2d_down_only", 2 * 8 + 1),
        ("experts2d_rslora", 2 * 8 * 3 + 3),
        ("experts2d_some", 4 * 3),
        ("experts3d", 2 * 8 * 3 + 3),
        ("gate_up_only", 2 * 8 * 2 + 3),
        ("layer_subset", 8 * 3 + 1),
    ];
    let mut table = Table::default();
    for (case, n_factors) in cases {
        let dir = data(TINY).join("adapters").join(case);
        let adapter = Adapter::open(&dir, &tiny()).unwrap_or_else(|e| panic!("{case}: {e}"));
        table.holds(case, adapter.factors.len() == n_factors, adapter.factors.len());
        table.holds(case, adapter.factors.is_sorted_by_key(Factor::place), "not sorted");
        let n_bytes: usize = read(&dir.join("adapter_model.safetensors")).iter().map(|t| t.bytes.len()).sum();
        table.holds(case, adapter.bytes_read == n_bytes as u64, (adapter.bytes_read, n_bytes));
    }
    table.finish();
}

#[test]
fn patterns_set_rank_and_scale() {
    let rslora = Adapter::open(&data(TINY).join("adapters/experts2d_rslora"), &tiny()).unwrap();
    let model = ModelConfig::open(&data("peft/bases/qwen3_moe-0f21722b")).unwrap();
    let partial = Adapter::open(&data("peft/qwen3_moe__partial_experts__peft0181_tf457/adapter"), &model).unwrap();
    let mut table = Table::default();
    for f in &rslora.factors {
        let down = matches!(f.site, Site::Down | Site::ExpertDown);
        let (rank, scale) = if down { (2, 5.0 / 2.0f64.sqrt()) } else { (8, 8.0 / 8.0f64.sqrt()) };
        table.holds("rslora", f.rank == rank && f.scale == scale as f32, (f.place(), f.rank, f.scale));
    }
    for f in &partial.factors {
        let (expert, rank) = if f.site == Site::ExpertDown { (4, 5) } else { (1, 3) };
        let scale = (9.0 / (rank as f64).sqrt()) as f32;
        table.holds("partial", (f.expert, f.rank, f.scale) == (expert, rank, scale), (f.place(), f.rank, f.scale));
    }
    table.finish();
    assert_eq!(partial.factors.len(), 2 * 3);
}

#[test]
fn modules_of_their_own_keep_their_bytes() {
    let model = ModelConfig::open(&data("peft/bases/qwen3_moe-0f21722b")).unwrap();
    let dir = data("peft/qwen3_moe__perexpert__peft0181_tf457/adapter");
    let adapter = Adapter::open(&dir, &model).unwrap();
    let tensors = read(&dir.join("adapter_model.safetensors"));
    let name = "base_model.model.model.layers.1.mlp.experts.4.up_proj.lora_B.weight";
    let b = &tensors.iter().find(|t| t.name == name).unwrap().bytes;
    let factor = adapter.factors.iter().find(|f| f.place() == (1, Site::ExpertUp, 4)).unwrap();
    assert_eq!((&factor.b.bytes, factor.scale), (b, 3.0));

    let base = ModelConfig::open(&data("peft/bases/qwen3_moe-f9628232")).unwrap();
    let router = Adapter::open(&data("peft/qwen3_moe__router__peft0212_tf524/adapter"), &base).unwrap();
    let places: Vec<_> = router.factors.iter().map(Factor::place).collect();
    assert_eq!(places, [(0, Site::Router, 0), (1, Site::Router, 0)]);
}

fn open(config: &Value, tensors: &[Tensor], model: &ModelConfig) -> Result<Adapter> {
    let dir =
        folder(&[("adapter_config.json", config.to_string().into()), ("adapter_model.safetensors", encode(tensors))]);
    Adapter::open(dir.path(), model)
}

/// Configuration and tensors of an adapter of the tiny model.
fn load(case: &str) -> (Value, Vec<Tensor>) {
    let dir = data(TINY).join("adapters").join(case);
    (json_file(&dir.join("adapter_config.json")), read(&dir.join("adapter_model.safetensors")))
}

#[test]
fn settings_that_change_the_maths_are_refused_by_name() {
    use ErrorKind::{Config, Unsupported};
    let cases = [
        (json!({"use_dora": true}), Unsupported, "use_dora"),
        (json!({"lora_bias": true}), Unsupported, "lora_bias"),
        (json!({"bias": "all"}), Unsupported, "bias"),
        (json!({"modules_to_save": ["lm_head"]}), Unsupported, "modules_to_save"),
        (json!({"alora_invocation_tokens": [1]}), Unsupported, "alora_invocation_tokens"),
        (json!({"use_qalora": true}), Unsupported, "use_qalora"),
        (json!({"use_bdlora": {"nblocks": 2}}), Unsupported, "use_bdlora"),
        (json!({"arrow_config": {"top_k": 3}}), Unsupported, "arrow_config"),
        (json!({"monteclora_config": {"a": 3}}), Unsupported, "monteclora_config"),
        (json!({"kasa_config": {"a": 3}}), Unsupported, "kasa_config"),
        (json!({"layer_replication": [[0, 2], [1, 3]]}), Unsupported, "layer_replication"),
        (json!({"trainable_token_indices": [1]}), Unsupported, "trainable_token_indices"),
        (json!({"fan_in_fan_out": true}), Unsupported, "fan_in_fan_out"),
        (json!({"fine_tune_type": "lora"}), Unsupported, "fine_tune_type"),
        (json!({"peft_type": "LOHA"}), Unsupported, "peft_type"),
        (json!({"peft_type": "<absent>"}), Config, "peft_type"),
        (json!({"init_lora_weights": "pissa_niter_16"}), Unsupported, "init_lora_weights"),
        (json!({"init_lora_weights": "olora"}), Unsupported, "init_lora_weights"),
        (json!({"init_lora_weights": 3}), Config, "init_lora_weights"),
        (json!({"lora_B_layout": "sideways"}), Unsupported, "lora_B_layout"),
        (json!({"auto_mapping": {"unsloth_fixed": true}}), Unsupported, "lora_B_layout"),
        (json!({"r": 0}), Config, "`r`"),
        (json!({"r": 1000000000}), Config, "`r`"),
        (json!({"r": 4.5}), Config, "`r`"),
        (json!({"rank_pattern": {"q_proj": 0}}), Config, "rank_pattern.q_proj"),
        (json!({"rank_pattern": {"(": 4}}), Config, "rank_pattern"),
        (json!({"alpha_pattern": {"q_proj": "x"}}), Config, "alpha_pattern.q_proj"),
        (json!({"lora_alpha": "8"}), Config, "lora_alpha"),
        (json!({"lora_alpha": 1e300}), Config, "lora_alpha"),
        (json!({"target_modules": "("}), Config, "target_modules"),
        (json!({"target_modules": [1]}), Config, "target_modules"),
        (json!({"rank_pattern": {"(.+)+(.+)+\\1x": 4}}), Config, "pattern"),
    ];
    let (config, tensors) = load("experts3d");
    let mut table = Table::default();
    for (changes, kind, part) in cases {
        table.fails(&changes.to_string(), open(&patched(config.clone(), &changes), &tensors, &tiny()), kind, &[part]);
    }
    let text = config.to_string().replacen("\"lora_alpha\":8", "\"lora_alpha\":1e999", 1);
    let dir = folder(&[("adapter_config.json", text.into()), ("adapter_model.safetensors", encode(&tensors))]);
    table.fails("infinite alpha", Adapter::open(dir.path(), &tiny()), ErrorKind::Format, &["adapter_config.json"]);
    let harmless = [
        json!({"use_dora": false, "modules_to_save": [], "loftq_config": {}, "arrow_config": null}),
        json!({"init_lora_weights": "gaussian", "lora_alpha": 7.5, "anything": {"else": 1}}),
        json!({"target_modules": "all-linear", "lora_B_layout": "rank_major"}),
        json!({"target_modules": ".*\\.q_proj", "bias": null}),
    ];
    for changes in harmless {
        let got = open(&patched(config.clone(), &changes), &tensors, &tiny());
        table.holds(&changes.to_string(), got.is_ok(), got.err());
    }
    table.finish();
}

#[test]
fn marked_layouts_of_b_give_the_same_factors() {
    let (config, tensors) = load("experts3d");
    let want = open(&config, &tensors, &tiny()).unwrap();
    let mut grouped = tensors;
    for t in grouped.iter_mut().filter(|t| t.name.contains("experts") && t.name.contains("lora_B")) {
        // Column j·E + e becomes e·R + j.
        let (n, size) = (t.shape[1], t.bytes.len() / (t.shape[0] * t.shape[1]));
        let (experts, rank) = (8, n / 8);
        let old = t.bytes.clone();
        for (row, e, j) in
            (0..t.shape[0]).flat_map(|r| (0..experts).flat_map(move |e| (0..rank).map(move |j| (r, e, j))))
        {
            let (from, to) = ((row * n + j * experts + e) * size, (row * n + e * rank + j) * size);
            t.bytes[to..to + size].copy_from_slice(&old[from..from + size]);
        }
    }
    for changes in [
        json!({"lora_B_layout": "grouped_by_expert"}),
        json!({"auto_mapping": {"unsloth_fixed": true, "lora_B_layout": "grouped_by_expert"}}),
    ] {
        let got = open(&patched(config.clone(), &changes), &grouped, &tiny()).unwrap();
        assert!(got.factors.iter().zip(&want.factors).all(|(g, w)| g.b == w.b && g.a == w.a));
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    use ErrorKind::{Adapter as Wrong, Format, Unsupported};
    const P: &str = "base_model.model.model.layers";
    let q = format!("{P}.0.self_attn.q_proj");
    let zeros = |name: String, shape: &[usize]| Tensor::zeros(&name, "BF16", shape, 2);
    let pair = |module: &str, a: [usize; 2], b: [usize; 2]| {
        vec![zeros(format!("{module}.lora_A.weight"), &a), zeros(format!("{module}.lora_B.weight"), &b)]
    };
    let (config, good) = load("attn_only");
    let with = |more: Vec<Tensor>| {
        let mut tensors: Vec<_> = good.iter().filter(|t| more.iter().all(|m| m.name != t.name)).cloned().collect();
        tensors.extend(more);
        tensors
    };
    let without = |name: String| good.iter().filter(|t| t.name != name).cloned().collect::<Vec<_>>();
    let one = |name: String| with(vec![zeros(name, &[3, 64])]);
    let fit = "adapter does not fit";
    let cases: Vec<(&str, Vec<Tensor>, ErrorKind, Vec<&str>)> = vec![
        ("B missing", without(format!("{q}.lora_B.weight")), Wrong, vec!["0.self_attn.q_proj.lora_A", "no `lora_B`"]),
        ("A missing", without(format!("{q}.lora_A.weight")), Wrong, vec!["0.self_attn.q_proj.lora_B", "no `lora_A`"]),
        ("same twice", one(format!("{q}.lora_A.default.weight")), Wrong, vec!["means the same"]),
        ("other suffix", one(format!("{q}.lora_C.weight")), Wrong, vec!["lora_C"]),
        ("other module", one(format!("{P}.0.self_attn.x_proj.lora_A.weight")), Wrong, vec!["x_proj", "no module"]),
        ("DoRA", one(format!("{q}.lora_magnitude_vector")), Unsupported, vec!["DoRA"]),
        ("bias", one(format!("{q}.lora_B.bias")), Unsupported, vec!["bias"]),
        ("embedding", one("base_model.model.model.embed_tokens.lora_embedding_A".into()), Unsupported, vec!["embed"]),
        ("head", with(pair("base_model.model.lm_head", [3, 64], [256, 3])), Unsupported, vec!["lm_head"]),
        ("layer", with(pair(&format!("{P}.3.self_attn.q_proj"), [3, 64], [96, 3])), Wrong, vec![fit, "layers.3"]),
        (
            "expert",
            with(pair(&format!("{P}.0.mlp.experts.8.up_proj"), [3, 64], [40, 3])),
            Wrong,
            vec![fit, "experts.8"],
        ),
        (
            "router of a dense layer",
            with(pair(&format!("{P}.1.mlp.gate"), [3, 64], [8, 3])),
            Wrong,
            vec![fit, "1.mlp.gate"],
        ),
        (
            "dense of a sparse layer",
            with(pair(&format!("{P}.0.mlp.up_proj"), [3, 64], [96, 3])),
            Wrong,
            vec![fit, "0.mlp"],
        ),
        (
            "experts of a dense layer",
            with(pair(&format!("{P}.1.mlp.experts"), [24, 40], [64, 24])),
            Wrong,
            vec!["1.mlp"],
        ),
        ("width", with(pair(&q, [3, 65], [96, 3])), Wrong, vec![fit, "expected [3, 64], got [3, 65]"]),
        ("rank", with(pair(&q, [4, 64], [96, 4])), Wrong, vec![fit, "expected [3, 64], got [4, 64]"]),
        ("ranks differ", with(pair(&q, [3, 64], [96, 2])), Wrong, vec![fit, "lora_B", "got [96, 2]"]),
        ("packed", with(vec![zeros(format!("{q}.lora_A.weight"), &[1, 3, 64])]), Wrong, vec![fit, "[1, 3, 64]"]),
        ("integers", with(vec![Tensor::zeros(&format!("{q}.lora_A.weight"), "I32", &[3, 64], 4)]), Wrong, vec!["I32"]),
        ("bytes", with(vec![Tensor::zeros(&format!("{q}.lora_A.weight"), "U8", &[3, 64], 1)]), Unsupported, vec!["U8"]),
        (
            "which parameter",
            with(pair(&format!("{P}.0.mlp.experts"), [24, 40], [64, 24])),
            Wrong,
            vec!["target_parameters"],
        ),
        ("nothing", vec![], Wrong, vec!["no tensors"]),
    ];
    let mut table = Table::default();
    for (case, tensors, kind, parts) in cases {
        table.fails(case, open(&config, &tensors, &tiny()), kind, &parts);
    }
    let named = |name: &str| Path::new(name).to_owned();
    let file = named("adapter_model.safetensors");
    let (config, fused) = load("experts3d");
    let renamed = |from: &str, to: &str| {
        let mut tensors = fused.clone();
        tensors.iter_mut().for_each(|t| t.name = t.name.replace(from, to));
        tensors
    };
    let three = renamed(".base_layer.", ".base_layer.base_layer.");
    table.fails("three wrappers", open(&config, &three, &tiny()), Wrong, &["3 nested wrappers"]);
    let only_inner: Vec<_> = fused.iter().filter(|t| !t.name.contains("experts.lora")).cloned().collect();
    table.fails("outer wrapper missing", open(&config, &only_inner, &tiny()), Wrong, &["2 nested wrappers", "got 1"]);
    let mut both = fused.clone();
    both.extend(pair(&format!("{P}.0.mlp.experts.3.up_proj"), [4, 64], [40, 4]));
    table.fails("fused and single", open(&config, &both, &tiny()), Wrong, &["both fused", "expert 3"]);
    let swapped = patched(load("down_only").0, &json!({"target_parameters": ["mlp.experts.gate_up_proj"]}));
    table.fails("wrong parameter", open(&swapped, &load("down_only").1, &tiny()), Wrong, &[fit, "got [24, 40]"]);

    let mut other = tiny();
    other.moe.experts = 6;
    table.fails("fewer experts", open(&config, &fused, &other), Wrong, &[fit, "[24, 40]", "got [32, 40]"]);
    let mut other = tiny();
    (other.hidden, other.moe.hidden) = (128, 128);
    table.fails("another width", open(&config, &fused, &other), Wrong, &[fit, &file.display().to_string()]);
    let mut other = tiny();
    other.layers = vec![MlpKind::Dense; 3];
    table.fails("no experts at all", open(&config, &fused, &other), Wrong, &[fit, "no experts"]);

    let config = config.to_string().into_bytes();
    let bin = folder(&[("adapter_config.json", config.clone()), ("adapter_model.bin", vec![0])]);
    table.fails("pickle", Adapter::open(bin.path(), &tiny()), Unsupported, &["convert"]);
    let none = folder(&[("adapter_config.json", config.clone())]);
    table.fails("no weights", Adapter::open(none.path(), &tiny()), ErrorKind::Io, &["adapter_model.safetensors"]);
    table.fails(
        "no folder",
        Adapter::open(Path::new("/nonexistent"), &tiny()),
        ErrorKind::Io,
        &["adapter_config.json"],
    );
    let cut =
        folder(&[("adapter_config.json", config), ("adapter_model.safetensors", encode(&fused)[..5000].to_vec())]);
    table.fails("truncated", Adapter::open(cut.path(), &tiny()), Format, &["adapter_model.safetensors"]);
    table.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_mutation_of_an_adapter_panics(
        config_changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        header_changes in prop::collection::vec((0usize..3000, any::<u8>()), 0..3),
    ) {
        let (config, tensors) = load("experts3d");
        let (mut config, mut tensors) = (config.to_string().into_bytes(), encode(&tensors));
        for (at, byte) in config_changes {
            let at = at.index(config.len());
            config[at] = byte;
        }
        for (at, byte) in header_changes {
            tensors[at] = byte;
        }
        let dir = folder(&[("adapter_config.json", config), ("adapter_model.safetensors", tensors)]);
        let _ = Adapter::open(dir.path(), &tiny());
    }
}
