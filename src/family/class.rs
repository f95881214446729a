//! What a tensor is for by its name alone, in any family and any quantised format: whose it is, and whether it is payload,
//! scale or metadata. The families' own tables say more, for the names that they know.

/// The kind of work a tensor belongs to: the rows of a bill of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Group {
    /// Weights of routed experts.
    ExpertPayload,
    /// Block scales, zero points and other side tensors that follow the weights of an expert.
    ExpertScale,
    /// Biases of routed experts.
    ExpertBias,
    /// Scalars and descriptions of an expert that every rank reads.
    ExpertMetadata,
    /// Routers and their biases.
    Router,
    /// Experts that every token goes through.
    SharedExpert,
    /// MLP of layers without experts.
    DenseMlp,
    /// Attention, and whatever mixes tokens in its place.
    Attention,
    /// Norms.
    Norm,
    /// Token embedding and LM head.
    Embedding,
    /// Anything else.
    Other,
}

impl Group {
    /// Every group, in the order of a bill.
    pub const ALL: [Self; 11] = [
        Self::ExpertPayload,
        Self::ExpertScale,
        Self::ExpertBias,
        Self::ExpertMetadata,
        Self::Router,
        Self::SharedExpert,
        Self::DenseMlp,
        Self::Attention,
        Self::Norm,
        Self::Embedding,
        Self::Other,
    ];

    /// A name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ExpertPayload => "expert weights",
            Self::ExpertScale => "expert scales",
            Self::ExpertBias => "expert biases",
            Self::ExpertMetadata => "expert metadata",
            Self::Router => "router",
            Self::SharedExpert => "shared experts",
            Self::DenseMlp => "dense MLP",
            Self::Attention => "attention",
            Self::Norm => "norms",
            Self::Embedding => "embedding, LM head",
            Self::Other => "other",
        }
    }
}

/// Which side of an expert's width a tensor lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Projection {
    /// Gate or up alone: outputs are the width.
    GateOrUp,
    /// Gate and up in one tensor: outputs are twice the width.
    GateUp,
    /// Down: inputs are the width.
    Down,
}

/// What a name says about a tensor of routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTensor<'a> {
    /// What precedes `.experts.`: the module, whose experts have one placement.
    pub module: &'a str,
    /// Global id; `None` for a tensor of all experts, the slowest dimension first.
    pub expert: Option<usize>,
    /// `None` where the name does not tell.
    pub projection: Option<Projection>,
    /// One of the four `Expert*` groups.
    pub group: Group,
    /// Stored `[in, out]`, as GPTQ and AWQ do.
    pub input_first: bool,
}

/// Suffix after the last dot (or of a fused name), what it is, and whether it is stored `[in, out]`.
const SUFFIXES: [(&str, Group, bool); 19] = [
    ("weight", Group::ExpertPayload, false),
    ("weight_packed", Group::ExpertPayload, false),
    ("qweight", Group::ExpertPayload, true),
    ("blocks", Group::ExpertPayload, false),
    ("weight_scale", Group::ExpertScale, false),
    ("weight_scale_inv", Group::ExpertScale, false),
    ("weight_zero_point", Group::ExpertScale, false),
    ("weight_g_idx", Group::ExpertScale, false),
    ("scales", Group::ExpertScale, true),
    ("qzeros", Group::ExpertScale, true),
    ("g_idx", Group::ExpertScale, true),
    ("bias", Group::ExpertBias, false),
    ("weight_scale_2", Group::ExpertMetadata, false),
    ("weight_global_scale", Group::ExpertMetadata, false),
    ("weight_shape", Group::ExpertMetadata, false),
    ("input_scale", Group::ExpertMetadata, false),
    ("input_scale_inv", Group::ExpertMetadata, false),
    ("input_global_scale", Group::ExpertMetadata, false),
    ("input_zero_point", Group::ExpertMetadata, false),
];

/// Names of projections; Mixtral's w1, w2 and w3 are gate, down and up.
const PROJECTIONS: [(&str, Projection); 8] = [
    ("gate_up_proj", Projection::GateUp),
    ("gate_proj", Projection::GateOrUp),
    ("up_proj", Projection::GateOrUp),
    ("down_proj", Projection::Down),
    ("w13", Projection::GateUp),
    ("w1", Projection::GateOrUp),
    ("w3", Projection::GateOrUp),
    ("w2", Projection::Down),
];

/// What precedes an expert's number, or the projection of a fused tensor. The dot in front keeps `.shared_experts.` out.
const EXPERTS: &str = ".experts.";

/// The expert id in a name: the first number between `.experts.` and a dot.
pub fn expert_id(name: &str) -> Option<usize> {
    expert_number(name).map(|(_, id, _)| id)
}

/// What precedes `.experts.N.`, N, and what follows.
fn expert_number(name: &str) -> Option<(&str, usize, &str)> {
    name.match_indices(EXPERTS).find_map(|(at, _)| {
        let rest = &name[at + EXPERTS.len()..];
        let (digits, rest) = rest.split_once('.')?;
        let digits = (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())).then_some(digits)?;
        Some((&name[..at], digits.parse().ok()?, rest))
    })
}

/// What `name` says, when it is the name of a tensor of routed experts.
///
/// An unknown suffix counts as metadata, which every rank reads: more bytes, never a wrong result.
pub fn expert_tensor(name: &str) -> Option<ExpertTensor<'_>> {
    let (module, expert, rest) = match expert_number(name) {
        Some((module, id, rest)) => (module, Some(id), rest),
        None => {
            let at = name.find(EXPERTS)?;
            (&name[..at], None, &name[at + EXPERTS.len()..])
        }
    };
    let (head, suffix) = rest.split_once('.').unwrap_or((rest, ""));
    let named =
        PROJECTIONS.iter().find(|(n, _)| head.strip_prefix(n).is_some_and(|r| r.is_empty() || r.starts_with('_')));
    // `gate_up_proj`, `gate_up_proj_blocks`: a parameter of the fused module, the suffix behind an underscore.
    let (suffix, parameter) = match (named, suffix) {
        (Some((n, _)), "") => (head[n.len()..].trim_start_matches('_'), true),
        _ => (suffix, false),
    };
    let found = SUFFIXES.iter().find(|(s, ..)| *s == suffix);
    let (group, input_first) = match found {
        // A bare parameter; an expert of its own always has a suffix.
        None if suffix.is_empty() && named.is_some() => (Group::ExpertPayload, false),
        None => (Group::ExpertMetadata, false),
        // The scales beside `_blocks` are `[out, in / 32]`.
        Some((_, group, input_first)) => (*group, *input_first && !parameter),
    };
    Some(ExpertTensor { module, expert, projection: named.map(|(_, p)| *p), group, input_first })
}

/// A projection of attention whose rows or columns are heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadProjection {
    /// Queries: a row each.
    Q,
    /// Keys or values: a row each.
    KeyOrValue,
    /// Output: takes a column for each value of a query head.
    Output,
}

/// Which projection of attention, and whether its weight or its bias; `None` for anything else, such as parts of a quantised
/// projection.
pub fn attention_tensor(name: &str) -> Option<(HeadProjection, bool)> {
    let (name, suffix) = name.rsplit_once('.')?;
    let (module, projection) = name.rsplit_once('.')?;
    let module = module.rsplit('.').next()?;
    let projection = match projection {
        "q_proj" => HeadProjection::Q,
        "k_proj" | "v_proj" => HeadProjection::KeyOrValue,
        "o_proj" => HeadProjection::Output,
        _ => return None,
    };
    let attention = module.contains("attn") || module.contains("attention") || module == "mixer";
    match suffix {
        "weight" if attention => Some((projection, true)),
        "bias" if attention => Some((projection, false)),
        _ => None,
    }
}

/// The group of any tensor.
pub fn group(name: &str) -> Group {
    if let Some(tensor) = expert_tensor(name) {
        return tensor.group;
    }
    let has = |words: &[&str]| name.split('.').any(|part| words.iter().any(|w| part.contains(w)));
    let part = |words: &[&str]| name.split('.').any(|part| words.contains(&part));
    if has(&["shared_expert"]) {
        Group::SharedExpert
    } else if has(&["norm"]) {
        Group::Norm
    } else if part(&["gate", "router"]) || has(&["e_score_correction_bias"]) {
        Group::Router
    } else if has(&["attn", "attention"]) {
        Group::Attention
    } else if part(&["embed_tokens", "lm_head", "wte"]) {
        Group::Embedding
    } else if part(&["mlp", "feed_forward"]) {
        Group::DenseMlp
    } else {
        Group::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_found_where_the_reference_filter_finds_them() {
        let cases = [
            ("model.layers.1.mlp.experts.42.gate_proj.weight", Some(42)),
            ("model.layers.1.mlp.experts.383.down_proj.weight", Some(383)),
            ("model.layers.0.block_sparse_moe.experts.0.w1.weight", Some(0)),
            ("model.layers.1.mlp.experts.100.gate_proj.weight_scale", Some(100)),
            ("model.layers.1.mlp.shared_experts.gate_proj.weight", None),
            ("model.layers.1.mlp.shared_experts.3.gate_proj.weight", None),
            ("model.layers.1.mlp.shared_expert.gate_proj.weight", None),
            ("model.layers.1.self_attn.q_proj.weight", None),
            ("model.embed_tokens.weight", None),
            ("model.layers.1.input_layernorm.weight", None),
            ("model.layers.1.mlp.experts.gate_proj.weight", None),
            ("model.layers.1.mlp.experts.gate_up_proj", None),
            ("experts.3.gate_proj.weight", None),
            ("model.experts.3", None),
            ("model.experts.x3.y.experts.7.w1.weight", Some(7)),
            ("model.experts.99999999999999999999999.w1.weight", None),
        ];
        let wrong: Vec<_> = cases.iter().filter(|(name, id)| expert_id(name) != *id).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn suffixes_become_groups() {
        use Group::*;
        use Projection::*;
        let cases = [
            ("experts.7.gate_proj.weight", Some(7), Some(GateOrUp), ExpertPayload, false),
            ("experts.7.w2.weight", Some(7), Some(Down), ExpertPayload, false),
            ("experts.7.up_proj.weight_packed", Some(7), Some(GateOrUp), ExpertPayload, false),
            ("experts.7.down_proj.qweight", Some(7), Some(Down), ExpertPayload, true),
            ("experts.7.down_proj.qzeros", Some(7), Some(Down), ExpertScale, true),
            ("experts.7.down_proj.scales", Some(7), Some(Down), ExpertScale, true),
            ("experts.7.down_proj.g_idx", Some(7), Some(Down), ExpertScale, true),
            ("experts.7.down_proj.weight_scale", Some(7), Some(Down), ExpertScale, false),
            ("experts.7.down_proj.weight_scale_inv", Some(7), Some(Down), ExpertScale, false),
            ("experts.7.down_proj.weight_zero_point", Some(7), Some(Down), ExpertScale, false),
            ("experts.7.down_proj.bias", Some(7), Some(Down), ExpertBias, false),
            ("experts.7.down_proj.weight_scale_2", Some(7), Some(Down), ExpertMetadata, false),
            ("experts.7.down_proj.weight_global_scale", Some(7), Some(Down), ExpertMetadata, false),
            ("experts.7.down_proj.weight_shape", Some(7), Some(Down), ExpertMetadata, false),
            ("experts.7.down_proj.input_scale", Some(7), Some(Down), ExpertMetadata, false),
            ("experts.7.down_proj.input_global_scale", Some(7), Some(Down), ExpertMetadata, false),
            ("experts.7.down_proj.weight.absmax", Some(7), Some(Down), ExpertMetadata, false),
            ("experts.gate_up_proj", None, Some(GateUp), ExpertPayload, false),
            ("experts.down_proj", None, Some(Down), ExpertPayload, false),
            ("experts.gate_up_proj_blocks", None, Some(GateUp), ExpertPayload, false),
            ("experts.gate_up_proj_scales", None, Some(GateUp), ExpertScale, false),
            ("experts.down_proj_bias", None, Some(Down), ExpertBias, false),
            ("experts.gate_proj.weight", None, Some(GateOrUp), ExpertPayload, false),
            ("experts.w13_weight", None, Some(GateUp), ExpertPayload, false),
            ("experts.extra", None, None, ExpertMetadata, false),
        ];
        let mut failures = Vec::new();
        for (rest, expert, projection, group, input_first) in cases {
            let name = format!("model.layers.3.mlp.{rest}");
            let want = ExpertTensor { module: "model.layers.3.mlp", expert, projection, group, input_first };
            if expert_tensor(&name) != Some(want) {
                failures.push((rest, expert_tensor(&name).map(|t| format!("{t:?}"))));
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
    }

    #[test]
    fn projections_of_attention_are_told_from_others() {
        use HeadProjection::*;
        let cases = [
            ("model.layers.1.self_attn.q_proj.weight", Some((Q, true))),
            ("model.layers.1.self_attn.k_proj.bias", Some((KeyOrValue, false))),
            ("model.layers.1.attention.v_proj.weight", Some((KeyOrValue, true))),
            ("backbone.layers.1.mixer.o_proj.weight", Some((Output, true))),
            ("model.layers.1.self_attn.o_proj.weight_scale", None),
            ("model.layers.1.self_attn.q_norm.weight", None),
            ("model.layers.1.self_attn.q_a_proj.weight", None),
            ("model.layers.1.mlp.o_proj.weight", None),
            ("q_proj.weight", None),
        ];
        let wrong: Vec<_> = cases.iter().filter(|(name, want)| attention_tensor(name) != *want).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn tensors_of_all_ranks_have_a_group_too() {
        let cases = [
            ("model.layers.1.mlp.shared_experts.gate_proj.weight", Group::SharedExpert),
            ("model.layers.1.mlp.shared_expert_gate.weight", Group::SharedExpert),
            ("model.layers.1.mlp.gate.weight", Group::Router),
            ("model.layers.1.mlp.gate.e_score_correction_bias", Group::Router),
            ("model.layers.1.mlp.router.weight", Group::Router),
            ("model.layers.1.mlp.gate_proj.weight", Group::DenseMlp),
            ("model.layers.1.self_attn.q_norm.weight", Group::Norm),
            ("model.layers.1.linear_attn.out_proj.weight", Group::Attention),
            ("model.norm.weight", Group::Norm),
            ("lm_head.weight", Group::Embedding),
            ("visual.patch.weight", Group::Other),
        ];
        let wrong: Vec<_> = cases.iter().filter(|(name, want)| group(name) != *want).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}
