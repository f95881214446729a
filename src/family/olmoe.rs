//! OLMoE, from `modeling_olmoe.py` of transformers: q and k are normed over all heads together.

use super::table::{self, HeadNorms, KEYS, Keys, Stored, Support, Table};

pub(crate) const TABLE: Table = Table {
    model_type: "olmoe",
    support: Support::Weights,
    keys: Keys { expert_width: "intermediate_size", rms_eps: ("rms_norm_eps", 1e-5), ..KEYS },
    global: table::GLOBAL,
    layers: "model.layers.",
    in_layer: &[table::NORMS, table::QK_NORMS, table::ATTENTION, table::ROUTER],
    experts: "mlp.experts.",
    in_expert: table::GATED_EXPERT,
    fused: table::GATED_FUSED,
    stored: Stored::OutIn,
    interleaved: false,
    head_norms: HeadNorms::Whole,
    aliases: table::NO_ALIASES,
};
