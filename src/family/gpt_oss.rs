//! GPT-OSS, from `modeling_gpt_oss.py` of transformers: experts are fused in every release, as `[E, in, out]`, with gate and
//! up row by row. Sinks, biases and packed weights are not in the table yet.

use super::Role;
use super::table::{self, HeadNorms, InLayer, KEYS, Keys, Stored, Support, Table};

const ROUTER: &[(&str, InLayer)] = &[("mlp.router.weight", |layer| Role::Router { layer })];

pub(crate) const TABLE: Table = Table {
    model_type: "gpt_oss",
    support: Support::Adapters,
    keys: Keys { expert_width: "intermediate_size", rms_eps: ("rms_norm_eps", 1e-5), ..KEYS },
    global: table::GLOBAL,
    layers: "model.layers.",
    in_layer: &[table::NORMS, table::ATTENTION, ROUTER],
    experts: "mlp.experts.",
    in_expert: &[],
    fused: table::GATED_FUSED,
    stored: Stored::InOutFlagged,
    interleaved: true,
    head_norms: HeadNorms::Each,
    aliases: table::NO_ALIASES,
};
