//! How often each expert was chosen: what a run records and a placement is made from.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::Value;

use crate::checkpoint::untrusted::Object;
use crate::error::Result;

/// Most experts, layers and tokens that a file may speak of; sums of its counts fit 64 bits.
const MAX_EXPERTS: usize = 1 << 12;
const MAX_LAYERS: usize = 1 << 10;
const MAX_TOKENS: usize = 1 << 40;

/// Choices of the router, counted.
///
/// As a file it is one JSON object with these fields as keys:
/// `{"model_type": "qwen3_moe", "experts": 8, "top_k": 2, "tokens": 31, "layers": [[5, 9, ...], [], ...]}`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RoutingCounts {
    /// `model_type` of the model's `config.json`.
    pub model_type: String,
    /// E.
    pub experts: usize,
    /// A.
    pub top_k: usize,
    /// Rows that went through the layers: tokens of prompts and answers.
    pub tokens: u64,
    /// By decoder layer: how many tokens chose each expert, `[E]`; empty for a layer without experts. A row sums to
    /// `tokens` · A, less where the router had too few finite logits.
    pub layers: Vec<Vec<u64>>,
}

impl RoutingCounts {
    /// Reads a file.
    ///
    /// Errors: `Io` when it cannot be read, `Format` when it is no JSON object, `Config` when a key is missing, a count is
    /// larger than the number of tokens, or a layer has counts of another number of experts.
    pub fn from_json(path: &Path) -> Result<Self> {
        let file = Object::open(path)?;
        let model_type = file.text("model_type")?.ok_or_else(|| file.missing("model_type"))?.to_owned();
        let experts = file.need_count("experts", 1..=MAX_EXPERTS)?;
        let top_k = file.need_count("top_k", 1..=experts)?;
        let tokens = file.need_count("tokens", 0..=MAX_TOKENS)?;
        let key = "layers";
        let value = file.get(key).ok_or_else(|| file.missing(key))?;
        let list = value.as_array().filter(|list| list.len() <= MAX_LAYERS);
        let list = list.ok_or_else(|| file.wrong(key, &format!("a list of at most {MAX_LAYERS} layers"), value))?;
        let layer = |(layer, value): (usize, &Value)| {
            let key = format!("{key}[{layer}]");
            let row = value.as_array().filter(|row| row.is_empty() || row.len() == experts);
            let row = row.ok_or_else(|| file.wrong(&key, &format!("{experts} counts, or none"), value))?;
            row.iter().map(|n| Ok(file.as_count(&key, n, 0..=tokens)? as u64)).collect()
        };
        let layers = list.iter().enumerate().map(layer).collect::<Result<Vec<Vec<u64>>>>()?;
        if layers.iter().all(Vec::is_empty) {
            return Err(file.wrong(key, "a layer with experts", value));
        }
        Ok(Self { model_type, experts, top_k, tokens: tokens as u64, layers })
    }

    /// The text of a file, a layer a line.
    pub fn to_json(&self) -> String {
        let mut text = format!(
            "{{\n  \"model_type\": {},\n  \"experts\": {},\n  \"top_k\": {},\n  \"tokens\": {},\n  \"layers\": [\n",
            Value::from(self.model_type.as_str()),
            self.experts,
            self.top_k,
            self.tokens
        );
        for (i, layer) in self.layers.iter().enumerate() {
            let end = if i + 1 < self.layers.len() { "," } else { "" };
            // Writing to a string does not fail.
            let _ = writeln!(text, "    {layer:?}{end}");
        }
        text.push_str("  ]\n}\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn read(text: &str) -> Result<RoutingCounts> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.json");
        std::fs::write(&path, text).unwrap();
        RoutingCounts::from_json(&path)
    }

    #[test]
    fn counts_survive_the_way_through_a_file() {
        let counts = RoutingCounts {
            model_type: "qwen3_moe".to_owned(),
            experts: 3,
            top_k: 2,
            tokens: 7_000_000_000,
            layers: vec![vec![7_000_000_000, 6_999_999_999, 1], vec![], vec![0, 0, 0]],
        };
        assert_eq!(read(&counts.to_json()).unwrap(), counts);
    }

    #[test]
    fn broken_files_say_where() {
        let file = |layers: &str| {
            format!(r#"{{"model_type": "x", "experts": 2, "top_k": 1, "tokens": 9, "layers": {layers}}}"#)
        };
        let cases = [
            ("[", ErrorKind::Format, "expected a JSON object"),
            ("{}", ErrorKind::Config, "`model_type` is missing"),
            (r#"{"model_type": "x", "experts": 0}"#, ErrorKind::Config, "`experts`: expected an integer from 1"),
            (r#"{"model_type": "x", "experts": 2, "top_k": 3}"#, ErrorKind::Config, "`top_k`: expected"),
            (&file("3"), ErrorKind::Config, "`layers`: expected a list"),
            (&file("[]"), ErrorKind::Config, "`layers`: expected a layer with experts"),
            (&file("[[1, 2], [1]]"), ErrorKind::Config, "`layers[1]`: expected 2 counts"),
            (&file("[[1, 10]]"), ErrorKind::Config, "`layers[0]`: expected an integer from 0 to 9, got 10"),
            (&file("[[1, -1]]"), ErrorKind::Config, "got -1"),
        ];
        let mut failures = Vec::new();
        for (text, kind, part) in cases {
            match read(text) {
                Err(e) if e.kind() == kind && e.to_string().contains(part) && e.to_string().contains("trace.json") => {}
                other => failures.push((text.to_owned(), other.map_err(|e| e.to_string()))),
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
        assert_eq!(RoutingCounts::from_json(Path::new("/nonexistent")).unwrap_err().kind(), ErrorKind::Io);
    }
}
