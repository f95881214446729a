//! `config.json` of a model folder, in the spellings of transformers 4 and 5, as one validated [`ModelConfig`].

use std::path::Path;

use serde_json::Value;

use super::untrusted::Object;
use crate::error::{ErrorKind, Result};
use crate::family::Family;
use crate::shape::MoeShape;

/// Largest width of anything (hidden, expert, MLP), so that no product of sizes overflows.
const MAX_WIDTH: usize = 1 << 20;
/// Most vocabulary entries.
const MAX_VOCAB: usize = 1 << 24;
/// Most experts, heads or layers.
const MAX_COUNT: usize = 1 << 14;
/// Longest context, in tokens.
const MAX_POSITIONS: usize = 1 << 30;

/// What a decoder of any supported family needs to know.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family (`model_type` of the file).
    pub family: crate::family::Family,
    /// D: hidden width.
    pub hidden: usize,
    /// Number of vocabulary entries (rows of the embedding).
    pub vocab: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub rms_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Longest context the model was made for, in tokens.
    pub max_positions: usize,
    /// The LM head is the embedding.
    pub tie_embeddings: bool,
    /// Width of the dense MLP of layers without experts.
    pub dense_width: usize,
    /// Sizes of the mixture-of-experts layers.
    pub moe: MoeShape,
    /// Top-k weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// The MLP of each layer, in order.
    pub layers: Vec<MlpKind>,
    /// Ids that end an answer: from `generation_config.json`, else from `config.json`; may be empty.
    pub stop_ids: Vec<u32>,
}

/// The MLP of one decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpKind {
    /// Routed experts.
    Experts,
    /// One dense gated MLP of `dense_width`.
    Dense,
}

impl ModelConfig {
    /// Reads `config.json` (and `generation_config.json`, if there) of the model folder `dir`.
    ///
    /// Accepts the spellings of transformers 4 (`num_experts`, `rope_theta`, `torch_dtype`) and 5 (`num_local_experts`,
    /// `rope_parameters`, `dtype`).
    ///
    /// Errors: `Io` and `Format` for the files; `Config` for a value that is missing or implausible; `Unsupported` for a
    /// family or a setting that would change the result and is not implemented.
    pub fn open(dir: &Path) -> Result<Self> {
        let file = Object::open(&dir.join("config.json"))?;
        let family = family(&file)?;
        refuse_unsupported(&file)?;

        let hidden = file.need_count("hidden_size", 1..=MAX_WIDTH)?;
        let vocab = file.need_count("vocab_size", 1..=MAX_VOCAB)?;
        let heads = file.need_count("num_attention_heads", 1..=MAX_COUNT)?;
        let kv_heads = match (file.has("num_key_value_heads"), file.count("num_key_value_heads", 1..=heads)?) {
            (_, Some(n)) => n,
            // Null means one key head for each query head; absence would mean a default that files never rely on.
            (true, None) => heads,
            (false, None) => return Err(file.missing("num_key_value_heads")),
        };
        let config_error = |message: String| file.error(ErrorKind::Config, message);
        if !heads.is_multiple_of(kv_heads) {
            return Err(config_error(format!("`num_key_value_heads`: expected a divisor of {heads}, got {kv_heads}")));
        }
        let head_dim = match file.count("head_dim", 2..=MAX_WIDTH)? {
            Some(n) => n,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(config_error(format!("`hidden_size`: expected a multiple of {heads}, got {hidden}")));
            }
        };
        if !head_dim.is_multiple_of(2) || head_dim == 0 {
            return Err(config_error(format!("`head_dim`: expected an even number, got {head_dim}")));
        }
        if heads * head_dim > MAX_WIDTH {
            return Err(config_error(format!("`head_dim`: expected at most {MAX_WIDTH} over all heads")));
        }

        let experts = experts(&file)?;
        let moe = MoeShape {
            experts,
            top_k: file.need_count("num_experts_per_tok", 1..=experts)?,
            hidden,
            expert_width: file.need_count("moe_intermediate_size", 1..=MAX_WIDTH)?,
        };
        let layers = layers(&file)?;
        let dense_width = if layers.contains(&MlpKind::Dense) {
            file.need_count("intermediate_size", 1..=MAX_WIDTH)?
        } else {
            file.count("intermediate_size", 0..=MAX_WIDTH)?.unwrap_or(0)
        };

        let rms_eps = file.number("rms_norm_eps")?.unwrap_or(1e-6);
        if !(0.0..1.0).contains(&rms_eps) {
            return Err(config_error(format!("`rms_norm_eps`: expected a number from 0 to 1, got {rms_eps}")));
        }
        Ok(Self {
            family,
            hidden,
            vocab,
            heads,
            kv_heads,
            head_dim,
            rms_eps,
            rope_theta: rope_theta(&file)?,
            max_positions: file.count("max_position_embeddings", 1..=MAX_POSITIONS)?.unwrap_or(32768),
            tie_embeddings: file.flag("tie_word_embeddings")?,
            dense_width,
            moe,
            norm_topk_prob: file.flag("norm_topk_prob")?,
            layers,
            stop_ids: stop_ids(dir, &file, vocab)?,
        })
    }

    /// Number of decoder layers.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }
}

fn family(file: &Object) -> Result<Family> {
    let name = file.text("model_type")?.ok_or_else(|| file.missing("model_type"))?;
    Family::from_model_type(name).ok_or_else(|| {
        let known: Vec<_> = Family::ALL.iter().map(|f| format!("`{}`", f.model_type())).collect();
        let name = super::untrusted::shown(name);
        file.unsupported(format!("`model_type`: expected one of {}, got `{name}`", known.join(", ")))
    })
}

/// Refuses what would change the result: better no answer than a wrong one.
fn refuse_unsupported(file: &Object) -> Result<()> {
    for key in ["attention_bias", "use_sliding_window"] {
        if file.flag(key)? {
            return Err(file.unsupported(format!("`{key}` is not supported")));
        }
    }
    if file.is_set("quantization_config") {
        return Err(file.unsupported("`quantization_config`: quantised weights are not supported"));
    }
    if let Some(act) = file.text("hidden_act")?.filter(|act| *act != "silu") {
        let act = super::untrusted::shown(act);
        return Err(file.unsupported(format!("`hidden_act`: expected `silu`, got `{act}`")));
    }
    if file.strings("layer_types")?.iter().any(|t| t != "full_attention") {
        return Err(file.unsupported("`layer_types`: expected only `full_attention`"));
    }
    for key in ["torch_dtype", "dtype"] {
        let Some(dtype) = file.text(key)? else {
            continue;
        };
        if !["float32", "float16", "bfloat16", "auto"].contains(&dtype.trim_start_matches("torch.")) {
            let dtype = super::untrusted::shown(dtype);
            return Err(file.unsupported(format!("`{key}`: expected float32, float16 or bfloat16, got `{dtype}`")));
        }
    }
    whole_rotary(file)?;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(rope) = file.object(key)? else {
            continue;
        };
        whole_rotary(&rope)?;
        for kind in ["rope_type", "type"] {
            if let Some(kind) = rope.text(kind)?.filter(|t| *t != "default") {
                let kind = super::untrusted::shown(kind);
                return Err(file.unsupported(format!("`{key}`: expected type `default`, got `{kind}`")));
            }
        }
        // Some families give each kind of layer its own parameters.
        if rope.entries().any(|(_, value)| value.is_object()) {
            return Err(file.unsupported(format!("`{key}`: parameters for each layer type are not supported")));
        }
        if rope.get("factor").is_some_and(|f| f.as_f64() != Some(1.0)) {
            return Err(file.unsupported(format!("`{key}`: `factor` is not supported")));
        }
    }
    Ok(())
}

fn whole_rotary(object: &Object) -> Result<()> {
    match object.number("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(f) => Err(object.unsupported(format!("`partial_rotary_factor`: expected 1, got {f}"))),
    }
}

fn experts(file: &Object) -> Result<usize> {
    let old = file.count("num_experts", 1..=MAX_COUNT)?;
    let new = file.count("num_local_experts", 1..=MAX_COUNT)?;
    match (old, new) {
        (Some(a), Some(b)) if a != b => {
            Err(file
                .error(ErrorKind::Config, format!("`num_local_experts`: expected {a} as in `num_experts`, got {b}")))
        }
        (Some(n), _) | (None, Some(n)) => Ok(n),
        (None, None) => Err(file.missing("num_experts")),
    }
}

/// The MLP of each layer, as transformers decides it (`Qwen3MoeDecoderLayer`).
fn layers(file: &Object) -> Result<Vec<MlpKind>> {
    let n = file.need_count("num_hidden_layers", 1..=MAX_COUNT)?;
    let step = file.count("decoder_sparse_step", 1..=MAX_COUNT)?.unwrap_or(1);
    let mut layers: Vec<_> =
        (1..=n).map(|i| if i.is_multiple_of(step) { MlpKind::Experts } else { MlpKind::Dense }).collect();
    match file.get("mlp_only_layers") {
        None => {}
        Some(Value::Array(list)) => {
            for value in list {
                layers[file.as_count("mlp_only_layers", value, 0..=n - 1)?] = MlpKind::Dense;
            }
        }
        Some(other) => return Err(file.wrong("mlp_only_layers", "a list of layers", other)),
    }
    Ok(layers)
}

fn rope_theta(file: &Object) -> Result<f64> {
    let nested = file.object("rope_parameters")?.map_or(Ok(None), |rope| rope.number("rope_theta"))?;
    let theta = match nested {
        Some(theta) => theta,
        None => file.number("rope_theta")?.ok_or_else(|| file.missing("rope_theta"))?,
    };
    if theta <= 0.0 {
        return Err(file.error(ErrorKind::Config, format!("`rope_theta`: expected a positive number, got {theta}")));
    }
    Ok(theta)
}

/// The ids that end an answer: those of `generation_config.json` replace those of `config.json`.
fn stop_ids(dir: &Path, config: &Object, vocab: usize) -> Result<Vec<u32>> {
    let path = dir.join("generation_config.json");
    let generation = if path.exists() { Some(Object::open(&path)?) } else { None };
    let key = "eos_token_id";
    let Some((file, value)) = generation.iter().chain([config]).find_map(|file| Some((file, file.get(key)?))) else {
        return Ok(Vec::new());
    };
    let values = match value {
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    // MAX_VOCAB makes every id fit in 32 bits.
    values.iter().map(|v| Ok(file.as_count(key, v, 0..=vocab - 1)? as u32)).collect()
}
