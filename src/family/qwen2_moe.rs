//! Qwen2-MoE, from `modeling_qwen2_moe.py` of transformers: biases on q, k and v, and an expert that every token visits,
//! weighed by a sigmoid.

use super::Role;
use super::table::{self, HeadNorms, InLayer, KEYS, Keys, Stored, Support, Table};

const BIASES: &[(&str, InLayer)] = &[
    ("self_attn.q_proj.bias", |layer| Role::QBias { layer }),
    ("self_attn.k_proj.bias", |layer| Role::KBias { layer }),
    ("self_attn.v_proj.bias", |layer| Role::VBias { layer }),
];

const SHARED: &[(&str, InLayer)] = &[
    ("mlp.shared_expert.gate_proj.weight", |layer| Role::SharedGate { layer }),
    ("mlp.shared_expert.up_proj.weight", |layer| Role::SharedUp { layer }),
    ("mlp.shared_expert.down_proj.weight", |layer| Role::SharedDown { layer }),
    ("mlp.shared_expert_gate.weight", |layer| Role::SharedRouter { layer }),
];

pub(crate) const TABLE: Table = Table {
    model_type: "qwen2_moe",
    support: Support::Weights,
    keys: Keys { shared_width: Some("shared_expert_intermediate_size"), ..KEYS },
    global: table::GLOBAL,
    layers: "model.layers.",
    in_layer: &[table::NORMS, table::ATTENTION, BIASES, table::ROUTER, SHARED, table::DENSE],
    experts: "mlp.experts.",
    in_expert: table::GATED_EXPERT,
    fused: table::GATED_FUSED,
    stored: Stored::OutIn,
    interleaved: false,
    head_norms: HeadNorms::Each,
    aliases: table::NO_ALIASES,
};
