//! Tensor names of a LoRA file, grouped into pairs of A and B with the place in the model they belong to.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::checkpoint::untrusted::shown;
use crate::error::ErrorKind;
use crate::family::{Family, Role};

/// What PEFT puts in front of the name of a module.
const PREFIX: &str = "base_model.model.";
/// What follows the module: PEFT's own spelling, and that of tools that keep the adapter's name.
const SUFFIXES: [(&str, Side); 4] = [
    (".lora_A.weight", Side::A),
    (".lora_B.weight", Side::B),
    (".lora_A.default.weight", Side::A),
    (".lora_B.default.weight", Side::B),
];
/// What a wrapper around a wrapper adds to the name of a module.
const BASE_LAYER: &str = ".base_layer";

/// Where tools put the text model of a larger one, and where it is here.
const REWRITES: [(&str, &str); 2] = [("model.language_model.", "model."), ("language_model.model.", "model.")];

/// The modules of packed experts, by what follows `experts.`; `w1` to `w3` are Tinker's names.
const PACKED: [(&str, Packed); 7] = [
    ("gate_up_proj", Packed::GateUp),
    ("gate_proj", Packed::Gate),
    ("up_proj", Packed::Up),
    ("down_proj", Packed::Down),
    ("w1", Packed::Gate),
    ("w3", Packed::Up),
    ("w2", Packed::Down),
];

/// Parts of names of tensors that only other methods write, and those methods.
const OTHER_METHODS: [(&str, &str); 6] = [
    ("lora_magnitude_vector", "DoRA"),
    ("lora_embedding_", "LoRA on embeddings"),
    ("trainable_tokens_delta", "trainable tokens"),
    ("modules_to_save", "modules to save"),
    (".bias", "a bias"),
    (".base_layer.weight", "saved base weights"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    A,
    B,
}

/// What a pair with a dimension for the experts changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Packed {
    /// Gate and up, with one A.
    GateUp,
    /// Gate alone.
    Gate,
    /// Up alone.
    Up,
    /// Down.
    Down,
}

/// The place of one pair of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    /// The weight with this role.
    Weight(Role),
    /// A parameter of all experts of a layer. The file does not say which: wrappers nest in the order of the parameters,
    /// the first innermost, and `depth` counts the wrappers outside of this one.
    Fused {
        /// Decoder layer.
        layer: usize,
        /// Wrappers around this one.
        depth: usize,
    },
    /// A projection of all experts of a layer, the expert as first dimension of both tensors.
    Packed {
        /// Decoder layer.
        layer: usize,
        /// Which projection.
        part: Packed,
    },
}

/// A and B of one place.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    /// The module, as `adapter_config.json` spells it.
    pub(crate) module: String,
    /// Where it belongs.
    pub(crate) target: Target,
    /// Tensor name of A.
    pub(crate) a: String,
    /// Tensor name of B.
    pub(crate) b: String,
}

/// A name that cannot be used: the kind of error, the tensor and the reason.
pub(crate) type Refusal = (ErrorKind, String, String);

/// Sorts all tensor names of a file into pairs, ordered by target. Every name ends up in a pair or is refused.
pub(crate) fn pairs<'a>(names: impl Iterator<Item = &'a str>, family: Family) -> Result<Vec<Pair>, Refusal> {
    let mut found: BTreeMap<Target, (String, [Option<String>; 2])> = BTreeMap::new();
    for name in names {
        let (module, target, side) = parse(name, family).map_err(|(kind, reason)| (kind, name.to_owned(), reason))?;
        let sides = &mut found.entry(target).or_insert_with(|| (module, [None, None])).1;
        if let Some(other) = sides[side as usize].replace(name.to_owned()) {
            let reason = format!("means the same as `{}`", shown(&other));
            return Err((ErrorKind::Adapter, name.to_owned(), reason));
        }
    }
    let complete = found.into_iter().map(|(target, (module, sides))| match sides {
        [Some(a), Some(b)] => Ok(Pair { module, target, a, b }),
        [Some(a), None] => Err((ErrorKind::Adapter, a, "has no `lora_B` to go with it".to_owned())),
        [_, b] => Err((ErrorKind::Adapter, b.unwrap_or_default(), "has no `lora_A` to go with it".to_owned())),
    });
    complete.collect()
}

/// The module, target and side that `name` means.
fn parse(name: &str, family: Family) -> Result<(String, Target, Side), (ErrorKind, String)> {
    let bare = name.strip_prefix(PREFIX).unwrap_or(name);
    let Some((module, side)) = SUFFIXES.iter().find_map(|(suffix, side)| Some((bare.strip_suffix(suffix)?, *side)))
    else {
        return Err(match OTHER_METHODS.iter().find(|(part, _)| name.contains(part)) {
            Some((_, method)) => (ErrorKind::Unsupported, format!("{method} is not supported")),
            None => {
                (ErrorKind::Adapter, "expected a name that ends in `.lora_A.weight` or `.lora_B.weight`".to_owned())
            }
        });
    };
    let (mut bare_module, mut depth) = (module, 0);
    while let Some(inner) = bare_module.strip_suffix(BASE_LAYER) {
        (bare_module, depth) = (inner, depth + 1);
    }
    let here = rewritten(bare_module);
    let fused_layer = |module: &str| match family.role(&format!("{module}.gate_up_proj")) {
        Some(Role::FusedGateUp { layer }) => Some(layer),
        _ => None,
    };
    let packed = || {
        let (experts, name) = here.rsplit_once('.')?;
        let (_, part) = PACKED.iter().find(|(n, _)| *n == name)?;
        Some(Target::Packed { layer: fused_layer(experts)?, part: *part })
    };
    let target = match family.role(&format!("{here}.weight")) {
        Some(role) if depth == 0 => Some(Target::Weight(role)),
        _ => match fused_layer(&here) {
            Some(layer) => Some(Target::Fused { layer, depth }),
            None if depth == 0 => packed(),
            None => None,
        },
    };
    let target = target.ok_or_else(|| (ErrorKind::Adapter, "belongs to no module of the model".to_owned()))?;
    Ok((bare_module.to_owned(), target, side))
}

/// The module as this crate's models name it.
fn rewritten(module: &str) -> Cow<'_, str> {
    let found = REWRITES.iter().find_map(|(from, to)| Some(format!("{to}{}", module.strip_prefix(from)?)));
    found.map_or(Cow::Borrowed(module), Cow::Owned)
}
