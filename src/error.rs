//! One error type for the crate: a kind to match on, and a message that names the file, tensor or option.

use std::path::Path;

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One way to fail. Match on this; print the [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file or folder could not be read.
    Io,
    /// A file is not what its format says: truncated, overlapping ranges, bad header.
    Format,
    /// A tensor is missing, superfluous, or has the wrong shape or type.
    Tensor,
    /// A value in a JSON configuration is missing or out of range.
    Config,
    /// Well-formed, but not implemented; refused rather than computed wrongly.
    Unsupported,
    /// An adapter does not fit the model, or is not loaded.
    Adapter,
    /// A size exceeds a limit of the device or of the engine.
    Limit,
    /// No device, a device without a needed feature, or a device that was lost.
    Device,
    /// The device has no memory left.
    OutOfMemory,
    /// A request is malformed: empty prompt, token id outside the vocabulary, too long.
    Request,
    /// Tokenizer or chat template.
    Text,
    /// Ended because the caller asked for it.
    Cancelled,
    /// Another rank failed, or ranks do not agree.
    Rank,
}

/// A failure: its [`ErrorKind`] and a message that names the file, tensor or option and what was expected.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{context}")]
pub struct Error {
    kind: ErrorKind,
    context: String,
}

impl Error {
    /// An error of `kind`; `context` is lower case, without a full stop, names in backticks.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into() }
    }

    /// An input/output error on `path`.
    pub fn io(path: &Path, error: &std::io::Error) -> Self {
        Self::new(ErrorKind::Io, format!("`{}`: {error}", path.display()))
    }

    /// The kind, for callers that match.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The same error with `prefix: ` in front of its message.
    pub fn within(self, prefix: impl std::fmt::Display) -> Self {
        Self { kind: self.kind, context: format!("{prefix}: {}", self.context) }
    }
}
