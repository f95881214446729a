//! `config.json` of a model folder, in the spellings of transformers 4 and 5, as one validated [`ModelConfig`].

use crate::shape::MoeShape;

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
