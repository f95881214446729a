//! Tensor names of Qwen3-MoE, from `modeling_qwen3_moe.py` of transformers 4.57 and 5 (fused experts: 5 only).

use super::{ExpertPart, LayerRole, Role};
use crate::checkpoint::{MlpKind, ModelConfig};

/// Tensors outside the layers.
const GLOBAL: [(&str, Role); 3] = [
    ("model.embed_tokens.weight", Role::Embedding),
    ("lm_head.weight", Role::LmHead),
    ("model.norm.weight", Role::FinalNorm),
];

/// What precedes the layer number.
const LAYER: &str = "model.layers.";

/// Tensors of a layer, by what follows the layer number and a dot.
const IN_LAYER: [(&str, LayerRole); 14] = [
    ("input_layernorm.weight", LayerRole::InputNorm),
    ("post_attention_layernorm.weight", LayerRole::PostAttentionNorm),
    ("self_attn.q_norm.weight", LayerRole::QNorm),
    ("self_attn.k_norm.weight", LayerRole::KNorm),
    ("self_attn.q_proj.weight", LayerRole::Q),
    ("self_attn.k_proj.weight", LayerRole::K),
    ("self_attn.v_proj.weight", LayerRole::V),
    ("self_attn.o_proj.weight", LayerRole::O),
    ("mlp.gate.weight", LayerRole::Router),
    ("mlp.gate_proj.weight", LayerRole::DenseGate),
    ("mlp.up_proj.weight", LayerRole::DenseUp),
    ("mlp.down_proj.weight", LayerRole::DenseDown),
    ("mlp.experts.gate_up_proj", LayerRole::FusedGateUp),
    ("mlp.experts.down_proj", LayerRole::FusedDown),
];

/// What precedes the expert number.
const EXPERT: &str = "mlp.experts.";

/// Tensors of one expert, by what follows the expert number and a dot.
const IN_EXPERT: [(&str, ExpertPart); 3] =
    [("gate_proj.weight", ExpertPart::Gate), ("up_proj.weight", ExpertPart::Up), ("down_proj.weight", ExpertPart::Down)];

/// What the tensor `name` is for.
pub fn role(name: &str) -> Option<Role> {
    if let Some((_, role)) = GLOBAL.iter().find(|(n, _)| *n == name) {
        return Some(*role);
    }
    let (layer, rest) = numbered(name.strip_prefix(LAYER)?)?;
    let role = match IN_LAYER.iter().find(|(n, _)| *n == rest) {
        Some((_, role)) => *role,
        None => {
            let (expert, rest) = numbered(rest.strip_prefix(EXPERT)?)?;
            let (_, part) = IN_EXPERT.iter().find(|(n, _)| *n == rest)?;
            LayerRole::Expert { expert, part: *part }
        }
    };
    Some(Role::Layer { layer, role })
}

/// The name of the tensor with this role.
pub fn tensor_name(role: Role) -> String {
    // Every table holds every role it is asked for, so the empty default is never seen (the tests go through all).
    let (layer, role) = match role {
        Role::Layer { layer, role } => (layer, role),
        global => return GLOBAL.iter().find(|(_, r)| *r == global).map_or("", |(n, _)| n).to_owned(),
    };
    match role {
        LayerRole::Expert { expert, part } => {
            let rest = IN_EXPERT.iter().find(|(_, p)| *p == part).map_or("", |(n, _)| n);
            format!("{LAYER}{layer}.{EXPERT}{expert}.{rest}")
        }
        role => {
            let rest = IN_LAYER.iter().find(|(_, r)| *r == role).map_or("", |(n, _)| n);
            format!("{LAYER}{layer}.{rest}")
        }
    }
}

/// The shape of the tensor with this role; `None` when the model has no such layer, expert or kind of MLP.
pub fn shape(role: Role, config: &ModelConfig) -> Option<Vec<usize>> {
    let (d, f, e) = (config.hidden, config.moe.expert_width, config.moe.experts);
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let (layer, role) = match role {
        Role::Embedding | Role::LmHead => return Some(vec![config.vocab, d]),
        Role::FinalNorm => return Some(vec![d]),
        Role::Layer { layer, role } => (layer, role),
    };
    let mlp = *config.layers.get(layer)?;
    let when = |kind: MlpKind, shape: Vec<usize>| (mlp == kind).then_some(shape);
    match role {
        LayerRole::InputNorm | LayerRole::PostAttentionNorm => Some(vec![d]),
        LayerRole::QNorm | LayerRole::KNorm => Some(vec![config.head_dim]),
        LayerRole::Q => Some(vec![q, d]),
        LayerRole::K | LayerRole::V => Some(vec![kv, d]),
        LayerRole::O => Some(vec![d, q]),
        LayerRole::Router => when(MlpKind::Experts, vec![e, d]),
        LayerRole::DenseGate | LayerRole::DenseUp => when(MlpKind::Dense, vec![config.dense_width, d]),
        LayerRole::DenseDown => when(MlpKind::Dense, vec![d, config.dense_width]),
        LayerRole::Expert { expert, .. } if expert >= e => None,
        LayerRole::Expert { part: ExpertPart::Down, .. } => when(MlpKind::Experts, vec![d, f]),
        LayerRole::Expert { .. } => when(MlpKind::Experts, vec![f, d]),
        LayerRole::FusedGateUp => when(MlpKind::Experts, vec![e, 2 * f, d]),
        LayerRole::FusedDown => when(MlpKind::Experts, vec![e, d, f]),
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
            roles.extend(IN_LAYER.iter().map(|(_, role)| Role::Layer { layer, role: *role }));
            for (expert, part) in [0, 9, 127].into_iter().flat_map(|e| ExpertPart::ALL.map(|p| (e, p))) {
                roles.push(Role::Layer { layer, role: LayerRole::Expert { expert, part } });
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
