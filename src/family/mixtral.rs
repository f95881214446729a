//! Mixtral, from `modeling_mixtral.py` of transformers. w1, w3 and w2 are gate, up and down. Checkpoints of every release
//! say `block_sparse_moe`; the modules, and so the adapters, of transformers 5 say `mlp`.

use super::table::{self, Aliases, HeadNorms, InLayer, KEYS, Keys, Stored, Support, Table};
use super::{ExpertPart, Role};

const ROUTER: &[(&str, InLayer)] = &[("block_sparse_moe.gate.weight", |layer| Role::Router { layer })];

pub(crate) const TABLE: Table = Table {
    model_type: "mixtral",
    support: Support::Weights,
    keys: Keys { expert_width: "intermediate_size", rms_eps: ("rms_norm_eps", 1e-5), ..KEYS },
    global: table::GLOBAL,
    layers: "model.layers.",
    in_layer: &[table::NORMS, table::ATTENTION, ROUTER],
    experts: "block_sparse_moe.experts.",
    in_expert: &[("w1.weight", ExpertPart::Gate), ("w3.weight", ExpertPart::Up), ("w2.weight", ExpertPart::Down)],
    fused: table::GATED_FUSED,
    stored: Stored::OutIn,
    interleaved: false,
    head_norms: HeadNorms::Each,
    aliases: Aliases { model: &[], layer: &[("mlp.", "block_sparse_moe.")] },
};
