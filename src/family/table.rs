//! A family as data: its names, what they mean, how it keeps its experts. One file a family fills this in.

use std::borrow::Cow;

use super::{ExpertPart, Role};
use crate::checkpoint::{Mixer, MlpKind, ModelConfig};

/// A role that lacks only the number of its layer.
pub(crate) type InLayer = fn(usize) -> Role;

/// Everything that distinguishes a family from the others.
pub(crate) struct Table {
    /// What `config.json` calls it in `model_type`.
    pub(crate) model_type: &'static str,
    /// What this crate can do with it.
    pub(crate) support: Support,
    /// The keys of its `config.json`.
    pub(crate) keys: Keys,
    /// Tensors outside the layers.
    pub(crate) global: &'static [(&'static str, Role)],
    /// What precedes the layer number.
    pub(crate) layers: &'static str,
    /// Tensors of a layer, by what follows the layer number and a dot; those of the experts apart.
    pub(crate) in_layer: &'static [&'static [(&'static str, InLayer)]],
    /// The module of the experts, by what follows the layer number and a dot, with a dot behind it.
    pub(crate) experts: &'static str,
    /// Tensors of one expert, by what follows its number and a dot.
    pub(crate) in_expert: &'static [(&'static str, ExpertPart)],
    /// Parameters of the experts' module that hold all of them, in the order in which the module registers them.
    pub(crate) fused: &'static [(&'static str, Fused)],
    /// How those parameters are kept.
    pub(crate) stored: Stored,
    /// Rows of gate and up alternate in the fused parameter, gate first; otherwise all gate rows come first.
    pub(crate) interleaved: bool,
    /// Whether q and k are normed: head by head, or over their whole width.
    pub(crate) head_norms: HeadNorms,
    /// Beginnings that adapters use for modules, and what they are in this table: before the layer number, and after it.
    pub(crate) aliases: Aliases,
}

/// How far a family is supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Support {
    /// Models run.
    Decoder,
    /// Checkpoints open: the table names every tensor. Nothing runs yet.
    Weights,
    /// The table names what adapters change, and not every tensor.
    Adapters,
}

/// Spellings of `config.json`.
pub(crate) struct Keys {
    /// Number of routed experts; several spellings must agree.
    pub(crate) experts: &'static [&'static str],
    /// Width of an expert.
    pub(crate) expert_width: &'static str,
    /// Width of the shared expert, where there is one.
    pub(crate) shared_width: Option<&'static str>,
    /// Width that experts take and give where it is not the hidden one.
    pub(crate) latent_width: Option<&'static str>,
    /// Epsilon of the norms, and its default.
    pub(crate) rms_eps: (&'static str, f64),
    /// Positions are rotary.
    pub(crate) rotary: bool,
    /// Each layer is attention, an MLP or something else, and a list says which; otherwise each has attention and an MLP.
    pub(crate) mixers: bool,
}

/// The usual keys.
pub(crate) const KEYS: Keys = Keys {
    experts: &["num_experts", "num_local_experts"],
    expert_width: "moe_intermediate_size",
    shared_width: None,
    latent_width: None,
    rms_eps: ("rms_norm_eps", 1e-6),
    rotary: true,
    mixers: false,
};

/// What a fused parameter holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fused {
    /// Gate and up.
    GateUp,
    /// Up, where there is no gate.
    Up,
    /// Down.
    Down,
}

/// How a model keeps the parameter that holds all experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// `[E, out, in]`.
    OutIn,
    /// `[E, in, out]`, with the flag `is_transposed` on its class (GPT-OSS).
    InOutFlagged,
    /// `[E, in, out]` without the flag (Llama 4).
    #[cfg_attr(not(test), expect(dead_code, reason = "no family here keeps them so yet"))]
    InOut,
}

/// Norms of q and k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeadNorms {
    /// Of each head, `[head_dim]`.
    Each,
    /// Of all heads together.
    Whole,
}

/// Other names of modules.
pub(crate) struct Aliases {
    /// Before the layer number, or outside the layers.
    pub(crate) model: &'static [(&'static str, &'static str)],
    /// After the layer number.
    pub(crate) layer: &'static [(&'static str, &'static str)],
}

/// Embedding, LM head and last norm under the usual names.
pub(crate) const GLOBAL: &[(&str, Role)] = &[
    ("model.embed_tokens.weight", Role::Embedding),
    ("lm_head.weight", Role::LmHead),
    ("model.norm.weight", Role::FinalNorm),
];

/// The two norms of a layer under the usual names.
pub(crate) const NORMS: &[(&str, InLayer)] = &[
    ("input_layernorm.weight", |layer| Role::InputNorm { layer }),
    ("post_attention_layernorm.weight", |layer| Role::PostAttentionNorm { layer }),
];

/// Attention under the usual names.
pub(crate) const ATTENTION: &[(&str, InLayer)] = &[
    ("self_attn.q_proj.weight", |layer| Role::Q { layer }),
    ("self_attn.k_proj.weight", |layer| Role::K { layer }),
    ("self_attn.v_proj.weight", |layer| Role::V { layer }),
    ("self_attn.o_proj.weight", |layer| Role::O { layer }),
];

/// Norms of q and k under the usual names.
pub(crate) const QK_NORMS: &[(&str, InLayer)] = &[
    ("self_attn.q_norm.weight", |layer| Role::QNorm { layer }),
    ("self_attn.k_norm.weight", |layer| Role::KNorm { layer }),
];

/// The router and, in layers without experts, the MLP under the usual names.
pub(crate) const ROUTER: &[(&str, InLayer)] = &[("mlp.gate.weight", |layer| Role::Router { layer })];

/// The MLP of layers without experts under the usual names.
pub(crate) const DENSE: &[(&str, InLayer)] = &[
    ("mlp.gate_proj.weight", |layer| Role::DenseGate { layer }),
    ("mlp.up_proj.weight", |layer| Role::DenseUp { layer }),
    ("mlp.down_proj.weight", |layer| Role::DenseDown { layer }),
];

/// Projections of an expert under the usual names.
pub(crate) const GATED_EXPERT: &[(&str, ExpertPart)] = &[
    ("gate_proj.weight", ExpertPart::Gate),
    ("up_proj.weight", ExpertPart::Up),
    ("down_proj.weight", ExpertPart::Down),
];

/// Fused parameters under the usual names.
pub(crate) const GATED_FUSED: &[(&str, Fused)] = &[("gate_up_proj", Fused::GateUp), ("down_proj", Fused::Down)];

/// No other names.
pub(crate) const NO_ALIASES: Aliases = Aliases { model: &[], layer: &[] };

impl Fused {
    const fn role(self, layer: usize) -> Role {
        match self {
            Self::GateUp | Self::Up => Role::FusedGateUp { layer },
            Self::Down => Role::FusedDown { layer },
        }
    }
}

impl Table {
    /// Experts have a gate.
    pub(crate) fn gated(&self) -> bool {
        self.fused.iter().any(|(_, fused)| *fused == Fused::GateUp)
    }

    /// Every tensor of a layer outside its experts.
    pub(crate) fn in_layer(&self) -> impl Iterator<Item = &(&'static str, InLayer)> {
        self.in_layer.iter().copied().flatten()
    }

    /// What the tensor `name` is for.
    pub(crate) fn role(&self, name: &str) -> Option<Role> {
        if let Some((_, role)) = self.global.iter().find(|(n, _)| *n == name) {
            return Some(*role);
        }
        let (layer, rest) = numbered(name.strip_prefix(self.layers)?)?;
        if let Some((_, role)) = self.in_layer().find(|(n, _)| *n == rest) {
            return Some(role(layer));
        }
        let rest = rest.strip_prefix(self.experts)?;
        if let Some((_, fused)) = self.fused.iter().find(|(n, _)| *n == rest) {
            return Some(fused.role(layer));
        }
        let (expert, rest) = numbered(rest)?;
        let (_, part) = self.in_expert.iter().find(|(n, _)| *n == rest)?;
        Some(part.role(layer, expert))
    }

    /// The name of the tensor with this role; for a role that the family does not have, one that no file has.
    pub(crate) fn tensor_name(&self, role: Role) -> String {
        let found = self.name(role);
        found.unwrap_or_else(|| format!("<{role:?} of {}>", self.model_type))
    }

    fn name(&self, role: Role) -> Option<String> {
        if let Some((name, _)) = self.global.iter().find(|(_, r)| *r == role) {
            return Some((*name).to_owned());
        }
        let layer = role.layer()?;
        let in_layer = |rest: &str| format!("{}{layer}.{rest}", self.layers);
        if let Some((part, expert)) = role.expert() {
            let (rest, _) = self.in_expert.iter().find(|(_, p)| *p == part)?;
            return Some(in_layer(&format!("{}{expert}.{rest}", self.experts)));
        }
        if let Some((rest, _)) = self.fused.iter().find(|(_, fused)| fused.role(layer) == role) {
            return Some(in_layer(&format!("{}{rest}", self.experts)));
        }
        let (rest, _) = self.in_layer().find(|(_, r)| r(layer) == role)?;
        Some(in_layer(rest))
    }

    /// The shape of the tensor with this role as it is stored; `None` when the family has no such tensor, or the model no
    /// such layer, expert or kind of layer.
    pub(crate) fn shape(&self, role: Role, config: &ModelConfig) -> Option<Vec<usize>> {
        self.name(role)?;
        let (d, e) = (config.hidden, config.moe.experts);
        let (moe, f, s) = (config.moe.hidden, config.moe.expert_width, config.shared_width);
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let layer = role.layer();
        if layer.is_some_and(|layer| layer >= config.n_layers()) {
            return None;
        }
        let mixer = layer.map_or(Mixer::Both, |layer| config.mixer(layer));
        let attention = matches!(mixer, Mixer::Both | Mixer::Attention);
        let mlp = |kind: MlpKind| {
            matches!(mixer, Mixer::Both | Mixer::Mlp) && layer.is_some_and(|layer| config.layers[layer] == kind)
        };
        let (routed, dense) = (mlp(MlpKind::Experts), mlp(MlpKind::Dense));
        if role.expert().is_some_and(|(_, expert)| expert >= e) {
            return None;
        }
        let stored = |out: usize, inn: usize| match self.stored {
            Stored::OutIn => vec![e, out, inn],
            Stored::InOutFlagged | Stored::InOut => vec![e, inn, out],
        };
        let (present, shape) = match role {
            Role::Embedding | Role::LmHead => (true, vec![config.vocab, d]),
            Role::FinalNorm => (true, vec![d]),
            Role::InputNorm { .. } | Role::PostAttentionNorm { .. } => (true, vec![d]),
            Role::QNorm { .. } | Role::KNorm { .. } if self.head_norms == HeadNorms::Each => {
                (attention, vec![config.head_dim])
            }
            Role::QNorm { .. } | Role::QBias { .. } => (attention, vec![q]),
            Role::KNorm { .. } | Role::KBias { .. } | Role::VBias { .. } => (attention, vec![kv]),
            Role::Q { .. } => (attention, vec![q, d]),
            Role::K { .. } | Role::V { .. } => (attention, vec![kv, d]),
            Role::O { .. } => (attention, vec![d, q]),
            Role::Router { .. } => (routed, vec![e, d]),
            Role::DenseGate { .. } | Role::DenseUp { .. } => (dense, vec![config.dense_width, d]),
            Role::DenseDown { .. } => (dense, vec![d, config.dense_width]),
            Role::SharedGate { .. } | Role::SharedUp { .. } => (routed && s > 0, vec![s, d]),
            Role::SharedDown { .. } => (routed && s > 0, vec![d, s]),
            Role::SharedRouter { .. } => (routed && s > 0, vec![1, d]),
            Role::ExpertGate { .. } | Role::ExpertUp { .. } => (routed, vec![f, moe]),
            Role::ExpertDown { .. } => (routed, vec![moe, f]),
            Role::FusedGateUp { .. } => (routed, stored(if self.gated() { 2 * f } else { f }, moe)),
            Role::FusedDown { .. } => (routed, stored(moe, f)),
        };
        present.then_some(shape)
    }

    /// The layer whose experts are the module `module`.
    pub(crate) fn experts_layer(&self, module: &str) -> Option<usize> {
        let (layer, rest) = numbered(module.strip_prefix(self.layers)?)?;
        (self.experts.strip_suffix('.') == Some(rest)).then_some(layer)
    }

    /// The module `name` under this table's names.
    pub(crate) fn module<'a>(&self, name: &'a str) -> Cow<'a, str> {
        let first = |aliases: &[(&str, &str)], name: &str| {
            aliases.iter().find_map(|(from, to)| Some(format!("{to}{}", name.strip_prefix(from)?)))
        };
        let name = first(self.aliases.model, name).map_or(Cow::Borrowed(name), Cow::Owned);
        let in_layer = name.strip_prefix(self.layers).and_then(|rest| rest.split_once('.'));
        match in_layer.and_then(|(layer, rest)| Some((layer, first(self.aliases.layer, rest)?))) {
            Some((layer, rest)) => Cow::Owned(format!("{}{layer}.{rest}", self.layers)),
            None => name,
        }
    }
}

/// Splits `12.rest` into 12 and `rest`. Only the one canonical spelling of a number counts, so that no two names mean the
/// same tensor.
pub(crate) fn numbered(text: &str) -> Option<(usize, &str)> {
    let (digits, rest) = text.split_once('.')?;
    Some((number(digits)?, rest))
}

/// The number that `digits` spells canonically.
pub(crate) fn number(digits: &str) -> Option<usize> {
    let canonical = digits.bytes().all(|b| b.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    if canonical { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use crate::family::{ExpertPart, Family, Role};

    #[test]
    fn every_role_has_one_name() {
        let mut wrong = Vec::new();
        for family in Family::ALL {
            let table = family.table();
            let mut roles: Vec<Role> = table.global.iter().map(|(_, r)| *r).collect();
            for layer in [0, 7, 120] {
                roles.extend(table.in_layer().map(|(_, role)| role(layer)));
                roles.extend(table.fused.iter().map(|(_, fused)| fused.role(layer)));
                for (expert, (_, part)) in
                    [0, 9, 127].into_iter().flat_map(|e| table.in_expert.iter().map(move |p| (e, p)))
                {
                    roles.push(part.role(layer, expert));
                }
            }
            let all = roles.len();
            wrong.extend(
                roles.iter().filter(|r| family.role(&family.tensor_name(**r)) != Some(**r)).map(|r| (family, *r)),
            );
            roles.sort();
            roles.dedup();
            assert_eq!(roles.len(), all, "{family:?}: a role has two names");
        }
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
            "model.layers.0.mlp.shared_expert.x_proj.weight",
            "layers.0.input_layernorm.weight",
        ];
        let known: Vec<_> = Family::ALL
            .into_iter()
            .flat_map(|f| names.iter().map(move |n| (f, *n)))
            .filter(|(f, n)| f.role(n).is_some())
            .collect();
        assert!(known.is_empty(), "{known:?}");
        let none = Family::Mixtral.tensor_name(Role::QNorm { layer: 3 });
        assert_eq!(Family::Mixtral.role(&none), None);
        assert_eq!(Family::NemotronH.role(&Family::NemotronH.tensor_name(ExpertPart::Gate.role(0, 0))), None);
    }

    #[test]
    fn adapters_may_use_other_names_of_modules() {
        let cases = [
            (Family::Mixtral, "model.layers.3.mlp.experts.5.w1", "model.layers.3.block_sparse_moe.experts.5.w1"),
            (Family::Mixtral, "model.layers.3.block_sparse_moe.gate", "model.layers.3.block_sparse_moe.gate"),
            (Family::NemotronH, "model.layers.3.mixer.gate", "backbone.layers.3.mixer.gate"),
            (Family::NemotronH, "model.embeddings", "backbone.embeddings"),
            (Family::Qwen3Moe, "model.layers.3.mlp.gate", "model.layers.3.mlp.gate"),
            (Family::Mixtral, "lm_head", "lm_head"),
        ];
        let wrong: Vec<_> =
            cases.iter().map(|(f, name, want)| (f.table().module(name), want)).filter(|(a, b)| a != *b).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}
