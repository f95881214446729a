//! Families beside the one that runs: their configurations, checkpoints and adapters, and that they are refused where they
//! would have to run.

#[path = "common/device.rs"]
mod device;
mod files;

use files::layouts::{D, E, F, R, Values, model, pair, values};
use files::{Table, Tensor, data, encode, folder, json_file, open_adapter, patched, read};
use serde_json::{Value, json};
use wgmoe::adapter::{Adapter, Factor, Matrix, Site};
use wgmoe::checkpoint::{Checkpoint, Mixer, MlpKind, ModelConfig};
use wgmoe::family::Family;
use wgmoe::{ErrorKind, LoadOptions, Model, Result};

fn config(json: &Value) -> Result<ModelConfig> {
    ModelConfig::open(folder(&[("config.json", json.to_string().into())]).path())
}

#[test]
fn both_spellings_of_a_configuration_mean_the_same() {
    let mut table = Table::default();
    for (family, experts, width, shared) in [("mixtral", 6, 40, 0), ("olmoe", 8, 40, 0), ("qwen2_moe", 8, 40, 56)] {
        let dir = data("tiny").join(family);
        let new = ModelConfig::open(&dir).unwrap();
        let old = config(&json_file(&dir.join("config.transformers4.json"))).unwrap();
        table.holds(family, old == new, &old);
        let sizes = (new.moe.experts, new.moe.expert_width, new.shared_width, new.n_layers(), new.hidden);
        table.holds(family, sizes == (experts, width, shared, 3, 64), sizes);
        table.holds(family, new.layers == [MlpKind::Experts; 3] && new.family.model_type() == family, &new.layers);
    }
    // Only transformers 5 wrote this one; the older spelling of its keys.
    let new = json_file(&data("tiny/gpt_oss/config.json"));
    let old = json!({"rope_parameters": "<absent>", "rope_theta": 150_000.0, "dtype": "<absent>", "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0}});
    table.holds("gpt_oss", config(&patched(new.clone(), &old)).unwrap() == config(&new).unwrap(), "differs");
    table.finish();
}

fn nemotron() -> Value {
    json!({"model_type": "nemotron_h", "hidden_size": 64, "vocab_size": 100, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "intermediate_size": 96,
        "layer_norm_epsilon": 1e-5, "hybrid_override_pattern": "ME*-"})
}

#[test]
fn layers_of_different_kinds_have_what_they_have() {
    let old = config(&nemotron()).unwrap();
    assert_eq!(old.mixers, [Mixer::Other, Mixer::Mlp, Mixer::Attention, Mixer::Mlp]);
    assert_eq!(old.layers, [MlpKind::Dense, MlpKind::Experts, MlpKind::Dense, MlpKind::Dense]);
    assert_eq!((old.moe.experts, old.moe.expert_width, old.shared_width, old.dense_width), (8, 40, 56, 96));
    let mut table = Table::default();
    for list in [["mamba", "moe", "attention", "mlp"], ["linear_attention", "moe", "full_attention", "mlp"]] {
        let changes = json!({"hybrid_override_pattern": "<absent>", "layers_block_type": list});
        table.holds(list[0], config(&patched(nemotron(), &changes)).unwrap() == old, "differs");
    }
    let cases = [
        (json!({"hybrid_override_pattern": "MEX"}), ErrorKind::Unsupported, "`X`"),
        (json!({"hybrid_override_pattern": ""}), ErrorKind::Config, "hybrid_override_pattern"),
        (json!({"hybrid_override_pattern": null}), ErrorKind::Config, "layers_block_type"),
        (json!({"layers_block_type": [1]}), ErrorKind::Config, "layers_block_type"),
        (json!({"n_routed_experts": null}), ErrorKind::Config, "n_routed_experts"),
        (json!({"num_local_experts": 7}), ErrorKind::Config, "num_local_experts"),
        (json!({"moe_latent_size": 0}), ErrorKind::Config, "moe_latent_size"),
        (json!({"layer_norm_epsilon": 2}), ErrorKind::Config, "layer_norm_epsilon"),
    ];
    for (changes, kind, part) in cases {
        let got = config(&patched(nemotron(), &changes));
        table.fails(&changes.to_string(), got, kind, &["config.json", part]);
    }

    let open = |tensors: &[Tensor]| open_adapter(&json!({"peft_type": "LORA", "r": R}), tensors, &old);
    let at = |module: &str, inn: usize, out: usize| pair(module, &values(R, inn, 1), &values(out, R, 2));
    let good = [
        at("backbone.layers.1.mixer.shared_experts.up_proj", 64, 56),
        at("model.layers.1.mixer.experts.7.down_proj", 40, 64),
        at("model.layers.2.mixer.q_proj", 64, 64),
        at("backbone.layers.3.mixer.up_proj", 64, 96),
    ];
    let places: Vec<_> = open(&good.concat()).unwrap().factors.iter().map(Factor::place).collect();
    let want = [(1, Site::ExpertDown, 7), (1, Site::SharedUp, 0), (2, Site::Q, 0), (3, Site::Up, 0)];
    assert_eq!(places, want);
    let fit = "adapter does not fit";
    let cases = [
        ("backbone.layers.0.mixer.in_proj", 64, 64, "belongs to no module"),
        ("backbone.layers.0.mixer.q_proj", 64, 64, fit),
        ("backbone.layers.1.mixer.o_proj", 64, 64, fit),
        ("backbone.layers.2.mixer.gate", 64, 8, fit),
        ("backbone.layers.3.mixer.experts.0.up_proj", 64, 40, fit),
        ("backbone.layers.1.mixer.experts.0.gate_proj", 64, 40, "belongs to no module"),
        ("backbone.layers.4.mixer.q_proj", 64, 64, fit),
    ];
    for (module, inn, out, part) in cases {
        let parts = ["adapter_model.safetensors", module, part];
        table.fails(module, open(&at(module, inn, out)), ErrorKind::Adapter, &parts);
    }
    let parts = ["adapter_model.safetensors", "experts.gate_proj", fit, "no gate"];
    let packed = at("backbone.layers.1.mixer.experts.gate_proj", 64, 40);
    table.fails("packed gate", open(&packed), ErrorKind::Adapter, &parts);
    let latent = config(&patched(nemotron(), &json!({"moe_latent_size": 32}))).unwrap();
    let narrow = at("backbone.layers.1.mixer.experts.0.up_proj", 32, 40);
    table.holds("latent", open_adapter(&json!({"peft_type": "LORA", "r": R}), &narrow, &latent).is_ok(), "refused");
    table.finish();
}

#[test]
fn checkpoints_whose_tensors_are_all_known_open() {
    let mut table = Table::default();
    let cases = [
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight"),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.5.w3.weight"),
        ("olmoe", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("qwen2_moe", "model.layers.2.self_attn.v_proj.bias"),
    ];
    for (family, missing) in cases {
        let dir = data("tiny").join(family);
        let whole = Checkpoint::open(&dir).unwrap();
        table.holds(family, whole.bytes_read() == 0 && whole.names().len() > 40, whole.names().len());
        let mut tensors = read(&dir.join("model.safetensors"));
        tensors.retain(|t| t.name != missing);
        let config = std::fs::read(dir.join("config.json")).unwrap();
        let less = folder(&[("config.json", config), ("model.safetensors", encode(&tensors))]);
        table.fails(missing, Checkpoint::open(less.path()), ErrorKind::Tensor, &[missing]);
    }
    let other = Checkpoint::open(&data("tiny/gpt_oss"));
    table.fails("gpt_oss", other, ErrorKind::Unsupported, &["tiny/gpt_oss", "`gpt_oss`", "can be inspected"]);
    let bias = patched(json_file(&data("tiny/qwen2_moe/config.json")), &json!({"qkv_bias": false}));
    table.fails("no biases", config(&bias), ErrorKind::Unsupported, &["config.json", "qkv_bias"]);
    table.finish();
}

#[test]
fn a_model_of_a_family_without_a_decoder_is_refused_by_name() {
    let mut table = Table::default();
    for gpu in device::every_tier().iter().take(1) {
        for family in ["mixtral", "olmoe", "qwen2_moe"] {
            let checkpoint = Checkpoint::open(&data("tiny").join(family)).unwrap();
            let got = Model::load(gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {});
            let parts = [format!("`{family}` has no decoder here yet; adapters can be inspected")];
            table.fails(family, got.map(drop), ErrorKind::Unsupported, &[&parts[0]]);
            table.holds(family, checkpoint.bytes_read() == 0, checkpoint.bytes_read());
        }
    }
    let runs: Vec<_> = Family::ALL.into_iter().filter(|f| f.has_decoder()).collect();
    table.holds("runs", runs == [Family::Qwen3Moe], &runs);
    table.finish();
}

/// Site and expert that a module of the saved adapters names.
fn place(module: &str) -> (usize, Site, usize) {
    let parts: Vec<_> = module.split('.').collect();
    let layer = parts[2].parse().unwrap();
    let last = parts[parts.len() - 1];
    let shared = module.contains("shared_expert");
    let site = match last {
        "w1" | "gate_proj" => [Site::ExpertGate, Site::SharedGate][usize::from(shared)],
        "w3" | "up_proj" => [Site::ExpertUp, Site::SharedUp][usize::from(shared)],
        "w2" | "down_proj" => [Site::ExpertDown, Site::SharedDown][usize::from(shared)],
        other => panic!("{other}"),
    };
    (layer, site, if shared { 0 } else { parts[parts.len() - 2].parse().unwrap() })
}

#[test]
fn modules_that_peft_saved_one_by_one_are_the_factors() {
    let mut table = Table::default();
    for (case, n_factors) in
        [("mixtral__perexpert__peft0181_tf457", 36), ("qwen2_moe__perexpert_shared__peft0181_tf457", 42)]
    {
        let dir = data("peft").join(case);
        let base = json_file(&dir.join("meta.json"))["base"].as_str().unwrap().to_owned();
        let model = ModelConfig::open(&data("peft").join(base)).unwrap();
        let adapter = Adapter::open(&dir.join("adapter"), &model).unwrap();
        let settings = json_file(&dir.join("adapter/adapter_config.json"));
        let scale = settings["lora_alpha"].as_f64().unwrap() / settings["r"].as_f64().unwrap();
        table.holds(case, adapter.factors.len() == n_factors, adapter.factors.len());
        let tensors = read(&dir.join("adapter/adapter_model.safetensors"));
        table.holds(case, tensors.len() == 2 * n_factors, tensors.len());
        for t in &tensors {
            let module = t.name.strip_prefix("base_model.model.").unwrap();
            let (module, side) = module.split_once(".lora_").unwrap();
            let Some(f) = adapter.factors.iter().find(|f| f.place() == place(module)) else {
                table.holds(&t.name, false, "no factor");
                continue;
            };
            let m: &Matrix = if side.starts_with('A') { &f.a } else { &f.b };
            let same = m.bytes == t.bytes && [m.rows, m.cols] == t.shape[..] && f.scale == scale as f32;
            table.holds(&t.name, same, (m.rows, m.cols, f.scale));
        }
    }
    table.finish();
}

/// Embedding and LM head of the model of `layouts`, with copies of both base weights.
fn outside_the_layers() -> Vec<Tensor> {
    let mut tensors = pair("lm_head", &values(R, D, 1), &values(10, R, 2));
    let f32s = |name: &str, (rows, cols, values): Values| Tensor {
        name: format!("base_model.model.{name}"),
        dtype: "F32".to_owned(),
        shape: vec![rows, cols],
        bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    tensors.push(f32s("model.embed_tokens.lora_embedding_A", values(R, 10, 3)));
    tensors.push(f32s("model.embed_tokens.lora_embedding_B", values(D, R, 4)));
    tensors.push(f32s("model.embed_tokens.base_layer.weight", values(10, D, 5)));
    tensors.push(f32s("lm_head.base_layer.weight", values(10, D, 6)));
    tensors
}

#[test]
fn embedding_and_head_stand_behind_the_layers_and_copies_of_them_are_not_read() {
    let model = model(Family::Qwen2Moe);
    let settings = json!({"peft_type": "LORA", "r": R, "target_modules": ["lm_head", "embed_tokens"]});
    let tensors = outside_the_layers();
    let adapter = open_adapter(&settings, &tensors, &model).unwrap();
    let got: Vec<_> = adapter
        .factors
        .iter()
        .map(|f| (f.place(), [f.a.rows, f.a.cols], f.a.dtype.decode(&f.a.bytes), f.b.dtype.decode(&f.b.bytes)))
        .collect();
    let n = model.n_layers();
    let want = [
        ((n, Site::Embedding, 0), [R, 10], values(R, 10, 3).2, values(D, R, 4).2),
        ((n, Site::LmHead, 0), [R, D], values(R, D, 1).2, values(10, R, 2).2),
    ];
    assert_eq!(got, want);
    assert_eq!(adapter.bytes_read as usize, tensors[..4].iter().map(|t| t.bytes.len()).sum::<usize>());

    let mut table = Table::default();
    let changed = |name: &str, shape: [usize; 2]| {
        let mut tensors = outside_the_layers();
        let t = tensors.iter_mut().find(|t| t.name.contains(name)).unwrap();
        *t = Tensor::zeros(&t.name.clone(), "F32", &shape, 4);
        open_adapter(&settings, &tensors, &model)
    };
    for (name, shape, part) in [
        ("lm_head.base_layer", [11, D], "expected [10, 24], got [11, 24]"),
        ("embed_tokens.base_layer", [D, 10], "expected [10, 24], got [24, 10]"),
        ("lora_embedding_A", [10, R], "expected [3, 10], got [10, 3]"),
        ("lora_embedding_B", [D, 2], "expected [24, 3], got [24, 2]"),
    ] {
        let parts = ["adapter_model.safetensors", "adapter does not fit", name, part];
        table.fails(name, changed(name, shape), ErrorKind::Adapter, &parts);
    }
    for (changes, tensor, part) in [
        (json!({"ensure_weight_tying": true}), "embed_tokens.lora_embedding_A", "`ensure_weight_tying`"),
        (json!({"lora_bias": true}), "embed_tokens.lora_embedding_A", "`lora_bias` on an embedding"),
    ] {
        let got = open_adapter(&patched(settings.clone(), &changes), &tensors, &model);
        table.fails(part, got, ErrorKind::Unsupported, &["adapter_model.safetensors", tensor, part]);
    }
    let mut wrapped = tensors.clone();
    wrapped.iter_mut().for_each(|t| t.name = t.name.replace("base_model.model.", "base_model.model.language_model."));
    let got = open_adapter(&settings, &wrapped, &model).map(|a| a.factors.len());
    table.holds("within a larger model", got.as_ref().is_ok_and(|n| *n == 2), &got);
    table.finish();
}

#[test]
fn the_shared_expert_and_what_weighs_it_are_sites() {
    let model = model(Family::Qwen2Moe);
    let at = |name: &str, inn: usize, out: usize, tag| {
        pair(&format!("model.layers.1.mlp.{name}"), &values(R, inn, tag), &values(out, R, tag + 1))
    };
    let tensors = [
        at("shared_expert.gate_proj", D, 5, 1),
        at("shared_expert.up_proj", D, 5, 3),
        at("shared_expert.down_proj", 5, D, 5),
        at("shared_expert_gate", D, 1, 7),
        at("gate", D, E, 9),
    ];
    let adapter = open_adapter(&json!({"peft_type": "LORA", "r": R}), &tensors.concat(), &model).unwrap();
    let places: Vec<_> = adapter.factors.iter().map(|f| (f.place(), [f.b.rows, f.a.cols])).collect();
    let want = [
        ((1, Site::Router, 0), [E, D]),
        ((1, Site::SharedGate, 0), [5, D]),
        ((1, Site::SharedUp, 0), [5, D]),
        ((1, Site::SharedDown, 0), [D, 5]),
        ((1, Site::SharedRouter, 0), [1, D]),
    ];
    assert_eq!(places, want);
    let mut table = Table::default();
    let got = open_adapter(&json!({"peft_type": "LORA", "r": R}), &tensors[0], &files::layouts::model(Family::Mixtral));
    table.fails("none here", got, ErrorKind::Adapter, &["adapter_model.safetensors", "shared_expert", "no module"]);
    table.finish();
}

#[test]
fn what_fused_experts_do_not_have_is_refused() {
    let mut table = Table::default();
    let gpt_oss = model(Family::GptOss);
    let experts = "model.layers.0.mlp.experts";
    let pairs = |wrapper: &str, inn: usize, out: usize| {
        pair(&format!("{experts}{wrapper}"), &values(R * E, inn, 1), &values(out, R * E, 2))
    };
    let settings = |targets: Value| json!({"peft_type": "LORA", "r": R, "target_parameters": targets});
    let two = [pairs(".base_layer", D, 2 * F), pairs("", F, D)].concat();
    let got = open_adapter(&settings(json!(["experts.gate_up_proj", "experts.gate_up_proj_bias"])), &two, &gpt_oss);
    let parts = ["adapter_model.safetensors", "mlp.experts", "`gate_up_proj_bias`"];
    table.fails("bias of an expert", got, ErrorKind::Unsupported, &parts);

    let packed = |side: &str, shape: &[usize]| {
        Tensor::zeros(&format!("base_model.model.{experts}.gate_up_proj.lora_{side}.weight"), "F32", shape, 4)
    };
    let tensors = [packed("A", &[E, R, D]), packed("B", &[E, 2 * F, R])];
    let got = open_adapter(&settings(json!([])), &tensors, &gpt_oss);
    let parts = ["adapter_model.safetensors", "gate_up_proj.lora_A", "row by row"];
    table.fails("packed in turns", got, ErrorKind::Unsupported, &parts);

    let biased = |module: &str, mut tensors: Vec<Tensor>, out: usize| {
        tensors.push(Tensor::zeros(&format!("base_model.model.{module}.lora_B.bias"), "F32", &[out], 4));
        tensors
    };
    let settings = json!({"peft_type": "LORA", "r": R, "lora_bias": true});
    let qwen = model(Family::Qwen3Moe);
    let fused = biased(experts, pairs("", F, D), D);
    let got = open_adapter(&settings, &fused, &qwen);
    let parts = ["adapter_model.safetensors", "experts.lora_B.bias", "`lora_bias` on fused experts"];
    table.fails("fused", got, ErrorKind::Unsupported, &parts);

    let gate = "model.layers.0.mlp.gate";
    let plain = pair(gate, &values(R, D, 1), &values(E, R, 2));
    let parts = ["adapter_model.safetensors", "gate.lora_B.weight", "no `lora_B.bias`"];
    table.fails("no bias", open_adapter(&settings, &plain, &qwen), ErrorKind::Adapter, &parts);
    let parts = ["adapter_model.safetensors", "gate.lora_B.bias", "expected [7], got [8]"];
    let got = open_adapter(&settings, &biased(gate, plain.clone(), E + 1), &qwen);
    table.fails("bias of another width", got, ErrorKind::Adapter, &parts);
    let alone = biased(gate, Vec::new(), E);
    let parts = ["adapter_model.safetensors", "gate.lora_B.bias", "no `lora_A`"];
    table.fails("bias alone", open_adapter(&settings, &alone, &qwen), ErrorKind::Adapter, &parts);
    let got = open_adapter(&settings, &biased(gate, plain, E), &qwen).map(|a| a.factors[0].bias.is_some());
    table.holds("bias", got.as_ref().is_ok_and(|b| *b), &got);
    table.finish();
}
