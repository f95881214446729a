//! Tensor names of Qwen3-MoE, from `modeling_qwen3_moe.py` of transformers 4.57 and 5 (fused experts: 5 only).

use super::{ExpertPart, Role};
use crate::checkpoint::{MlpKind, ModelConfig};

/// Tensors outside the layers.
const GLOBAL: [(&str, Role); 3] = [
    ("model.embed_tokens.weight", Role::Embedding),
    ("lm_head.weight", Role::LmHead),
    ("model.norm.weight", Role::FinalNorm),
];

/// What precedes the layer number.
const LAYER: &str = "model.layers.";

/// A role that lacks only the number of its layer.
type InLayer = fn(usize) -> Role;

/// Tensors of a layer, by what follows the layer number and a dot.
const IN_LAYER: [(&str, InLayer); 14] = [
    ("input_layernorm.weight", |layer| Role::InputNorm { layer }),
    ("post_attention_layernorm.weight", |layer| Role::PostAttentionNorm { layer }),
    ("self_attn.q_norm.weight", |layer| Role::QNorm { layer }),
    ("self_attn.k_norm.weight", |layer| Role::KNorm { layer }),
    ("self_attn.q_proj.weight", |layer| Role::Q { layer }),
    ("self_attn.k_proj.weight", |layer| Role::K { layer }),
    ("self_attn.v_proj.weight", |layer| Role::V { layer }),
    ("self_attn.o_proj.weight", |layer| Role::O { layer }),
    ("mlp.gate.weight", |layer| Role::Router { layer }),
    ("mlp.gate_proj.weight", |layer| Role::DenseGate { layer }),
    ("mlp.up_proj.weight", |layer| Role::DenseUp { layer }),
    ("mlp.down_proj.weight", |layer| Role::DenseDown { layer }),
    ("mlp.experts.gate_up_proj", |layer| Role::FusedGateUp { layer }),
    ("mlp.experts.down_proj", |layer| Role::FusedDown { layer }),
];

/// What precedes the expert number.
const EXPERT: &str = "mlp.experts.";

/// Tensors of one expert, by what follows the expert number and a dot.
const IN_EXPERT: [(&str, ExpertPart); 3] = [
    ("gate_proj.weight", ExpertPart::Gate),
    ("up_proj.weight", ExpertPart::Up),
    ("down_proj.weight", ExpertPart::Down),
];

/// What the tensor `name` is for.
pub fn role(name: &str) -> Option<Role> {
    if let Some((_, role)) = GLOBAL.iter().find(|(n, _)| *n == name) {
        return Some(*role);
    }
    let (layer, rest) = numbered(name.strip_prefix(LAYER)?)?;
    if let Some((_, role)) = IN_LAYER.iter().find(|(n, _)| *n == rest) {
        return Some(role(layer));
    }
    let (expert, rest) = numbered(rest.strip_prefix(EXPERT)?)?;
    let (_, part) = IN_EXPERT.iter().find(|(n, _)| *n == rest)?;
    Some(part.role(layer, expert))
}

/// The name of the tensor with this role.
pub fn tensor_name(role: Role) -> String {
    let (layer, part) = match role {
        Role::Embedding => return "model.embed_tokens.weight".to_owned(),
        Role::LmHead => return "lm_head.weight".to_owned(),
        Role::FinalNorm => return "model.norm.weight".to_owned(),
        Role::ExpertGate { layer, expert } => (layer, Some((expert, ExpertPart::Gate))),
        Role::ExpertUp { layer, expert } => (layer, Some((expert, ExpertPart::Up))),
        Role::ExpertDown { layer, expert } => (layer, Some((expert, ExpertPart::Down))),
        Role::InputNorm { layer }
        | Role::PostAttentionNorm { layer }
        | Role::QNorm { layer }
        | Role::KNorm { layer }
        | Role::Q { layer }
        | Role::K { layer }
        | Role::V { layer }
        | Role::O { layer }
        | Role::Router { layer }
        | Role::DenseGate { layer }
        | Role::DenseUp { layer }
        | Role::DenseDown { layer }
        | Role::FusedGateUp { layer }
        | Role::FusedDown { layer } => (layer, None),
    };
    // Every table holds every role it is asked for, so the empty default is never seen (the tests go through all).
    match part {
        Some((expert, part)) => {
            let rest = IN_EXPERT.iter().find(|(_, p)| *p == part).map_or("", |(n, _)| n);
            format!("{LAYER}{layer}.{EXPERT}{expert}.{rest}")
        }
        None => {
            let rest = IN_LAYER.iter().find(|(_, r)| r(layer) == role).map_or("", |(n, _)| n);
            format!("{LAYER}{layer}.{rest}")
        }
    }
}

/// The shape of the tensor with this role; `None` when the model has no such layer, expert or kind of MLP.
pub fn shape(role: Role, config: &ModelConfig) -> Option<Vec<usize>> {
    let (d, f, e) = (config.hidden, config.moe.expert_width, config.moe.experts);
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let mlp = |layer: usize, kind: MlpKind, shape: Vec<usize>| (*config.layers.get(layer)? == kind).then_some(shape);
    let any = |layer: usize, shape: Vec<usize>| (layer < config.layers.len()).then_some(shape);
    let one = |expert: usize, layer: usize, shape| {
        if expert < e { mlp(layer, MlpKind::Experts, shape) } else { None }
    };
    match role {
        Role::Embedding | Role::LmHead => Some(vec![config.vocab, d]),
        Role::FinalNorm => Some(vec![d]),
        Role::InputNorm { layer } | Role::PostAttentionNorm { layer } => any(layer, vec![d]),
        Role::QNorm { layer } | Role::KNorm { layer } => any(layer, vec![config.head_dim]),
        Role::Q { layer } => any(layer, vec![q, d]),
        Role::K { layer } | Role::V { layer } => any(layer, vec![kv, d]),
        Role::O { layer } => any(layer, vec![d, q]),
        Role::Router { layer } => mlp(layer, MlpKind::Experts, vec![e, d]),
        Role::DenseGate { layer } | Role::DenseUp { layer } => mlp(layer, MlpKind::Dense, vec![config.dense_width, d]),
        Role::DenseDown { layer } => mlp(layer, MlpKind::Dense, vec![d, config.dense_width]),
        Role::ExpertGate { layer, expert } | Role::ExpertUp { layer, expert } => one(expert, layer, vec![f, d]),
        Role::ExpertDown { layer, expert } => one(expert, layer, vec![d, f]),
        Role::FusedGateUp { layer } => mlp(layer, MlpKind::Experts, vec![e, 2 * f, d]),
        Role::FusedDown { layer } => mlp(layer, MlpKind::Experts, vec![e, d, f]),
    }
}

/// Splits `12.rest` into 12 and `rest`. Only the one canonical spelling of a number counts, so that no two names mean the
/// same tensor.
pub(crate) fn numbered(text: &str) -> Option<(usize, &str)> {
    let (digits, rest) = text.split_once('.')?;
    let canonical = digits.bytes().all(|b| b.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    if !canonical {
        return None;
    }
    Some((digits.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_has_one_name() {
        let mut roles: Vec<Role> = GLOBAL.iter().map(|(_, r)| *r).collect();
        for layer in [0, 7, 120] {
            roles.extend(IN_LAYER.iter().map(|(_, role)| role(layer)));
            for (expert, part) in [0, 9, 127].into_iter().flat_map(|e| ExpertPart::ALL.map(|p| (e, p))) {
                roles.push(part.role(layer, expert));
            }
        }
        let wrong: Vec<_> = roles.into_iter().filter(|r| role(&tensor_name(*r)) != Some(*r)).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn other_names_mean_nothing() {
        let names = [
            "",
            "model.norm",
            "model.layers.00.input_layernorm.weight",
            "model.layers.+1.input_layernorm.weight",
            "model.layers..input_layernorm.weight",
            "model.layers.99999999999999999999999.input_layernorm.weight",
            "model.layers.0.mlp.experts.0.gate_proj.bias",
            "model.layers.0.mlp.shared_expert.gate_proj.weight",
            "layers.0.input_layernorm.weight",
        ];
        let known: Vec<_> = names.into_iter().filter(|n| role(n).is_some()).collect();
        assert!(known.is_empty(), "{known:?}");
    }
}
