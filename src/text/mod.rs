//! Text on both sides of the model: the tokenizer of a model folder, and its chat template.
//!
//! Neither is needed to run a model: a folder without `tokenizer.json` works with token ids.

mod chat_template;
mod tokenizer;

pub use chat_template::{ChatTemplate, Message};
pub use tokenizer::{TokenStream, Tokenizer};

use std::path::Path;

use crate::{Error, ErrorKind, Result};

/// Reads a UTF-8 file of at most `cap` bytes; `None` where it does not exist.
fn read_text(path: &Path, cap: u64) -> Result<Option<String>> {
    let bytes = match std::fs::metadata(path) {
        Ok(meta) if meta.len() > cap => {
            return Err(Error::new(
                ErrorKind::Format,
                format!("`{}`: expected at most {cap} bytes, got {}", path.display(), meta.len()),
            ));
        }
        Ok(_) => std::fs::read(path).map_err(|error| Error::io(path, &error))?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(path, &error)),
    };
    String::from_utf8(bytes)
        .map(Some)
        .map_err(|_| Error::new(ErrorKind::Format, format!("`{}`: not valid UTF-8", path.display())))
}
