//! Model folders: what is read from good ones, and that every kind of broken one is refused with its own message.

mod files;

use std::path::Path;

use files::{TINY, Table, Tensor, data, encode, folder, json_file, patched, raw, read};
use proptest::prelude::*;
use serde_json::{Value, json};
use wgmoe::checkpoint::{Checkpoint, ExpertPart, MlpKind, ModelConfig, SafetensorsFile};
use wgmoe::{ErrorKind, Result};

fn tiny_config() -> Value {
    json_file(&data(TINY).join("config.json"))
}

fn tiny_tensors() -> Vec<Tensor> {
    read(&data(TINY).join("model.safetensors"))
}

fn open(config: &Value, tensors: &[Tensor]) -> Result<Checkpoint> {
    let dir = folder(&[("config.json", config.to_string().into()), ("model.safetensors", encode(tensors))]);
    Checkpoint::open(dir.path())
}

#[test]
fn both_spellings_of_the_configuration_mean_the_same() {
    let new = ModelConfig::open(&data(TINY)).unwrap();
    let old = std::fs::read(data(TINY).join("config.transformers4.json")).unwrap();
    let dir = folder(&[("config.json", old)]);
    assert_eq!(ModelConfig::open(dir.path()).unwrap(), new);
    assert_eq!((new.hidden, new.heads, new.kv_heads, new.head_dim, new.vocab), (64, 4, 2, 24, 256));
    assert_eq!((new.moe.experts, new.moe.top_k, new.moe.expert_width, new.dense_width), (8, 3, 40, 96));
    assert_eq!(new.layers, [MlpKind::Experts, MlpKind::Dense, MlpKind::Experts]);
    assert_eq!((new.rope_theta, new.rms_eps, new.stop_ids.as_slice()), (10000.0, 1e-6, [1].as_slice()));
}

#[test]
fn defaults_and_stop_ids() {
    let config = |changes: Value, generation: Option<&str>| {
        let config = patched(tiny_config(), &changes).to_string().into_bytes();
        let mut list = vec![("config.json", config)];
        list.extend(generation.map(|g| ("generation_config.json", g.into())));
        ModelConfig::open(folder(&list).path()).unwrap()
    };
    assert_eq!(config(json!({"eos_token_id": [3, 4]}), None).stop_ids, [3, 4]);
    assert_eq!(config(json!({}), Some(r#"{"eos_token_id": [7, 9]}"#)).stop_ids, [7, 9]);
    assert_eq!(config(json!({"eos_token_id": 5}), Some("{}")).stop_ids, [5]);
    assert!(config(json!({"eos_token_id": null}), None).stop_ids.is_empty());
    assert_eq!(config(json!({"head_dim": null}), None).head_dim, 16);
    assert_eq!(config(json!({"num_key_value_heads": null}), None).kv_heads, 4);
    let sparse = config(json!({"decoder_sparse_step": 2, "mlp_only_layers": []}), None).layers;
    assert_eq!(sparse, [MlpKind::Dense, MlpKind::Experts, MlpKind::Dense]);
}

#[test]
fn settings_that_change_the_result_or_make_no_sense_are_refused() {
    use ErrorKind::{Config, Unsupported};
    let cases = [
        (json!({"model_type": "quasar"}), Unsupported, "`qwen3_moe`"),
        (json!({"model_type": "<absent>"}), Config, "model_type"),
        (json!({"attention_bias": true}), Unsupported, "attention_bias"),
        (json!({"use_sliding_window": true}), Unsupported, "use_sliding_window"),
        (json!({"hidden_act": "gelu"}), Unsupported, "hidden_act"),
        (json!({"quantization_config": {"bits": 4}}), Unsupported, "quantization_config"),
        (json!({"partial_rotary_factor": 0.5}), Unsupported, "partial_rotary_factor"),
        (json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), Unsupported, "yarn"),
        (json!({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}), Unsupported, "llama3"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}), Unsupported, "layer type"),
        (json!({"dtype": "int8"}), Unsupported, "int8"),
        (json!({"layer_types": ["sliding_attention"]}), Unsupported, "layer_types"),
        (json!({"hidden_size": 0}), Config, "hidden_size"),
        (json!({"hidden_size": 64.5}), Config, "hidden_size"),
        (json!({"hidden_size": -1}), Config, "hidden_size"),
        (json!({"hidden_size": 18446744073709551615u64}), Config, "hidden_size"),
        (json!({"num_attention_heads": 0}), Config, "num_attention_heads"),
        (json!({"num_key_value_heads": 3}), Config, "num_key_value_heads"),
        (json!({"num_key_value_heads": "<absent>"}), Config, "num_key_value_heads"),
        (json!({"head_dim": 23}), Config, "head_dim"),
        (json!({"num_local_experts": 0}), Config, "num_local_experts"),
        (json!({"num_experts": 9}), Config, "num_local_experts"),
        (json!({"num_local_experts": "<absent>"}), Config, "num_experts"),
        (json!({"num_experts_per_tok": 9}), Config, "num_experts_per_tok"),
        (json!({"num_hidden_layers": 1000000000}), Config, "num_hidden_layers"),
        (json!({"mlp_only_layers": [3]}), Config, "mlp_only_layers"),
        (json!({"decoder_sparse_step": 0}), Config, "decoder_sparse_step"),
        (json!({"rms_norm_eps": -1.0}), Config, "rms_norm_eps"),
        (json!({"rope_parameters": {"rope_theta": 0.0}}), Config, "rope_theta"),
        (json!({"rope_parameters": null}), Config, "rope_theta"),
        (json!({"eos_token_id": 256}), Config, "eos_token_id"),
        (json!({"eos_token_id": "x"}), Config, "eos_token_id"),
        (json!({"tie_word_embeddings": "yes"}), Config, "tie_word_embeddings"),
    ];
    let mut table = Table::default();
    for (changes, kind, part) in cases {
        let dir = folder(&[("config.json", patched(tiny_config(), &changes).to_string().into())]);
        table.fails(&changes.to_string(), ModelConfig::open(dir.path()), kind, &[part, "config.json"]);
    }
    for (case, text) in [("a list", "[]"), ("no JSON", "{"), ("nothing", ""), ("deep", &"[".repeat(100_000))] {
        let dir = folder(&[("config.json", text.into())]);
        table.fails(case, ModelConfig::open(dir.path()), ErrorKind::Format, &["config.json"]);
    }
    table.fails("no file", ModelConfig::open(folder(&[]).path()), ErrorKind::Io, &["config.json"]);
    table.finish();
}

#[test]
fn only_the_bytes_handed_out_are_counted() {
    let checkpoint = Checkpoint::open(&data(TINY)).unwrap();
    assert_eq!(checkpoint.bytes_read(), 0);
    let block = checkpoint.expert_block(2, 7, ExpertPart::Down, 8..40).unwrap();
    assert_eq!(checkpoint.bytes_read(), 0);
    assert_eq!((block.rows(), block.cols(), block.to_vec().unwrap().len()), (64, 32, 64 * 32 * 2));
    assert_eq!(checkpoint.bytes_read(), 64 * 32 * 2);
    let view = checkpoint.tensor("model.norm.weight").unwrap();
    assert_eq!(view.bytes(2..6).unwrap().len(), 4);
    assert!(view.bytes(2..129).is_err());
    assert_eq!(checkpoint.bytes_read(), 64 * 32 * 2 + 4);
    assert_eq!(checkpoint.names().len(), 80);
}

#[test]
fn experts_outside_the_model_are_errors() {
    let checkpoint = Checkpoint::open(&data(TINY)).unwrap();
    let mut table = Table::default();
    for (layer, expert) in [(0, 8), (1, 0), (3, 0), (usize::MAX, usize::MAX)] {
        let got = checkpoint.expert_block(layer, expert, ExpertPart::Gate, 0..40);
        table.fails(&format!("layer {layer} expert {expert}"), got, ErrorKind::Tensor, &["no expert"]);
    }
    // A range may end before it begins, though a literal may not.
    for width in [0..41, 41..41, std::ops::Range { start: 7, end: 6 }] {
        let got = checkpoint.expert_block(0, 0, ExpertPart::Gate, width.clone());
        table.fails(&format!("{width:?}"), got, ErrorKind::Tensor, &["0..40"]);
    }
    table.fails("unknown name", checkpoint.tensor("x"), ErrorKind::Tensor, &["`x` is missing"]);
    table.finish();
}

/// The tiny model with the experts of `layer` fused.
fn fused(layer: usize, keep: bool) -> Vec<Tensor> {
    let all = tiny_tensors();
    let prefix = format!("model.layers.{layer}.mlp.experts.");
    let bytes = |expert: usize, part: &str| {
        let name = format!("{prefix}{expert}.{part}_proj.weight");
        all.iter().find(|t| t.name == name).unwrap().bytes.clone()
    };
    let (mut gate_up, mut down) = (Vec::new(), Vec::new());
    for expert in 0..8 {
        gate_up.extend(bytes(expert, "gate"));
        gate_up.extend(bytes(expert, "up"));
        down.extend(bytes(expert, "down"));
    }
    let tensor = |part: &str, shape: [usize; 3], bytes| Tensor {
        name: format!("{prefix}{part}"),
        dtype: "BF16".into(),
        shape: shape.into(),
        bytes,
    };
    let mut tensors: Vec<_> = all.iter().filter(|t| keep || !t.name.starts_with(&prefix)).cloned().collect();
    tensors.push(tensor("gate_up_proj", [8, 80, 64], gate_up));
    tensors.push(tensor("down_proj", [8, 64, 40], down));
    tensors
}

#[test]
fn fused_and_single_experts_give_the_same_rows() {
    let single = Checkpoint::open(&data(TINY)).unwrap();
    let dir =
        folder(&[("config.json", tiny_config().to_string().into()), ("model.safetensors", encode(&fused(2, false)))]);
    let both = Checkpoint::open(dir.path()).unwrap();
    let mut table = Table::default();
    for (layer, expert, part) in
        [0, 2].into_iter().flat_map(|l| (0..8).flat_map(move |e| ExpertPart::ALL.map(|p| (l, e, p))))
    {
        for width in [0..40, 7..19, 3..3] {
            let block = |c: &Checkpoint| {
                let block = c.expert_block(layer, expert, part, width.clone()).unwrap();
                (block.rows(), block.cols(), block.dtype(), block.to_vec().unwrap())
            };
            let case = format!("layer {layer} expert {expert} {part:?} {width:?}");
            table.holds(&case, block(&single) == block(&both), "differs");
        }
    }
    table.finish();
}

#[test]
fn weights_of_another_model_are_refused() {
    use ErrorKind::{Tensor as Wrong, Unsupported};
    let norm = "model.norm.weight";
    let without = |name: &str| tiny_tensors().into_iter().filter(|t| t.name != name).collect::<Vec<_>>();
    let with = |tensor: Tensor| {
        let mut tensors = without(&tensor.name);
        tensors.push(tensor);
        tensors
    };
    let zeros = |name, dtype, shape: &[usize], size| with(Tensor::zeros(name, dtype, shape, size));
    let experts = "model.layers.0.mlp.experts.3.up_proj.weight";
    let cases = [
        ("missing norm", without(norm), Wrong, vec![norm, "expected"]),
        ("missing expert", without(experts), Wrong, vec![experts]),
        ("missing head", without("lm_head.weight"), Wrong, vec!["lm_head.weight"]),
        ("shape", zeros(norm, "BF16", &[63], 2), Wrong, vec!["expected [64], got [63]", "model.safetensors"]),
        ("rank", zeros(norm, "BF16", &[64, 1], 2), Wrong, vec!["got [64, 1]"]),
        ("integers", zeros(norm, "I32", &[64], 4), Wrong, vec![norm, "got `I32`"]),
        ("fp8", zeros(norm, "F8_E4M3", &[64], 1), Unsupported, vec![norm, "F8_E4M3"]),
        ("scale", zeros("model.norm.weight_scale", "BF16", &[1], 2), Wrong, vec!["unknown `model.norm.weight_scale`"]),
        ("layer", zeros("model.layers.3.self_attn.q_norm.weight", "BF16", &[24], 2), Wrong, vec!["layers.3"]),
        (
            "expert",
            zeros("model.layers.0.mlp.experts.8.up_proj.weight", "BF16", &[40, 64], 2),
            Wrong,
            vec!["experts.8"],
        ),
        (
            "router of a dense layer",
            zeros("model.layers.1.mlp.gate.weight", "BF16", &[8, 64], 2),
            Wrong,
            vec!["layers.1"],
        ),
        ("stored twice", fused(0, true), Wrong, vec!["stored twice"]),
    ];
    let mut table = Table::default();
    for (case, tensors, kind, parts) in cases {
        table.fails(case, open(&tiny_config(), &tensors), kind, &parts);
    }
    let huge = |key: &str| patched(tiny_config(), &json!({key: 16384}));
    table.fails("layers far beyond the files", open(&huge("num_hidden_layers"), &tiny_tensors()), Wrong, &["layers.3"]);
    let experts = open(&huge("num_local_experts"), &fused(0, false));
    table.fails("experts far beyond the files", experts, Wrong, &["expected [16384, "]);
    let tied = patched(tiny_config(), &json!({"tie_word_embeddings": true}));
    table.holds("tied, no head", open(&tied, &without("lm_head.weight")).is_ok(), "refused");
    table.holds("tied, with head", open(&tied, &tiny_tensors()).is_ok(), "refused");
    table.finish();
}

#[test]
fn broken_safetensors_files_are_refused() {
    let good = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let two = |b: &str| format!(r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"b":{b}}}"#);
    let f = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let one = |tensor: String| format!(r#"{{"a":{tensor}}}"#);
    let data8 = [0; 8];
    let mut not_utf8 = raw(good, &data8);
    not_utf8[10] = 0xff;
    let length = |n: u64, rest: &[u8]| [&n.to_le_bytes()[..], rest].concat();
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "truncated"),
        ("nine bytes", vec![0; 9], "truncated"),
        ("header of one byte", length(1, b"{}"), "too small"),
        ("header beyond the file", length(3, b"{}"), "truncated"),
        ("header of 2^64-1 bytes", length(u64::MAX, b"{}"), "too large"),
        ("header above the cap", length(100_000_001, b"{}"), "too large"),
        ("cut data", raw(good, &data8[..7]), "`a`"),
        ("not UTF-8", not_utf8, "UTF-8"),
        ("a list", raw("[]", &[]), "object"),
        ("space in front", raw(" {}", &[]), "object"),
        ("no JSON", raw("{\"a\"", &[]), "header"),
        ("deep", raw(&format!("{{\"a\":{}", "[".repeat(10_000)), &[]), "header"),
        (
            "tensor twice",
            raw(&two(&f("F32", "[2]", "[8,16]")).replace("\"b\"", "\"a\""), &[0; 16]),
            "duplicate key `a`",
        ),
        ("dtype twice", raw(&good.replace("{\"dtype", "{\"dtype\":\"F32\",\"dtype"), &data8), "duplicate key `dtype`"),
        ("metadata twice", raw("{\"__metadata__\":{},\"__metadata__\":{}}", &[]), "duplicate key"),
        ("key of metadata twice", raw(r#"{"__metadata__":{"a":"b","a":"c"}}"#, &[]), "duplicate key `a`"),
        ("metadata of numbers", raw(r#"{"__metadata__":{"a":1}}"#, &[]), "header"),
        ("extra key", raw(&good.replace("\"shape", "\"x\":1,\"shape"), &data8), "unknown key `x`"),
        ("no shape", raw(r#"{"a":{"dtype":"F32","data_offsets":[0,8]}}"#, &data8), "shape"),
        ("tensor as a list", raw(r#"{"a":["F32",[2],[0,8]]}"#, &data8), "header"),
        ("unknown dtype", raw(&one(f("F33", "[2]", "[0,8]")), &data8), "unknown dtype `F33`"),
        ("negative size", raw(&one(f("F32", "[-2]", "[0,8]")), &data8), "header"),
        ("fraction", raw(&one(f("F32", "[2.0]", "[0,8]")), &data8), "header"),
        ("three offsets", raw(&one(f("F32", "[2]", "[0,8,8]")), &data8), "header"),
        ("one offset", raw(&one(f("F32", "[2]", "[0]")), &data8), "header"),
        ("backwards", raw(&one(f("F32", "[2]", "[8,0]")), &data8), "8..0"),
        ("beyond the data", raw(&one(f("F32", "[4]", "[0,16]")), &data8), "0..16"),
        ("shape and range differ", raw(&one(f("F32", "[3]", "[0,8]")), &data8), "expected 12 bytes"),
        ("product overflows", raw(&one(f("F32", "[4294967296,4294967296]", "[0,8]")), &data8), "overflows"),
        ("zero hides an overflow", raw(&one(f("F32", "[9223372036854775807,9,0]", "[0,0]")), &[]), "overflows"),
        ("half a byte", raw(&one(f("F4", "[3]", "[0,2]")), &[0; 2]), "whole bytes"),
        ("overlap", raw(&two(&f("F32", "[2]", "[4,12]")), &[0; 12]), "overlaps"),
        ("same range", raw(&two(&f("F32", "[2]", "[0,8]")), &data8), "overlaps"),
        ("gap", raw(&two(&f("F32", "[2]", "[12,20]")), &[0; 20]), "gap"),
        ("gap in front", raw(&one(f("F32", "[2]", "[4,12]")), &[0; 12]), "gap"),
        ("trailing bytes", raw(good, &[0; 9]), "trailing"),
        ("data without tensors", raw("{}", &[0]), "trailing"),
    ];
    let mut table = Table::default();
    for (case, bytes, part) in cases {
        let dir = folder(&[("x.safetensors", bytes)]);
        let got = SafetensorsFile::open(&dir.path().join("x.safetensors"));
        table.fails(case, got, ErrorKind::Format, &[part, "x.safetensors"]);
    }
    let dir = folder(&[("x.safetensors", raw(good, &data8)), ("y", raw(&one(f("U8", "[8]", "[0,8]")), &data8))]);
    table.holds("good", SafetensorsFile::open(&dir.path().join("x.safetensors")).is_ok(), "refused");
    let bytes = SafetensorsFile::open(&dir.path().join("y")).unwrap();
    table.fails("type that is not read", bytes.tensor("a"), ErrorKind::Unsupported, &["`a`", "`U8`"]);
    table.fails("folder", SafetensorsFile::open(dir.path()), ErrorKind::Io, &["regular file"]);
    table.fails("nothing there", SafetensorsFile::open(Path::new("/nonexistent")), ErrorKind::Io, &["nonexistent"]);
    table.finish();
}

/// The tiny model in two shards: file names, contents, and the index.
fn shards() -> (Vec<Tensor>, Vec<Tensor>, Value) {
    let (a, b): (Vec<_>, Vec<_>) = tiny_tensors().into_iter().partition(|t| t.name.contains("layers.0"));
    let names =
        |tensors: &[Tensor], file: &str| tensors.iter().map(|t| (t.name.clone(), file.into())).collect::<Vec<_>>();
    let map: serde_json::Map<_, Value> =
        names(&a, "a.safetensors").into_iter().chain(names(&b, "b.safetensors")).collect();
    (a, b, json!({"metadata": {"total_size": 1}, "weight_map": map}))
}

#[test]
fn shards_must_agree_with_their_index() {
    const INDEX: &str = "model.safetensors.index.json";
    let (a, b, index) = shards();
    let config: Vec<u8> = tiny_config().to_string().into();
    let open = |a: &[Tensor], b: &[Tensor], index: Option<String>| {
        let mut list = vec![
            ("config.json", config.clone()),
            ("a.safetensors", encode(a)),
            ("b.safetensors", encode(b)),
            ("secret", encode(b)),
        ];
        list.extend(index.map(|text| (INDEX, text.into())));
        let dir = folder(&list);
        #[cfg(unix)]
        std::os::unix::fs::symlink(data(TINY).join("model.safetensors"), dir.path().join("link")).unwrap();
        Checkpoint::open(dir.path()).map(|c| c.names().len())
    };
    let moved = |file: &str| {
        let mut index = index.clone();
        index["weight_map"]["lm_head.weight"] = file.into();
        Some(index.to_string())
    };
    let all = Some(index.to_string());
    let twice = [a.clone(), vec![b[0].clone()]].concat();
    let mut fewer = index.clone();
    fewer["weight_map"].as_object_mut().unwrap().remove("lm_head.weight");
    let repeated =
        index.to_string().replace("\"weight_map\":{", "\"weight_map\":{\"lm_head.weight\":\"b.safetensors\",");

    let mut table = Table::default();
    table.holds("with index", matches!(open(&a, &b, all.clone()), Ok(80)), "refused");
    table.holds("without index", matches!(open(&a, &b, None), Ok(80)), "refused");
    let format = ErrorKind::Format;
    table.fails("parent", open(&a, &b, moved("../b.safetensors")), format, &["leads out", INDEX]);
    table.fails("inner parent", open(&a, &b, moved("x/../../b.safetensors")), format, &["leads out"]);
    table.fails("absolute", open(&a, &b, moved("/etc/passwd")), format, &["leads out"]);
    table.fails("empty", open(&a, &b, moved("")), format, &["leads out"]);
    table.fails("backslash", open(&a, &b, moved("..\\b.safetensors")), format, &["leads out"]);
    #[cfg(unix)]
    table.fails("link", open(&a, &b, moved("link")), format, &["leads out"]);
    table.fails("no such file", open(&a, &b, moved("c.safetensors")), ErrorKind::Io, &["c.safetensors"]);
    table.fails("wrong file", open(&a, &b, moved("a.safetensors")), format, &["is not in `a.safetensors`"]);
    table.fails("unlisted", open(&a, &b, Some(fewer.to_string())), format, &["`lm_head.weight`", "not in the index"]);
    table.fails("in two files", open(&twice, &b, all), format, &["two files"]);
    table.fails("in two files, no index", open(&twice, &b, None), format, &["two files"]);
    table.fails("listed twice", open(&a, &b, Some(repeated)), format, &["duplicate key"]);
    table.fails("no map", open(&a, &b, Some("{}".into())), format, &["weight_map"]);
    table.fails("empty map", open(&a, &b, Some(r#"{"weight_map":{}}"#.into())), format, &["names no file"]);
    table.fails("number", open(&a, &b, Some(r#"{"weight_map":{"a":1}}"#.into())), format, &["string"]);
    let pickles = folder(&[("config.json", config.clone()), ("pytorch_model.bin", vec![0])]);
    table.fails("pickles", Checkpoint::open(pickles.path()), ErrorKind::Format, &["pytorch_model.bin", "truncated"]);
    let nothing = folder(&[("config.json", config)]);
    table.fails("no weights", Checkpoint::open(nothing.path()), ErrorKind::Io, &["safetensors"]);
    table.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn no_mutation_of_a_file_panics(changes in prop::collection::vec((0usize..400, any::<u8>()), 1..6), cut in 0usize..400) {
        let tensors = [
            Tensor::zeros("a", "F32", &[2, 3], 4),
            Tensor::zeros("b.weight", "BF16", &[5], 2),
            Tensor::zeros("c", "I32", &[], 4),
        ];
        let mut bytes = encode(&tensors);
        for (at, byte) in changes {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        if cut < 100 {
            bytes.truncate(bytes.len() - cut.min(bytes.len()));
        }
        let dir = folder(&[("x.safetensors", bytes)]);
        if let Ok(file) = SafetensorsFile::open(&dir.path().join("x.safetensors")) {
            for name in file.names() {
                if let Ok(view) = file.tensor(name) {
                    prop_assert_eq!(view.all().len(), view.shape.iter().product::<usize>() * view.dtype.size());
                }
            }
        }
    }
}
