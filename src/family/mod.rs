//! What a tensor name means in each model family: one table file a family, from name to [`Role`].

pub mod class;
mod gpt_oss;
mod mixtral;
mod nemotron_h;
mod olmoe;
mod qwen2_moe;
mod qwen3_moe;
pub(crate) mod table;

use table::{Support, Table};

use crate::checkpoint::ModelConfig;
use crate::error::{Error, ErrorKind, Result};

/// A model family whose names are known here. Models of some run, of others only checkpoints and adapters can be inspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// Qwen3-MoE: q/k norms, softmax router, no shared expert.
    Qwen3Moe,
    /// Mixtral: softmax router, no shared expert; w1, w3 and w2 are gate, up and down.
    Mixtral,
    /// OLMoE: q/k norms over all heads, softmax router, no shared expert.
    Olmoe,
    /// Qwen2-MoE: biases on q, k and v, a shared expert with a gate of its own.
    Qwen2Moe,
    /// GPT-OSS: fused experts stored `[E, in, out]`, gate and up row by row, biases, attention sinks.
    GptOss,
    /// Nemotron-H: layers of different kinds, experts without a gate.
    NemotronH,
}

/// What a tensor is for. Shapes are row-major, `[out, in]` for projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Role {
    /// Token embedding, `[vocab, D]`.
    Embedding,
    /// LM head, `[vocab, D]`; may be absent when it is the embedding.
    LmHead,
    /// Norm after the last layer, `[D]`.
    FinalNorm,
    /// Norm in front of attention, `[D]`.
    InputNorm {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Norm in front of the MLP, `[D]`.
    PostAttentionNorm {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Norm of each query head, `[head_dim]`.
    QNorm {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Norm of each key head, `[head_dim]`.
    KNorm {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Query projection, `[heads·head_dim, D]`.
    Q {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Key projection, `[kv_heads·head_dim, D]`.
    K {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Value projection, `[kv_heads·head_dim, D]`.
    V {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Output projection, `[D, heads·head_dim]`.
    O {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Bias of the query projection, `[heads·head_dim]`.
    QBias {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Bias of the key projection, `[kv_heads·head_dim]`.
    KBias {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Bias of the value projection, `[kv_heads·head_dim]`.
    VBias {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Router, `[E, D]`.
    Router {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Gate projection of a dense MLP, `[dense_width, D]`.
    DenseGate {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Up projection of a dense MLP, `[dense_width, D]`.
    DenseUp {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Down projection of a dense MLP, `[D, dense_width]`.
    DenseDown {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Gate projection of the shared expert, `[shared_width, D]`.
    SharedGate {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Up projection of the shared expert, `[shared_width, D]`.
    SharedUp {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Down projection of the shared expert, `[D, shared_width]`.
    SharedDown {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// What weighs the shared expert, `[1, D]`.
    SharedRouter {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Gate projection of one expert, `[F, D]`.
    ExpertGate {
        /// Decoder layer, from 0.
        layer: usize,
        /// Global expert id.
        expert: usize,
    },
    /// Up projection of one expert, `[F, D]`.
    ExpertUp {
        /// Decoder layer, from 0.
        layer: usize,
        /// Global expert id.
        expert: usize,
    },
    /// Down projection of one expert, `[D, F]`.
    ExpertDown {
        /// Decoder layer, from 0.
        layer: usize,
        /// Global expert id.
        expert: usize,
    },
    /// Gate and up projections of all experts, `[E, 2F, D]`, gate rows first; in some families `[E, D, 2F]`, or up alone.
    FusedGateUp {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Down projections of all experts, `[E, D, F]`; in some families `[E, F, D]`.
    FusedDown {
        /// Decoder layer, from 0.
        layer: usize,
    },
}

/// One of the three projections of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExpertPart {
    /// Gate, `[F, D]`.
    Gate,
    /// Up, `[F, D]`.
    Up,
    /// Down, `[D, F]`.
    Down,
}

impl ExpertPart {
    /// The three, in the order they are used.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// The role of the tensor that holds this projection of one expert alone.
    pub const fn role(self, layer: usize, expert: usize) -> Role {
        match self {
            Self::Gate => Role::ExpertGate { layer, expert },
            Self::Up => Role::ExpertUp { layer, expert },
            Self::Down => Role::ExpertDown { layer, expert },
        }
    }

    /// The role of the tensor that holds this projection of all experts.
    pub const fn fused_role(self, layer: usize) -> Role {
        match self {
            Self::Gate | Self::Up => Role::FusedGateUp { layer },
            Self::Down => Role::FusedDown { layer },
        }
    }
}

impl Role {
    /// The decoder layer of the tensor; `None` outside the layers.
    pub const fn layer(self) -> Option<usize> {
        match self {
            Self::Embedding | Self::LmHead | Self::FinalNorm => None,
            Self::InputNorm { layer }
            | Self::PostAttentionNorm { layer }
            | Self::QNorm { layer }
            | Self::KNorm { layer }
            | Self::Q { layer }
            | Self::K { layer }
            | Self::V { layer }
            | Self::O { layer }
            | Self::QBias { layer }
            | Self::KBias { layer }
            | Self::VBias { layer }
            | Self::Router { layer }
            | Self::DenseGate { layer }
            | Self::DenseUp { layer }
            | Self::DenseDown { layer }
            | Self::SharedGate { layer }
            | Self::SharedUp { layer }
            | Self::SharedDown { layer }
            | Self::SharedRouter { layer }
            | Self::ExpertGate { layer, .. }
            | Self::ExpertUp { layer, .. }
            | Self::ExpertDown { layer, .. }
            | Self::FusedGateUp { layer }
            | Self::FusedDown { layer } => Some(layer),
        }
    }

    /// Projection and number of the expert whose own tensor it is.
    const fn expert(self) -> Option<(ExpertPart, usize)> {
        match self {
            Self::ExpertGate { expert, .. } => Some((ExpertPart::Gate, expert)),
            Self::ExpertUp { expert, .. } => Some((ExpertPart::Up, expert)),
            Self::ExpertDown { expert, .. } => Some((ExpertPart::Down, expert)),
            _ => None,
        }
    }
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 6] =
        [Self::Qwen3Moe, Self::Mixtral, Self::Olmoe, Self::Qwen2Moe, Self::GptOss, Self::NemotronH];

    pub(crate) const fn table(self) -> &'static Table {
        match self {
            Self::Qwen3Moe => &qwen3_moe::TABLE,
            Self::Mixtral => &mixtral::TABLE,
            Self::Olmoe => &olmoe::TABLE,
            Self::Qwen2Moe => &qwen2_moe::TABLE,
            Self::GptOss => &gpt_oss::TABLE,
            Self::NemotronH => &nemotron_h::TABLE,
        }
    }

    /// The family that `config.json` calls `name` in `model_type`.
    pub fn from_model_type(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.model_type() == name)
    }

    /// The family's `model_type`.
    pub const fn model_type(self) -> &'static str {
        self.table().model_type
    }

    /// Whether models of the family run.
    pub fn has_decoder(self) -> bool {
        self.table().support == Support::Decoder
    }

    /// Errors: `Unsupported` when models of the family do not run.
    pub fn check_decoder(self) -> Result<()> {
        let message = || format!("`{}` has no decoder here yet; adapters can be inspected", self.model_type());
        if self.has_decoder() { Ok(()) } else { Err(Error::new(ErrorKind::Unsupported, message())) }
    }

    /// Errors: `Unsupported` when not every tensor of the family is known.
    pub(crate) fn check_weights(self) -> Result<()> {
        if self.table().support == Support::Adapters {
            let family = self.model_type();
            let message = format!("checkpoints of `{family}` are not read here yet; adapters can be inspected");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(())
    }

    /// What the tensor `name` is for; `None` when the family has no such tensor. Layer and expert numbers are not checked
    /// against a model, [`shape`](Self::shape) does that.
    pub fn role(self, name: &str) -> Option<Role> {
        self.table().role(name)
    }

    /// The name of the tensor with this role; the inverse of [`role`](Self::role). For a role that the family does not have,
    /// a name that means nothing.
    pub fn tensor_name(self, role: Role) -> String {
        self.table().tensor_name(role)
    }

    /// The shape of the tensor with this role in the model `config`, as it is stored; `None` when that model has no such
    /// tensor.
    pub fn shape(self, role: Role, config: &ModelConfig) -> Option<Vec<usize>> {
        self.table().shape(role, config)
    }

    /// The roles of the tensors of a layer of the model `config`, without those of its routed experts.
    pub(crate) fn layer_roles(self, layer: usize, config: &ModelConfig) -> impl Iterator<Item = Role> {
        let roles = self.table().in_layer().map(move |(_, role)| role(layer));
        roles.filter(move |role| self.shape(*role, config).is_some())
    }

    /// The projections of a routed expert.
    pub(crate) fn expert_parts(self) -> impl Iterator<Item = ExpertPart> + Clone {
        let gated = self.table().gated();
        ExpertPart::ALL.into_iter().filter(move |part| gated || *part != ExpertPart::Gate)
    }
}
