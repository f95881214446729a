//! One safetensors file, mapped into memory: validated on opening, read by range, every byte handed out counted.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::Mmap;

use super::header::{self, Entry};
use super::untrusted::shown;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};

/// Maps the regular file `path`, which nobody may change while it is mapped.
///
/// Errors: `Io` when it cannot be read or is no regular file; `Format` when it is too short to be anything.
pub(super) fn map_file(path: &Path) -> Result<Mmap> {
    let io = |e: std::io::Error| Error::io(path, &e);
    // Before opening, because opening a pipe blocks.
    let meta = std::fs::metadata(path).map_err(io)?;
    if !meta.is_file() {
        return Err(Error::new(ErrorKind::Io, format!("`{}`: expected a regular file", path.display())));
    }
    if meta.len() < 10 {
        // An empty file cannot be mapped.
        let message = format!("`{}`: truncated: expected at least 10 bytes, got {}", path.display(), meta.len());
        return Err(Error::new(ErrorKind::Format, message));
    }
    let file = std::fs::File::open(path).map_err(io)?;
    // SAFETY: the map is read-only and only ever seen as `&[u8]`. It is sound as long as nobody changes or truncates
    // the file while it is mapped; the documentation of `Checkpoint::open` and `Adapter::open` asks for that.
    unsafe { Mmap::map(&file) }.map_err(io)
}

/// A validated safetensors file.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    map: Mmap,
    entries: BTreeMap<String, Entry>,
    bytes_read: Arc<AtomicU64>,
}

impl SafetensorsFile {
    /// Maps the file `path` and checks its header.
    ///
    /// Errors: `Io` when it cannot be read or is no regular file; `Format` when the header does not describe the file
    /// exactly (lengths, UTF-8, duplicate keys, types, shapes, ranges, gaps, trailing bytes).
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_counted(path, Arc::default())
    }

    /// [`open`](Self::open) with a counter that several files share.
    pub(crate) fn open_counted(path: &Path, bytes_read: Arc<AtomicU64>) -> Result<Self> {
        let map = map_file(path)?;
        let format = |message: String| Error::new(ErrorKind::Format, format!("`{}`: {message}", path.display()));
        let entries = header::parse(&map).map_err(format)?;
        Ok(Self { path: path.to_owned(), map, entries, bytes_read })
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of its tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Name, type, shape and size of every tensor, sorted by name, whether its type is read here or not.
    pub fn headers(&self) -> impl ExactSizeIterator<Item = TensorHeader<'_>> {
        self.entries.iter().map(|(name, entry)| TensorHeader {
            name,
            dtype: entry.dtype.map_or_else(|other| other, DType::name),
            shape: &entry.shape,
            n_bytes: (entry.end - entry.begin) as u64,
        })
    }

    /// The tensor `name`.
    ///
    /// Errors: `Tensor` when there is none; `Unsupported` when its type is one of the format's that is not read here.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let fail = |kind, message: String| {
            Err(Error::new(kind, format!("`{}`: tensor `{}`{message}", self.path.display(), shown(name))))
        };
        let Some((name, entry)) = self.entries.get_key_value(name) else {
            return fail(ErrorKind::Tensor, " is missing".to_owned());
        };
        match entry.dtype {
            Ok(dtype) => {
                Ok(TensorView::new(name, dtype, &entry.shape, &self.map[entry.begin..entry.end], &self.bytes_read))
            }
            Err(got) => fail(ErrorKind::Unsupported, format!(": expected `F32`, `F16`, `BF16` or `I32`, got `{got}`")),
        }
    }

    /// Bytes of tensor data handed out so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }
}

/// What a file says about one tensor, apart from its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorHeader<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// Its storage type: one of ours by [`DType::name`], another by the format's name.
    pub dtype: &'a str,
    /// Sizes, slowest dimension first.
    pub shape: &'a [usize],
    /// Size of its data in bytes.
    pub n_bytes: u64,
}

/// One tensor in a mapped file. Making it reads no data.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// How its elements are stored.
    pub dtype: DType,
    /// Sizes, slowest dimension first.
    pub shape: &'a [usize],
    data: &'a [u8],
    bytes_read: &'a AtomicU64,
}

impl<'a> TensorView<'a> {
    /// A view of `data`, which holds exactly the elements of `shape`.
    pub(super) fn new(
        name: &'a str,
        dtype: DType,
        shape: &'a [usize],
        data: &'a [u8],
        bytes_read: &'a AtomicU64,
    ) -> Self {
        Self { name, dtype, shape, data, bytes_read }
    }

    /// Size of the tensor, in bytes.
    pub fn n_bytes(&self) -> usize {
        self.data.len()
    }

    /// The bytes `range` of the tensor (row-major, little-endian, not aligned), counted as read.
    ///
    /// Errors: `Tensor` when the range leaves the tensor.
    pub fn bytes(&self, range: Range<usize>) -> Result<&'a [u8]> {
        let Some(bytes) = self.data.get(range.clone()) else {
            return Err(Error::new(
                ErrorKind::Tensor,
                format!(
                    "tensor `{}`: expected a range within {} bytes, got {range:?}",
                    shown(self.name),
                    self.data.len()
                ),
            ));
        };
        self.bytes_read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    /// All bytes of the tensor, counted as read.
    pub fn all(&self) -> &'a [u8] {
        self.bytes_read.fetch_add(self.data.len() as u64, Ordering::Relaxed);
        self.data
    }

    /// Every element as f32 (all bytes counted as read).
    pub fn to_f32(&self) -> Vec<f32> {
        self.dtype.decode(self.all())
    }
}
