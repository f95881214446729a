//! Nemotron-H, from `modeling_nemotron_h.py` of transformers: a layer is either attention, an MLP, experts or a state-space
//! mixer; experts have no gate. Checkpoints say `backbone`, the modules of transformers 5 `model`. The state-space mixers are
//! not in the table.

use super::table::{Aliases, Fused, HeadNorms, InLayer, KEYS, Keys, Stored, Support, Table};
use super::{ExpertPart, Role};

const GLOBAL: &[(&str, Role)] = &[
    ("backbone.embeddings.weight", Role::Embedding),
    ("lm_head.weight", Role::LmHead),
    ("backbone.norm_f.weight", Role::FinalNorm),
];

const MIXERS: &[(&str, InLayer)] = &[
    ("norm.weight", |layer| Role::InputNorm { layer }),
    ("mixer.q_proj.weight", |layer| Role::Q { layer }),
    ("mixer.k_proj.weight", |layer| Role::K { layer }),
    ("mixer.v_proj.weight", |layer| Role::V { layer }),
    ("mixer.o_proj.weight", |layer| Role::O { layer }),
    ("mixer.gate.weight", |layer| Role::Router { layer }),
    ("mixer.shared_experts.up_proj.weight", |layer| Role::SharedUp { layer }),
    ("mixer.shared_experts.down_proj.weight", |layer| Role::SharedDown { layer }),
    ("mixer.up_proj.weight", |layer| Role::DenseUp { layer }),
    ("mixer.down_proj.weight", |layer| Role::DenseDown { layer }),
];

pub(crate) const TABLE: Table = Table {
    model_type: "nemotron_h",
    support: Support::Adapters,
    keys: Keys {
        experts: &["n_routed_experts", "num_local_experts"],
        shared_width: Some("moe_shared_expert_intermediate_size"),
        latent_width: Some("moe_latent_size"),
        rms_eps: ("layer_norm_epsilon", 1e-5),
        rotary: false,
        mixers: true,
        ..KEYS
    },
    global: GLOBAL,
    layers: "backbone.layers.",
    in_layer: &[MIXERS],
    experts: "mixer.experts.",
    in_expert: &[("up_proj.weight", ExpertPart::Up), ("down_proj.weight", ExpertPart::Down)],
    fused: &[("up_proj", Fused::Up), ("down_proj", Fused::Down)],
    stored: Stored::OutIn,
    interleaved: false,
    head_norms: HeadNorms::Each,
    aliases: Aliases { model: &[("model.", "backbone.")], layer: &[] },
};
