//! Sizes of known models, and those of a `config.json`.

use std::path::Path;

use clap::ValueEnum;
use wgmoe::activation::Activation;
use wgmoe::checkpoint::{MlpKind, ModelConfig};
use wgmoe::dtype::DType;
use wgmoe::family::Family;
use wgmoe::gpu::Gpu;
use wgmoe::shape::MoeShape;

use crate::usage;

/// What is measured: a decoder of the qwen3_moe kind in these sizes, with random weights.
#[derive(Debug, Clone)]
pub struct Shape {
    pub name: String,
    pub config: ModelConfig,
    pub activation: Activation,
}

/// Names with their sizes.
const KNOWN: [&str; 4] = ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "tiny"];

impl Shape {
    /// The one asked for, else one that suits the device.
    pub fn of(text: Option<&str>, gpu: &Gpu) -> anyhow::Result<Self> {
        let suits = if gpu.info().software { "tiny" } else { "qwen3-30b-a3b" };
        Self::parse(text.unwrap_or(suits))
    }

    /// A known name, or a model folder or its `config.json`.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        // Layers, D, F, E, A, vocabulary, query heads, key heads, width of a head.
        let (sizes, activation) = match text {
            "qwen3-30b-a3b" => ([48, 2048, 768, 128, 8, 151_936, 32, 4, 128], Activation::Silu),
            "mixtral-8x7b" => ([32, 4096, 14_336, 8, 2, 32_000, 32, 8, 128], Activation::Silu),
            "gpt-oss-20b" => {
                ([24, 2880, 2880, 32, 4, 201_088, 64, 8, 64], Activation::SwigluClamped { alpha: 1.702, limit: 7.0 })
            }
            // For software devices.
            "tiny" => ([2, 128, 64, 16, 4, 512, 4, 2, 32], Activation::Silu),
            file => return Self::open(file),
        };
        let [layers, hidden, expert_width, experts, top_k, vocab, heads, kv_heads, head_dim] = sizes;
        let config = ModelConfig {
            family: Family::Qwen3Moe,
            hidden,
            vocab,
            heads,
            kv_heads,
            head_dim,
            rms_eps: 1e-6,
            rope_theta: 1e6,
            max_positions: 1 << 15,
            tie_embeddings: false,
            dense_width: 0,
            shared_width: 0,
            moe: MoeShape { experts, top_k, hidden, expert_width },
            norm_topk_prob: true,
            layers: vec![MlpKind::Experts; layers],
            mixers: Vec::new(),
            stop_ids: Vec::new(),
        };
        Ok(Self { name: text.to_owned(), config, activation })
    }

    fn open(text: &str) -> anyhow::Result<Self> {
        let path = Path::new(text);
        let of_file = path.parent().filter(|_| path.is_file() && path.ends_with("config.json"));
        let dir = if path.is_dir() { Some(path) } else { of_file };
        let Some(dir) = dir.filter(|dir| dir.join("config.json").exists()) else {
            let message = format!("--shape `{text}`: expected {} or a folder with config.json", KNOWN.join(", "));
            return Err(usage(message));
        };
        let config = ModelConfig::open(dir).map_err(|e| e.within("--shape"))?;
        if !config.layers.contains(&MlpKind::Experts) {
            return Err(usage(format!("--shape `{text}`: the model has no layer with experts")));
        }
        Ok(Self { name: text.to_owned(), config, activation: Activation::Silu })
    }
}

/// How tokens are spread over experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Routing {
    /// Every expert is as likely.
    Uniform,
    /// The k-th likeliest expert has a probability of k^-s.
    Zipf(f64),
    /// One expert is among those of every token, the others are as likely.
    OneExpert,
}

impl std::str::FromStr for Routing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("zipf:")) {
            ("uniform", _) => Ok(Self::Uniform),
            ("one-expert", _) => Ok(Self::OneExpert),
            (_, Some(s)) => match s.parse() {
                Ok(s) if (0.0..=10.0).contains(&s) => Ok(Self::Zipf(s)),
                _ => Err("expected zipf:S with S from 0 to 10".into()),
            },
            _ => Err("expected uniform, zipf:S or one-expert".into()),
        }
    }
}

impl std::fmt::Display for Routing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(s) => write!(f, "zipf:{s}"),
            Self::OneExpert => f.write_str("one-expert"),
        }
    }
}

/// Storage type of random weights.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Stored {
    Bf16,
    F16,
    F32,
}

impl Stored {
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
        }
    }
}
