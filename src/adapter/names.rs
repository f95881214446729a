//! Tensor names of a LoRA file, grouped into pairs of A and B with the place in the model they belong to.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::checkpoint::untrusted::shown;
use crate::error::ErrorKind;
use crate::family::table::number;
use crate::family::{Family, Role};

/// What PEFT puts in front of the name of a module.
const PREFIX: &str = "base_model.model.";
/// What follows the module: PEFT's own spelling, and that of tools that keep the adapter's name.
const SUFFIXES: [(&str, Side); 6] = [
    (".lora_A.weight", Side::A),
    (".lora_B.weight", Side::B),
    (".lora_B.bias", Side::Bias),
    (".lora_A.default.weight", Side::A),
    (".lora_B.default.weight", Side::B),
    (".lora_B.default.bias", Side::Bias),
];
/// What follows an embedding.
const EMBEDDING_SUFFIXES: [(&str, Side); 4] = [
    (".lora_embedding_A", Side::A),
    (".lora_embedding_B", Side::B),
    (".lora_embedding_A.default", Side::A),
    (".lora_embedding_B.default", Side::B),
];
/// What a wrapper around a wrapper adds to the name of a module.
const BASE_LAYER: &str = ".base_layer";
/// What follows a module whose base weight is saved beside its factors.
const COPY: &str = ".base_layer.weight";

/// Where tools put the text model of a larger one, and where it is here.
const REWRITES: [(&str, &str); 3] =
    [("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_head", "lm_head")];

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

/// Lists of one module an expert, by what follows `experts.`: fused experts that a tool took apart to quantise them.
const LISTED: [(&str, Packed); 2] = [("gate_up_projs", Packed::GateUp), ("down_projs", Packed::Down)];

/// Parts of names of tensors that only other methods write, and those methods.
const OTHER_METHODS: [(&str, &str); 5] = [
    ("lora_magnitude_vector", "DoRA"),
    ("trainable_tokens_delta", "a change of single tokens (`trainable_token_indices`)"),
    ("modules_to_save", "a module in full (`modules_to_save`)"),
    ("lora_embedding_", "LoRA on an embedding other than that of the tokens"),
    (".bias", "a bias of the model"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    A,
    B,
    Bias,
}

/// What a pair changes of experts whose projections are kept together.
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
    /// A part of a fused parameter that belongs to one expert.
    Listed {
        /// Decoder layer.
        layer: usize,
        /// Global id.
        expert: usize,
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
    /// Tensor name of the bias of B, if it has one.
    pub(crate) bias: Option<String>,
}

/// Everything a file holds.
#[derive(Debug)]
pub(crate) struct Names {
    /// Ordered by target.
    pub(crate) pairs: Vec<Pair>,
    /// Copies of base weights: tensor name and role.
    pub(crate) copies: Vec<(String, Role)>,
}

/// A name that cannot be used: the kind of error, the tensor and the reason.
pub(crate) type Refusal = (ErrorKind, String, String);

/// What one name means.
enum Meaning {
    Part(String, Target, Side),
    Copy(Role),
}

/// Sorts all tensor names of a file. Every name ends up in a pair, is a copy of a base weight that a pair goes with, or is
/// refused.
pub(crate) fn sorted<'a>(names: impl Iterator<Item = &'a str>, family: Family) -> Result<Names, Refusal> {
    let mut found: BTreeMap<Target, (String, [Option<String>; 3])> = BTreeMap::new();
    let mut copies = Vec::new();
    for name in names {
        let meaning = parse(name, family).map_err(|(kind, reason)| (kind, name.to_owned(), reason))?;
        let (module, target, side) = match meaning {
            Meaning::Part(module, target, side) => (module, target, side),
            Meaning::Copy(role) => {
                copies.push((name.to_owned(), role));
                continue;
            }
        };
        let sides = &mut found.entry(target).or_insert_with(|| (module, [None, None, None])).1;
        if let Some(other) = sides[side as usize].replace(name.to_owned()) {
            let reason = format!("means the same as `{}`", shown(&other));
            return Err((ErrorKind::Adapter, name.to_owned(), reason));
        }
    }
    if let Some((name, _)) = copies.iter().find(|(_, role)| !found.contains_key(&Target::Weight(*role))) {
        let reason = "a base weight in full, without factors of it, is not supported".to_owned();
        return Err((ErrorKind::Unsupported, name.clone(), reason));
    }
    let complete = found.into_iter().map(|(target, (module, sides))| match sides {
        [Some(a), Some(b), bias] => Ok(Pair { module, target, a, b, bias }),
        [Some(a), None, _] => Err((ErrorKind::Adapter, a, "has no `lora_B` to go with it".to_owned())),
        [None, b, bias] => {
            Err((ErrorKind::Adapter, b.or(bias).unwrap_or_default(), "has no `lora_A` to go with it".to_owned()))
        }
    });
    Ok(Names { pairs: complete.collect::<Result<_, _>>()?, copies })
}

/// What `name` means.
fn parse(name: &str, family: Family) -> Result<Meaning, (ErrorKind, String)> {
    let bare = name.strip_prefix(PREFIX).unwrap_or(name);
    let ending = |suffixes: &[(&str, Side)]| {
        suffixes.iter().find_map(|(suffix, side)| Some((bare.strip_suffix(suffix)?.to_owned(), *side)))
    };
    let role = |module: &str| family.role(&format!("{}.weight", here(module, family)));
    let nowhere = || (ErrorKind::Adapter, "belongs to no module of the model".to_owned());
    if let Some((module, side)) = ending(&EMBEDDING_SUFFIXES)
        && role(&module) == Some(Role::Embedding)
    {
        return Ok(Meaning::Part(module, Target::Weight(Role::Embedding), side));
    }
    if let Some((module, side)) = ending(&SUFFIXES) {
        let (module, target) = target(&module, family).ok_or_else(nowhere)?;
        return Ok(Meaning::Part(module, target, side));
    }
    if let Some(module) = bare.strip_suffix(COPY) {
        return role(module).map(Meaning::Copy).ok_or_else(nowhere);
    }
    if let Some((_, method)) = OTHER_METHODS.iter().find(|(part, _)| name.contains(part)) {
        return Err((ErrorKind::Unsupported, format!("{method} is not supported")));
    }
    if bare.strip_suffix(".weight").is_some_and(|module| role(module).is_some()) {
        let reason = "a module in full (`modules_to_save`, or an embedding saved with its factors) is not supported";
        return Err((ErrorKind::Unsupported, reason.to_owned()));
    }
    Err((ErrorKind::Adapter, "expected a name that ends in `.lora_A.weight` or `.lora_B.weight`".to_owned()))
}

/// The module without its wrappers, and what it is.
fn target(module: &str, family: Family) -> Option<(String, Target)> {
    let (mut bare, mut depth) = (module, 0);
    while let Some(inner) = bare.strip_suffix(BASE_LAYER) {
        (bare, depth) = (inner, depth + 1);
    }
    let here = here(bare, family);
    let table = family.table();
    let target = match family.role(&format!("{here}.weight")) {
        // Its factors have names of their own.
        Some(Role::Embedding) => return None,
        Some(role) if depth == 0 => Target::Weight(role),
        _ => match table.experts_layer(&here) {
            Some(layer) => Target::Fused { layer, depth },
            None if depth == 0 => {
                let (experts, last) = here.rsplit_once('.')?;
                match PACKED.iter().find(|(name, _)| *name == last) {
                    Some((_, part)) => Target::Packed { layer: table.experts_layer(experts)?, part: *part },
                    None => {
                        let (experts, list) = experts.rsplit_once('.')?;
                        let (_, part) = LISTED.iter().find(|(name, _)| *name == list)?;
                        Target::Listed { layer: table.experts_layer(experts)?, expert: number(last)?, part: *part }
                    }
                }
            }
            None => return None,
        },
    };
    Some((bare.to_owned(), target))
}

/// The module as the family's table names it.
fn here(module: &str, family: Family) -> String {
    let found = REWRITES.iter().find_map(|(from, to)| Some(format!("{to}{}", module.strip_prefix(from)?)));
    let module = found.map_or(Cow::Borrowed(module), Cow::Owned);
    family.table().module(&module).into_owned()
}
