//! Qwen3-MoE, from `modeling_qwen3_moe.py` of transformers 4.57 and 5 (fused experts: 5 only).

use super::table::{self, HeadNorms, KEYS, Stored, Support, Table};

pub(crate) const TABLE: Table = Table {
    model_type: "qwen3_moe",
    support: Support::Decoder,
    keys: KEYS,
    global: table::GLOBAL,
    layers: "model.layers.",
    in_layer: &[table::NORMS, table::QK_NORMS, table::ATTENTION, table::ROUTER, table::DENSE],
    experts: "mlp.experts.",
    in_expert: table::GATED_EXPERT,
    fused: table::GATED_FUSED,
    stored: Stored::OutIn,
    interleaved: false,
    head_norms: HeadNorms::Each,
    aliases: table::NO_ALIASES,
};
