//! Files of requests: JSON lines, every line read and checked before any work starts.

use std::io::Read;
use std::path::Path;

use anyhow::Context;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use wgmoe::text::Message;

use crate::usage;
use crate::values::file;

/// Largest file of requests.
const FILE_CAP: u64 = 1 << 30;

/// What a model is asked to continue.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// Raw text.
    Text(String),
    /// A conversation, for the chat template.
    Messages(Vec<Message>),
    /// Token ids.
    Ids(Vec<u32>),
}

/// One line of `run --prompts`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptLine {
    /// Outer `None`: the key is missing; inner `None`: it is null, which is the base model.
    #[serde(default, deserialize_with = "present")]
    pub adapter: Option<Option<String>>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    ids: Option<Vec<u32>>,
    pub max_tokens: Option<usize>,
}

/// One line of `score --requests`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoreLine {
    pub adapter: Option<String>,
    text: Option<String>,
    ids: Option<Vec<u32>>,
    #[serde(default)]
    pub top_logprobs: usize,
}

impl PromptLine {
    /// The one prompt of the line.
    pub fn prompt(&mut self) -> Result<Prompt, String> {
        match (self.prompt.take(), self.messages.take(), self.ids.take()) {
            (Some(text), None, None) => Ok(Prompt::Text(text)),
            (None, Some(messages), None) => Ok(Prompt::Messages(messages)),
            (None, None, Some(ids)) => Ok(Prompt::Ids(ids)),
            _ => Err("expected exactly one of `prompt`, `messages` and `ids`".into()),
        }
    }
}

impl ScoreLine {
    /// The one text of the line.
    pub fn prompt(&mut self) -> Result<Prompt, String> {
        match (self.text.take(), self.ids.take()) {
            (Some(text), None) => Ok(Prompt::Text(text)),
            (None, Some(ids)) => Ok(Prompt::Ids(ids)),
            _ => Err("expected exactly one of `text` and `ids`".into()),
        }
    }
}

/// A request, and where it stands for error messages: `--prompt`, or a file and line.
pub struct Placed<T> {
    pub place: String,
    pub value: T,
}

/// Reads JSON lines from `path` (`-`: standard input); blank lines are skipped, anything unreadable is a usage error
/// that names the line.
pub fn read_lines<T: DeserializeOwned>(option: &str, path: &Path) -> anyhow::Result<Vec<Placed<T>>> {
    let text = if path == Path::new("-") {
        read_capped(std::io::stdin().lock())
    } else {
        file(option, path, "a file of JSON lines")?;
        std::fs::File::open(path).and_then(read_capped)
    }
    .with_context(|| format!("{option} `{}`", path.display()))?;
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = format!("{option} `{}` line {}", path.display(), index + 1);
        match serde_json::from_str(line) {
            Ok(value) => lines.push(Placed { place, value }),
            Err(error) => {
                // The position that serde_json appends counts from the start of this line.
                let column = error.column();
                let text = error.to_string();
                let reason = text.split(" at line ").next().unwrap_or(&text);
                return Err(usage(format!("{place}: {reason} (column {column})")));
            }
        }
    }
    if lines.is_empty() {
        return Err(usage(format!("{option} `{}`: no requests in it", path.display())));
    }
    Ok(lines)
}

fn read_capped(reader: impl Read) -> std::io::Result<String> {
    let mut text = String::new();
    if reader.take(FILE_CAP + 1).read_to_string(&mut text)? as u64 > FILE_CAP {
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, "larger than 1 GiB"));
    }
    Ok(text)
}

/// Tells a null from a missing key (with `default`).
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<String>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> PromptLine {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_null_adapter_is_not_a_missing_one() {
        assert_eq!(line(r#"{"prompt": "a"}"#).adapter, None);
        assert_eq!(line(r#"{"prompt": "a", "adapter": null}"#).adapter, Some(None));
        assert_eq!(line(r#"{"prompt": "a", "adapter": "x"}"#).adapter, Some(Some("x".into())));
    }

    #[test]
    fn a_line_has_exactly_one_prompt() {
        assert_eq!(line(r#"{"ids": [1]}"#).prompt(), Ok(Prompt::Ids(vec![1])));
        assert!(line(r#"{"max_tokens": 1}"#).prompt().is_err());
        assert!(line(r#"{"prompt": "a", "ids": [1]}"#).prompt().is_err());
        assert!(serde_json::from_str::<PromptLine>(r#"{"promt": "a"}"#).is_err());
        assert!(serde_json::from_str::<PromptLine>(r#"{"ids": [-1]}"#).is_err());
    }
}
