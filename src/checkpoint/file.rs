//! A file of tensors in either format, behind one access.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::safetensors::{SafetensorsFile, TensorHeader, TensorView};
use super::torch::TorchFile;
use crate::error::Result;

/// Endings of files that `torch.save` writes.
const TORCH: [&str; 3] = ["bin", "pt", "pth"];

/// One file of tensors.
#[derive(Debug)]
pub(crate) enum WeightFile {
    /// safetensors.
    Safetensors(SafetensorsFile),
    /// `torch.save`.
    Torch(TorchFile),
}

impl WeightFile {
    /// Opens `path`, whose ending tells the format; bytes handed out are added to `bytes_read`.
    ///
    /// Errors: those of [`SafetensorsFile::open`] and [`TorchFile::open`].
    pub(crate) fn open(path: &Path, bytes_read: Arc<AtomicU64>) -> Result<Self> {
        let torch = path.extension().and_then(|e| e.to_str()).is_some_and(|e| TORCH.contains(&e));
        Ok(if torch {
            Self::Torch(TorchFile::open_counted(path, bytes_read)?)
        } else {
            Self::Safetensors(SafetensorsFile::open_counted(path, bytes_read)?)
        })
    }

    /// The path it was opened with.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Safetensors(file) => file.path(),
            Self::Torch(file) => file.path(),
        }
    }

    /// The names of its tensors, sorted.
    pub(crate) fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match self {
            Self::Safetensors(file) => Box::new(file.names()),
            Self::Torch(file) => Box::new(file.names()),
        }
    }

    /// What the file says about each tensor, sorted by name.
    pub(crate) fn headers(&self) -> Box<dyn Iterator<Item = TensorHeader<'_>> + '_> {
        match self {
            Self::Safetensors(file) => Box::new(file.headers()),
            Self::Torch(file) => Box::new(file.headers()),
        }
    }

    /// The tensor `name`; errors as those of the two formats.
    pub(crate) fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        match self {
            Self::Safetensors(file) => file.tensor(name),
            Self::Torch(file) => file.tensor(name),
        }
    }

    /// Bytes of tensor data handed out so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        match self {
            Self::Safetensors(file) => file.bytes_read(),
            Self::Torch(file) => file.bytes_read(),
        }
    }
}
