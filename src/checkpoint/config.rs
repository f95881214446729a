//! `config.json` of a model folder, in the spellings of transformers 4 and 5, as one validated [`ModelConfig`].

use std::path::Path;

use serde_json::Value;

use super::untrusted::Object;
use crate::error::{ErrorKind, Result};
use crate::family::table::Table;
use crate::family::{Family, Role};
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
    /// Base of the rotary frequencies; 0 where positions are not rotary.
    pub rope_theta: f64,
    /// Longest context the model was made for, in tokens.
    pub max_positions: usize,
    /// The LM head is the embedding.
    pub tie_embeddings: bool,
    /// Width of the dense MLP of layers without experts.
    pub dense_width: usize,
    /// Width of the expert that every token visits; 0 where there is none.
    pub shared_width: usize,
    /// Sizes of the mixture-of-experts layers.
    pub moe: MoeShape,
    /// Top-k weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// The MLP of each layer, in order.
    pub layers: Vec<MlpKind>,
    /// What each layer consists of, in families whose layers differ in that; empty where each has attention and an MLP.
    pub mixers: Vec<Mixer>,
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

/// What a decoder layer consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Attention and an MLP.
    Both,
    /// Attention alone.
    Attention,
    /// An MLP alone.
    Mlp,
    /// Neither (a state-space mixer).
    Other,
}

impl ModelConfig {
    /// Reads `config.json` (and `generation_config.json`, if there) of the model folder `dir`.
    ///
    /// Accepts the spellings of transformers 4 (`num_experts`, `rope_theta`, `torch_dtype`) and 5 (`num_local_experts`,
    /// `rope_parameters`, `dtype`).
    ///
    /// Errors: `Io` and `Format` for the files; `Config` for a value that is missing or implausible; `Unsupported` for a
    /// family that is not known and, where it has a decoder here, a setting that would change the result and is not
    /// implemented.
    pub fn open(dir: &Path) -> Result<Self> {
        let file = Object::open(&dir.join("config.json"))?;
        let family = family(&file)?;
        let table = family.table();
        if family.has_decoder() {
            refuse_unsupported(&file)?;
        }
        if family == Family::Qwen2Moe && file.get("qkv_bias").is_some() && !file.flag("qkv_bias")? {
            return Err(file.unsupported("`qkv_bias`: expected true, got false"));
        }

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

        let keys = &table.keys;
        let optional = |key: Option<&str>, least| key.map_or(Ok(None), |key| file.count(key, least..=MAX_WIDTH));
        let experts = experts(&file, keys.experts)?;
        let moe = MoeShape {
            experts,
            top_k: file.need_count("num_experts_per_tok", 1..=experts)?,
            hidden: optional(keys.latent_width, 1)?.unwrap_or(hidden),
            expert_width: file.need_count(keys.expert_width, 1..=MAX_WIDTH)?,
        };
        let (layers, mixers) = if keys.mixers { mixed_layers(&file)? } else { (layers(&file, table)?, Vec::new()) };
        let is_dense = |(i, kind): (usize, &MlpKind)| {
            *kind == MlpKind::Dense && mixers.get(i).is_none_or(|mixer| matches!(mixer, Mixer::Both | Mixer::Mlp))
        };
        let dense_width = if layers.iter().enumerate().any(is_dense) {
            file.need_count("intermediate_size", 1..=MAX_WIDTH)?
        } else if keys.expert_width == "intermediate_size" {
            0
        } else {
            file.count("intermediate_size", 0..=MAX_WIDTH)?.unwrap_or(0)
        };

        let (eps_key, default) = keys.rms_eps;
        let rms_eps = file.number(eps_key)?.unwrap_or(default);
        if !(0.0..1.0).contains(&rms_eps) {
            return Err(config_error(format!("`{eps_key}`: expected a number from 0 to 1, got {rms_eps}")));
        }
        Ok(Self {
            family,
            hidden,
            vocab,
            heads,
            kv_heads,
            head_dim,
            rms_eps,
            rope_theta: if keys.rotary { rope_theta(&file)? } else { 0.0 },
            max_positions: file.count("max_position_embeddings", 1..=MAX_POSITIONS)?.unwrap_or(32768),
            tie_embeddings: file.flag("tie_word_embeddings")?,
            dense_width,
            shared_width: optional(keys.shared_width, 0)?.unwrap_or(0),
            moe,
            norm_topk_prob: file.flag("norm_topk_prob")?,
            layers,
            mixers,
            stop_ids: stop_ids(dir, &file, vocab)?,
        })
    }

    /// Number of decoder layers.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// What the layer `layer` consists of.
    pub fn mixer(&self, layer: usize) -> Mixer {
        self.mixers.get(layer).copied().unwrap_or(Mixer::Both)
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

fn experts(file: &Object, keys: &[&str]) -> Result<usize> {
    let mut found = None;
    for key in keys {
        match (found, file.count(key, 1..=MAX_COUNT)?) {
            (Some((first, a)), Some(b)) if a != b => {
                let message = format!("`{key}`: expected {a} as in `{first}`, got {b}");
                return Err(file.error(ErrorKind::Config, message));
            }
            (None, Some(n)) => found = Some((*key, n)),
            _ => {}
        }
    }
    found.map(|(_, n)| n).ok_or_else(|| file.missing(keys.first().copied().unwrap_or_default()))
}

/// The MLP of each layer, as transformers decides it (`Qwen3MoeDecoderLayer`).
fn layers(file: &Object, table: &Table) -> Result<Vec<MlpKind>> {
    let n = file.need_count("num_hidden_layers", 1..=MAX_COUNT)?;
    if !table.in_layer().any(|(_, role)| role(0) == (Role::DenseDown { layer: 0 })) {
        return Ok(vec![MlpKind::Experts; n]);
    }
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

/// MLP and kind of each layer, from a list of names or, in older files, a letter for each.
fn mixed_layers(file: &Object) -> Result<(Vec<MlpKind>, Vec<Mixer>)> {
    let listed = ["layers_block_type", "layer_types"].into_iter().find(|key| file.get(key).is_some());
    let (key, names): (_, Vec<String>) = match (listed, file.text("hybrid_override_pattern")?) {
        (Some(key), _) => (key, file.strings(key)?),
        (None, Some(pattern)) => ("hybrid_override_pattern", pattern.chars().map(String::from).collect()),
        (None, None) => return Err(file.missing("layers_block_type")),
    };
    if names.is_empty() || names.len() > MAX_COUNT {
        let message = format!("`{key}`: expected 1 to {MAX_COUNT} layers, got {}", names.len());
        return Err(file.error(ErrorKind::Config, message));
    }
    let layers = names.iter().map(|name| match name.as_str() {
        "moe" | "E" => Ok((MlpKind::Experts, Mixer::Mlp)),
        "mlp" | "-" => Ok((MlpKind::Dense, Mixer::Mlp)),
        "attention" | "full_attention" | "*" => Ok((MlpKind::Dense, Mixer::Attention)),
        "mamba" | "linear_attention" | "M" => Ok((MlpKind::Dense, Mixer::Other)),
        other => Err(file.unsupported(format!("`{key}`: no layer is called `{}`", super::untrusted::shown(other)))),
    });
    Ok(layers.collect::<Result<Vec<_>>>()?.into_iter().unzip())
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
