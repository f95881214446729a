//! `adapter_config.json` of PEFT: ranks, scales and targets; everything that changes the maths and is not implemented is
//! refused by name.

use std::path::Path;

use fancy_regex::{Regex, RegexBuilder};
use serde_json::Value;

use crate::checkpoint::untrusted::{Object, shown};
use crate::error::{ErrorKind, Result};

/// Largest LoRA rank.
pub const MAX_RANK: usize = 512;
/// Most patterns that need a regular expression; plain names are not limited.
const MAX_REGEXES: usize = 1024;
/// Steps a regular expression may backtrack for one name.
const MAX_BACKTRACKS: usize = 100_000;

/// Settings that change the result and are not implemented; any value but null, false or empty is refused.
const REFUSED: [&str; 13] = [
    "use_dora",
    "modules_to_save",
    "alora_invocation_tokens",
    "invocation_string",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "monteclora_config",
    "kasa_config",
    "layer_replication",
    "trainable_token_indices",
    "fan_in_fan_out",
    "fine_tune_type",
];

/// Initialisations that leave the base model as it is.
const HARMLESS_INIT: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// What an adapter's configuration says about its tensors.
#[derive(Debug)]
pub(crate) struct AdapterConfig {
    rank: usize,
    alpha: f64,
    rslora: bool,
    ranks: Vec<(Pattern, usize)>,
    alphas: Vec<(Pattern, f64)>,
    target_modules: Targets,
    target_parameters: Vec<String>,
    peft_version: Option<Version>,
    columns: Option<ExpertColumns>,
    bias: bool,
    ties_weights: bool,
}

/// How the columns of B of a fused parameter are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertColumns {
    /// Rank first, expert fastest: PEFT, and Unsloth since it marks its files so.
    RankMajor,
    /// One block of columns an expert: Unsloth before that.
    GroupedByExpert,
}

/// Which modules the configuration names.
#[derive(Debug)]
enum Targets {
    /// All linear layers, or nothing said.
    All,
    /// Exact names or suffixes at a dot.
    Names(Vec<String>),
    /// A regular expression for the whole name.
    Regex(Box<Regex>),
}

/// A PEFT version: the three numbers, and whether something (`.dev0`, `rc1`) follows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version {
    numbers: [u32; 3],
    pre: bool,
}

impl AdapterConfig {
    /// Reads the file `path`.
    ///
    /// Errors: `Io` and `Format` for the file, `Config` for a value out of range, `Unsupported` for a refused setting.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Self::read(&Object::open(path)?)
    }

    /// Reads the object `file`; errors as [`open`](Self::open).
    pub(crate) fn read(file: &Object) -> Result<Self> {
        refuse_unsupported(file)?;
        let mut n_regexes = 0;
        let ranks = patterns(file, "rank_pattern", &mut n_regexes, |key, v| file.as_count(key, v, 1..=MAX_RANK))?;
        let alphas = patterns(file, "alpha_pattern", &mut n_regexes, |key, v| file.as_number(key, v))?;
        Ok(Self {
            rank: file.count("r", 1..=MAX_RANK)?.unwrap_or(8),
            alpha: file.number("lora_alpha")?.unwrap_or(8.0),
            rslora: file.flag("use_rslora")?,
            ranks,
            alphas,
            target_modules: target_modules(file)?,
            target_parameters: file.strings("target_parameters")?,
            peft_version: file.text("peft_version")?.and_then(Version::parse),
            columns: expert_columns(file)?,
            bias: lora_bias(file)?,
            ties_weights: file.flag("ensure_weight_tying")?,
        })
    }

    /// The rank of the module or parameter `name`. Errors: `Config` when a pattern takes too long to match.
    pub(crate) fn rank_of(&self, name: &str) -> Result<usize> {
        Ok(first_match(&self.ranks, name)?.unwrap_or(self.rank))
    }

    /// The factor in front of B·A for the module or parameter `name` of rank `rank`.
    ///
    /// Errors: as [`rank_of`](Self::rank_of), and `Config` when the factor is not finite in f32.
    pub(crate) fn scale_of(&self, name: &str, rank: usize) -> Result<f32> {
        let alpha = first_match(&self.alphas, name)?.unwrap_or(self.alpha);
        let rank = rank as f64;
        let scale = (if self.rslora { alpha / rank.sqrt() } else { alpha / rank }) as f32;
        if !scale.is_finite() {
            let message = format!("`lora_alpha` of `{name}`: expected a scale that is finite in f32, got {scale}");
            return Err(crate::Error::new(ErrorKind::Config, message));
        }
        Ok(scale)
    }

    /// True when the configuration targets the module `name`; the tensors are the truth, this only explains them.
    pub(crate) fn targets_module(&self, name: &str) -> bool {
        match &self.target_modules {
            Targets::All => true,
            Targets::Names(names) => names.iter().any(|n| is_suffix(name, n)),
            // A pattern that takes too long explains nothing.
            Targets::Regex(regex) => regex.is_match(name).unwrap_or(false),
        }
    }

    /// True when the configuration targets the parameter `name` (module and parameter, without `base_layer`).
    pub(crate) fn targets_parameter(&self, name: &str) -> bool {
        self.target_parameters.iter().any(|target| is_suffix(name, target))
    }

    /// The version that saved the adapter, if it says so.
    pub(crate) fn peft_version(&self) -> Option<Version> {
        self.peft_version
    }

    /// Every B of a module has a bias.
    pub(crate) fn has_bias(&self) -> bool {
        self.bias
    }

    /// Embedding and LM head were to share what is trained of either.
    pub(crate) fn ties_weights(&self) -> bool {
        self.ties_weights
    }

    /// The order of B's columns of fused parameters; `None` when the file comes from a tool that has used both orders and
    /// did not note which.
    pub(crate) fn expert_columns(&self) -> Option<ExpertColumns> {
        self.columns
    }
}

impl Version {
    /// Parses `0.19.1`, `0.18.2.dev0@abc` and the like.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut numbers = [0; 3];
        let mut rest = text;
        for (i, number) in numbers.iter_mut().enumerate() {
            if i > 0 {
                rest = rest.strip_prefix('.')?;
            }
            let n_digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            *number = rest[..n_digits].parse().ok()?;
            rest = &rest[n_digits..];
        }
        Some(Self { numbers, pre: !rest.is_empty() })
    }

    /// Whether this is `release` or later; `None` for a development version on the way to it, which may be either.
    pub(crate) fn is_since(self, release: [u32; 3]) -> Option<bool> {
        if self.pre && self.numbers == release { None } else { Some(self.numbers >= release) }
    }
}

/// `name` is `target`, or ends with a dot and `target`.
fn is_suffix(name: &str, target: &str) -> bool {
    name.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn refuse_unsupported(file: &Object) -> Result<()> {
    for key in REFUSED {
        if file.is_set(key) {
            return Err(file.unsupported(format!("`{key}` is not supported")));
        }
    }
    match file.text("peft_type")? {
        None => return Err(file.missing("peft_type")),
        Some("LORA") => {}
        Some(other) => {
            return Err(file.unsupported(format!("`peft_type`: expected `LORA`, got `{}`", shown(other))));
        }
    }
    if let Some(bias) = file.text("bias")?.filter(|bias| *bias != "none") {
        return Err(file.unsupported(format!("`bias`: expected `none`, got `{}`", shown(bias))));
    }
    match file.get("init_lora_weights") {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(init)) if HARMLESS_INIT.contains(&init.to_ascii_lowercase().as_str()) => Ok(()),
        // These change the base model during training, so the factors alone are not the adapter.
        Some(Value::String(init)) => Err(file.unsupported(format!(
            "`init_lora_weights`: `{}` changes the base model; convert the adapter to plain LoRA first",
            shown(init)
        ))),
        Some(other) => Err(file.wrong("init_lora_weights", "true, false or a string", other)),
    }
}

/// Whether B has a bias. PEFT cannot save one for a parameter.
fn lora_bias(file: &Object) -> Result<bool> {
    let bias = file.flag("lora_bias")?;
    if bias && file.is_set("target_parameters") {
        return Err(file.unsupported("`lora_bias` with `target_parameters` is not supported"));
    }
    Ok(bias)
}

fn target_modules(file: &Object) -> Result<Targets> {
    match file.get("target_modules") {
        None => Ok(Targets::All),
        Some(Value::String(text)) if text == "all-linear" => Ok(Targets::All),
        Some(Value::String(text)) => {
            Ok(Targets::Regex(Box::new(regex(file, "target_modules", &format!("^(?:{text})$"))?)))
        }
        Some(_) => Ok(Targets::Names(file.strings("target_modules")?)),
    }
}

/// The markers Unsloth writes, at the top level or within `auto_mapping`.
fn expert_columns(file: &Object) -> Result<Option<ExpertColumns>> {
    let mapping =
        if file.get("auto_mapping").is_some_and(Value::is_object) { file.object("auto_mapping")? } else { None };
    let mut marks = Vec::new();
    for object in [Some(file), mapping.as_ref()].into_iter().flatten() {
        marks.extend(object.text("lora_B_layout")?);
        let details = object.get("unsloth_fused_expert_lora").and_then(|d| d.get("parameters"));
        let details = details.and_then(Value::as_object).into_iter().flat_map(|parameters| parameters.values());
        marks.extend(details.filter_map(|p| p.get("lora_B_layout")?.as_str()));
    }
    let Some((first, others)) = marks.split_first() else {
        let ambiguous = mapping.is_some_and(|m| m.is_set("unsloth_fixed"));
        return Ok((!ambiguous).then_some(ExpertColumns::RankMajor));
    };
    if others.iter().any(|mark| mark != first) {
        return Err(file.unsupported("`lora_B_layout`: different layouts in one adapter are not supported"));
    }
    match *first {
        "rank_major" => Ok(Some(ExpertColumns::RankMajor)),
        "grouped_by_expert" => Ok(Some(ExpertColumns::GroupedByExpert)),
        other => Err(file.unsupported(format!(
            "`lora_B_layout`: expected `rank_major` or `grouped_by_expert`, got `{}`",
            shown(other)
        ))),
    }
}

/// A key of `rank_pattern` or `alpha_pattern`. PEFT matches `(.*\.)?(key)$` from the start of the name.
#[derive(Debug)]
enum Pattern {
    /// Letters, digits, `_`, `-` and dots only: compared directly, because some files list every module.
    Plain(String),
    Regex(Box<Regex>),
}

impl Pattern {
    fn is_match(&self, name: &str) -> Result<bool> {
        match self {
            Self::Plain(key) => {
                let mut name = name.chars().rev();
                // In a regular expression a dot stands for any character.
                let same = key.chars().rev().all(|k| name.next().is_some_and(|c| k == '.' || k == c));
                Ok(same && name.next().is_none_or(|c| c == '.'))
            }
            Self::Regex(regex) => regex.is_match(name).map_err(|e| {
                let message = format!("pattern `{}` on `{name}`: {e}", shown(regex.as_str()));
                crate::Error::new(ErrorKind::Config, message)
            }),
        }
    }
}

fn first_match<T: Copy>(patterns: &[(Pattern, T)], name: &str) -> Result<Option<T>> {
    for (pattern, value) in patterns {
        if pattern.is_match(name)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

fn patterns<T>(
    file: &Object,
    key: &str,
    n_regexes: &mut usize,
    read: impl Fn(&str, &Value) -> Result<T>,
) -> Result<Vec<(Pattern, T)>> {
    let Some(object) = file.object(key)? else {
        return Ok(Vec::new());
    };
    let mut patterns = Vec::new();
    for (text, value) in object.entries() {
        let pattern = if text.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c)) {
            Pattern::Plain(text.clone())
        } else {
            *n_regexes += 1;
            if *n_regexes > MAX_REGEXES {
                let message = format!("`{key}`: expected at most {MAX_REGEXES} regular expressions");
                return Err(file.error(ErrorKind::Config, message));
            }
            Pattern::Regex(Box::new(regex(file, key, &format!(r"^(.*\.)?({text})$"))?))
        };
        patterns.push((pattern, read(&format!("{key}.{text}"), value)?));
    }
    Ok(patterns)
}

fn regex(file: &Object, key: &str, text: &str) -> Result<Regex> {
    RegexBuilder::new(text)
        .backtrack_limit(MAX_BACKTRACKS)
        .build()
        .map_err(|e| file.error(ErrorKind::Config, format!("`{key}`: pattern `{}`: {e}", shown(text))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_patterns_match_as_their_regex_does() {
        let keys = ["q_proj", "layers.0.q_proj", "model.q", ".q_proj", "", "x_proj", "experts.down_proj", "d.wn_proj"];
        let names = ["q_proj", "model.layers.0.q_proj", "model.xq_proj", "a.experts.down_proj", "dawn_proj", ""];
        let mut failures = Vec::new();
        for (key, name) in keys.into_iter().flat_map(|k| names.map(|n| (k, n))) {
            let expected = Regex::new(&format!(r"^(.*\.)?({key})$")).unwrap().is_match(name).unwrap();
            if Pattern::Plain(key.to_owned()).is_match(name).unwrap() != expected {
                failures.push((key, name, expected));
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
    }

    #[test]
    fn development_versions_on_the_way_to_a_release_are_undecided() {
        let cases = [
            ("0.18.1", Some(false)),
            ("0.19.0", Some(false)),
            ("0.19.1", Some(true)),
            ("0.21.2", Some(true)),
            ("1.0.0", Some(true)),
            ("0.18.2.dev0@1a2b", Some(false)),
            ("0.19.1.dev0", None),
            ("0.19.2rc1", Some(true)),
        ];
        let wrong: Vec<_> =
            cases.iter().filter(|(text, since)| Version::parse(text).unwrap().is_since([0, 19, 1]) != *since).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        assert_eq!([Version::parse(""), Version::parse("0.19"), Version::parse("x.1.2")], [None; 3]);
    }
}
