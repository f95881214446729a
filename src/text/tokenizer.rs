//! `tokenizer.json` of a model folder: text to token ids and back.

use std::path::{Path, PathBuf};

use super::read_text;
use crate::{Error, ErrorKind, Result};

/// Largest `tokenizer.json` that is read; the largest in use have about 35 MB.
const TOKENIZER_CAP: u64 = 128 << 20;

/// The tokenizer of a model folder.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
}

impl Tokenizer {
    /// Opens `tokenizer.json` in `dir`; `None` where the folder has none.
    ///
    /// Truncation and padding saved in the file are switched off: they describe how somebody trained, not what a
    /// prompt is.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] or [`ErrorKind::Format`] where the file cannot be read, [`ErrorKind::Text`] where it is
    /// not a tokenizer.
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("tokenizer.json");
        let Some(text) = read_text(&path, TOKENIZER_CAP)? else {
            return Ok(None);
        };
        let failed = |error| Error::new(ErrorKind::Text, format!("`{}`: {error}", path.display()));
        let mut inner: tokenizers::Tokenizer = text.parse().map_err(failed)?;
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        Ok(Some(Self { inner, path }))
    }

    /// Token ids of raw text, with the special tokens that the tokenizer's post-processor adds (often none).
    ///
    /// # Errors
    /// [`ErrorKind::Text`] where the text cannot be expressed in the vocabulary.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    /// Token ids of text that a [`ChatTemplate`](super::ChatTemplate) rendered: special tokens stand in it already,
    /// so none are added.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, false)
    }

    /// Text of `ids`. Special tokens are shown, nothing is skipped: the caller leaves out the stop token.
    ///
    /// # Errors
    /// [`ErrorKind::Text`] where the decoder refuses.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(|error| self.failed(&error))
    }

    /// A decoder that takes one id at a time and gives text as soon as whole characters are known.
    pub fn stream(&self) -> TokenStream<'_> {
        TokenStream { tokenizer: self, ids: Vec::new(), settled: 0 }
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, special).map_err(|error| self.failed(&error))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn failed(&self, error: &tokenizers::Error) -> Error {
        Error::new(ErrorKind::Text, format!("`{}`: {error}", self.path.display()))
    }
}

/// Incremental decoding of one answer.
///
/// A character may be spread over several tokens, and some decoders look at the token before (to drop or keep a
/// space), so a short tail of ids is decoded again at each step and only what is new is given out.
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tail that is decoded again: ids whose text was given out (the first `settled`), then ids that wait.
    ids: Vec<u32>,
    settled: usize,
}

impl TokenStream<'_> {
    /// Takes the next id and returns the text that became certain; `None` while a character is incomplete.
    pub fn push(&mut self, id: u32) -> Option<String> {
        self.ids.push(id);
        self.advance(false)
    }

    /// The text still held back at the end of an answer, with U+FFFD for bytes that never became a character.
    pub fn finish(mut self) -> Option<String> {
        self.advance(true)
    }

    fn advance(&mut self, last: bool) -> Option<String> {
        let before = self.tokenizer.decode(&self.ids[..self.settled]).ok()?;
        let after = self.tokenizer.decode(&self.ids).ok()?;
        if !last && after.ends_with('\u{fffd}') {
            return None;
        }
        let fresh = after.strip_prefix(before.as_str())?.to_owned();
        self.ids.drain(..self.settled);
        self.settled = self.ids.len();
        (!fresh.is_empty()).then_some(fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte-level tokenizer with one token a byte and no merges: id = position in the byte alphabet.
    fn byte_level() -> (tempfile::TempDir, Tokenizer) {
        let mut symbols: Vec<char> = Vec::new();
        let mut extra = 256;
        for byte in 0..256u32 {
            let shown = matches!(byte, 33..=126 | 161..=172 | 174..=255);
            symbols.push(char::from_u32(if shown { byte } else { extra }).unwrap());
            extra += u32::from(!shown);
        }
        let vocab: serde_json::Map<_, _> =
            symbols.iter().enumerate().map(|(id, symbol)| (symbol.to_string(), id.into())).collect();
        let level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let file = serde_json::json!({
            "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
            "padding": null, "normalizer": null, "post_processor": null, "pre_tokenizer": level, "decoder": level,
            "added_tokens": [{"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []}
        });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        let tokenizer = Tokenizer::open(dir.path()).unwrap().unwrap();
        (dir, tokenizer)
    }

    #[test]
    fn text_survives_encoding_and_saved_truncation_is_ignored() {
        let (_dir, tokenizer) = byte_level();
        let ids = tokenizer.encode("naïve ☃\n").unwrap();
        assert_eq!(ids, "naïve ☃\n".bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&ids).unwrap(), "naïve ☃\n");
    }

    #[test]
    fn special_tokens_are_encoded_and_shown() {
        let (_dir, tokenizer) = byte_level();
        assert_eq!(tokenizer.encode_rendered("a<|end|>").unwrap(), [97, 256]);
        assert_eq!(tokenizer.decode(&[97, 256]).unwrap(), "a<|end|>");
    }

    #[test]
    fn stream_gives_whole_characters_and_adds_up_to_the_text() {
        let (_dir, tokenizer) = byte_level();
        let text = "a ☃ b\u{1f600}\n";
        let mut stream = tokenizer.stream();
        let parts: Vec<_> = text.bytes().map(|byte| stream.push(byte.into())).collect();
        assert_eq!(parts.iter().flatten().map(String::as_str).collect::<String>(), text);
        assert_eq!(parts[2..5], [None, None, Some("☃".to_owned())]);
        assert_eq!(stream.finish(), None);
    }

    #[test]
    fn stream_gives_an_unfinished_character_at_the_end() {
        let (_dir, tokenizer) = byte_level();
        let mut stream = tokenizer.stream();
        assert_eq!(stream.push(0xe2), None);
        assert_eq!(stream.finish().as_deref(), Some("\u{fffd}"));
    }

    #[test]
    fn folder_without_tokenizer_is_none_and_a_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Tokenizer::open(dir.path()).unwrap().is_none());
        std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        let error = Tokenizer::open(dir.path()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Text);
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }
}
