//! What a tensor name means in each model family: one table file a family, from name to [`Role`].

pub mod class;
pub mod qwen3_moe;

use crate::checkpoint::ModelConfig;

/// A supported model family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// Qwen3-MoE: q/k norms, softmax router, no shared expert.
    Qwen3Moe,
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
    /// Gate and up projections of all experts, `[E, 2F, D]`; gate rows first.
    FusedGateUp {
        /// Decoder layer, from 0.
        layer: usize,
    },
    /// Down projections of all experts, `[E, D, F]`.
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

impl Family {
    /// Every supported family.
    pub const ALL: [Self; 1] = [Self::Qwen3Moe];

    /// The family that `config.json` calls `name` in `model_type`.
    pub fn from_model_type(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.model_type() == name)
    }

    /// The family's `model_type`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Qwen3Moe => "qwen3_moe",
        }
    }

    /// What the tensor `name` is for; `None` when the family has no such tensor. Layer and expert numbers are not checked
    /// against a model, [`shape`](Self::shape) does that.
    pub fn role(self, name: &str) -> Option<Role> {
        match self {
            Self::Qwen3Moe => qwen3_moe::role(name),
        }
    }

    /// The name of the tensor with this role; the inverse of [`role`](Self::role).
    pub fn tensor_name(self, role: Role) -> String {
        match self {
            Self::Qwen3Moe => qwen3_moe::tensor_name(role),
        }
    }

    /// The shape of the tensor with this role in the model `config`; `None` when that model has no such tensor.
    pub fn shape(self, role: Role, config: &ModelConfig) -> Option<Vec<usize>> {
        match self {
            Self::Qwen3Moe => qwen3_moe::shape(role, config),
        }
    }
}
