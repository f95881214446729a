//! Adapter folders that are not plain LoRA on the model at hand: each refused by name, none with a panic.

mod files;

use std::path::Path;

use files::{Table, Tensor, encode, folder, load_adapter, open_adapter, patched, tiny};
use proptest::prelude::*;
use serde_json::json;
use wgmoe::ErrorKind;
use wgmoe::adapter::Adapter;
use wgmoe::checkpoint::MlpKind;

#[test]
fn settings_that_change_the_maths_are_refused_by_name() {
    use ErrorKind::{Config, Unsupported};
    let cases = [
        (json!({"use_dora": true}), Unsupported, "use_dora"),
        (json!({"lora_bias": true}), Unsupported, "`lora_bias` with `target_parameters`"),
        (json!({"lora_bias": "yes"}), Config, "lora_bias"),
        (json!({"ensure_weight_tying": 1}), Config, "ensure_weight_tying"),
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
    let (config, tensors) = load_adapter("experts3d");
    let mut table = Table::default();
    for (changes, kind, part) in cases {
        table.fails(
            &changes.to_string(),
            open_adapter(&patched(config.clone(), &changes), &tensors, &tiny()),
            kind,
            &[part, "adapter_"],
        );
    }
    let text = config.to_string().replacen("\"lora_alpha\":8", "\"lora_alpha\":1e999", 1);
    let dir = folder(&[("adapter_config.json", text.into()), ("adapter_model.safetensors", encode(&tensors))]);
    table.fails("infinite alpha", Adapter::open(dir.path(), &tiny()), ErrorKind::Format, &["adapter_config.json"]);
    let harmless = [
        json!({"use_dora": false, "modules_to_save": [], "loftq_config": {}, "arrow_config": null}),
        json!({"lora_bias": false, "ensure_weight_tying": true}),
        json!({"init_lora_weights": "gaussian", "lora_alpha": 7.5, "anything": {"else": 1}}),
        json!({"target_modules": "all-linear", "lora_B_layout": "rank_major"}),
        json!({"target_modules": ".*\\.q_proj", "bias": null}),
    ];
    for changes in harmless {
        let got = open_adapter(&patched(config.clone(), &changes), &tensors, &tiny());
        table.holds(&changes.to_string(), got.is_ok(), got.err());
    }
    table.finish();
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
    let (config, good) = load_adapter("attn_only");
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
        ("bias", one(format!("{q}.lora_B.bias")), Wrong, vec!["q_proj.lora_B.bias", "`lora_bias`"]),
        ("bias of the model", one(format!("{q}.base_layer.bias")), Unsupported, vec!["q_proj", "a bias of the model"]),
        ("half an embedding", one("model.embed_tokens.lora_embedding_A".into()), Wrong, vec!["embed", "no `lora_B`"]),
        (
            "another embedding",
            one("base_model.model.model.position.lora_embedding_A".into()),
            Unsupported,
            vec!["position", "embedding"],
        ),
        (
            "linear factors of an embedding",
            with(pair("base_model.model.model.embed_tokens", [3, 64], [256, 3])),
            Wrong,
            vec!["embed_tokens.lora_A.weight", "no module"],
        ),
        ("head", with(pair("base_model.model.lm_head", [3, 64], [255, 3])), Wrong, vec![fit, "lm_head", "[256, 3]"]),
        (
            "head in full",
            one("base_model.model.lm_head.weight".into()),
            Unsupported,
            vec!["lm_head", "modules_to_save"],
        ),
        (
            "modules to save",
            one("base_model.model.lm_head.modules_to_save.weight".into()),
            Unsupported,
            vec!["lm_head", "modules_to_save"],
        ),
        (
            "tokens",
            one("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta".into()),
            Unsupported,
            vec!["embed_tokens", "trainable_token_indices"],
        ),
        (
            "copy alone",
            one("base_model.model.lm_head.base_layer.weight".into()),
            Unsupported,
            vec!["lm_head.base_layer", "without factors"],
        ),
        ("copy of nothing", one("model.visual.base_layer.weight".into()), Wrong, vec!["visual", "no module"]),
        ("no layer number", one("model.visual.merger.lora_A.weight".into()), Wrong, vec!["visual", "no module"]),
        ("norm", with(pair("model.norm", [3, 64], [64, 3])), Unsupported, vec!["model.norm", "not supported"]),
        (
            "expert of a list",
            with(pair(&format!("{P}.0.mlp.experts.down_projs.8"), [3, 40], [64, 3])),
            Wrong,
            vec![fit, "down_projs.8"],
        ),
        (
            "number of a list",
            with(pair(&format!("{P}.0.mlp.experts.down_projs.07"), [3, 40], [64, 3])),
            Wrong,
            vec!["down_projs.07", "no module"],
        ),
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
    for (case, tensors, kind, mut parts) in cases {
        parts.push("adapter_model.safetensors");
        table.fails(case, open_adapter(&config, &tensors, &tiny()), kind, &parts);
    }
    let (config, fused) = load_adapter("experts3d");
    let renamed = |from: &str, to: &str| {
        let mut tensors = fused.clone();
        tensors.iter_mut().for_each(|t| t.name = t.name.replace(from, to));
        tensors
    };
    let three = renamed(".base_layer.", ".base_layer.base_layer.");
    table.fails("three wrappers", open_adapter(&config, &three, &tiny()), Wrong, &["3 nested wrappers"]);
    let only_inner: Vec<_> = fused.iter().filter(|t| !t.name.contains("experts.lora")).cloned().collect();
    table.fails(
        "outer wrapper missing",
        open_adapter(&config, &only_inner, &tiny()),
        Wrong,
        &["2 nested wrappers", "got 1"],
    );
    let mut both = fused.clone();
    both.extend(pair(&format!("{P}.0.mlp.experts.3.up_proj"), [4, 64], [40, 4]));
    table.fails("fused and single", open_adapter(&config, &both, &tiny()), Wrong, &["both fused", "expert 3"]);
    let swapped = patched(load_adapter("down_only").0, &json!({"target_parameters": ["mlp.experts.gate_up_proj"]}));
    table.fails(
        "wrong parameter",
        open_adapter(&swapped, &load_adapter("down_only").1, &tiny()),
        Wrong,
        &[fit, "got [24, 40]"],
    );

    let mut other = tiny();
    other.moe.experts = 6;
    table.fails("fewer experts", open_adapter(&config, &fused, &other), Wrong, &[fit, "[24, 40]", "got [32, 40]"]);
    let mut other = tiny();
    (other.hidden, other.moe.hidden) = (128, 128);
    table.fails("another width", open_adapter(&config, &fused, &other), Wrong, &[fit, "adapter_model.safetensors"]);
    let mut other = tiny();
    other.layers = vec![MlpKind::Dense; 3];
    table.fails("no experts at all", open_adapter(&config, &fused, &other), Wrong, &[fit, "no experts"]);

    let config = config.to_string().into_bytes();
    let bin = folder(&[("adapter_config.json", config.clone()), ("adapter_model.bin", vec![0])]);
    table.fails("pickle", Adapter::open(bin.path(), &tiny()), Format, &["adapter_model.bin", "truncated"]);
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
        let (config, tensors) = load_adapter("experts3d");
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
