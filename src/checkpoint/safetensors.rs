//! One safetensors file: validated on opening, read by range, every byte handed out counted.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::header::{self, Entry};
use super::source::Source;
use super::untrusted::shown;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};

/// A validated safetensors file.
#[derive(Debug)]
pub struct SafetensorsFile {
    source: Source,
    entries: BTreeMap<String, Entry>,
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
        let source = Source::open(path, bytes_read)?;
        let format = |message: String| Error::new(ErrorKind::Format, format!("`{}`: {message}", path.display()));
        let entries = header::parse(source.map()).map_err(format)?;
        Ok(Self { source, entries })
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        self.source.path()
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
            Err(Error::new(kind, format!("`{}`: tensor `{}`{message}", self.path().display(), shown(name))))
        };
        let Some((name, entry)) = self.entries.get_key_value(name) else {
            return fail(ErrorKind::Tensor, " is missing".to_owned());
        };
        match entry.dtype {
            Ok(dtype) => Ok(TensorView::new(name, dtype, &entry.shape, &self.source, entry.begin..entry.end)),
            Err(got) => fail(ErrorKind::Unsupported, format!(": expected `F32`, `F16`, `BF16` or `I32`, got `{got}`")),
        }
    }

    /// Bytes of tensor data handed out so far.
    pub fn bytes_read(&self) -> u64 {
        self.source.bytes_read()
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
    source: &'a Source,
    begin: usize,
    end: usize,
}

impl<'a> TensorView<'a> {
    /// A view of the bytes `range` of `source`, which are exactly the elements of `shape`.
    pub(super) fn new(
        name: &'a str,
        dtype: DType,
        shape: &'a [usize],
        source: &'a Source,
        Range { start: begin, end }: Range<usize>,
    ) -> Self {
        Self { name, dtype, shape, source, begin, end }
    }

    /// Size of the tensor, in bytes.
    pub fn n_bytes(&self) -> usize {
        self.end - self.begin
    }

    /// Where the bytes `range` of the tensor are in the file.
    ///
    /// Errors: `Tensor` when the range leaves the tensor.
    fn within(&self, range: Range<usize>) -> Result<Range<usize>> {
        if range.start > range.end || range.end > self.n_bytes() {
            let expected = format!("expected a range within {} bytes, got {range:?}", self.n_bytes());
            return Err(Error::new(ErrorKind::Tensor, format!("tensor `{}`: {expected}", shown(self.name))));
        }
        Ok(self.begin + range.start..self.begin + range.end)
    }

    /// The bytes `range` of the tensor (row-major, little-endian, not aligned), counted as read.
    ///
    /// Errors: `Tensor` when the range leaves the tensor.
    pub fn bytes(&self, range: Range<usize>) -> Result<&'a [u8]> {
        let range = self.within(range)?;
        self.source.count(range.len());
        Ok(&self.source.map()[range])
    }

    /// The bytes `range`, which lie within the tensor, not counted: whoever takes many short ones tells
    /// [`count`](Self::count) of all at once.
    pub(crate) fn uncounted(&self, range: Range<usize>) -> &'a [u8] {
        &self.source.map()[self.begin..self.end][range]
    }

    /// Counts bytes as read.
    pub(crate) fn count(&self, n_bytes: usize) {
        self.source.count(n_bytes);
    }

    /// Reads the bytes from `begin` on into `to`, past the map.
    ///
    /// Errors: `Tensor` when that leaves the tensor, `Io` when the file cannot be read.
    pub(crate) fn read(&self, begin: usize, to: &mut [u8]) -> Result<()> {
        let range = self.within(begin..begin.saturating_add(to.len()))?;
        self.source.read(range, to).map_err(|e| e.within(format!("tensor `{}`", shown(self.name))))
    }

    /// All bytes of the tensor, counted as read.
    pub fn all(&self) -> &'a [u8] {
        self.source.count(self.n_bytes());
        &self.source.map()[self.begin..self.end]
    }

    /// Every element as f32 (all bytes counted as read).
    pub fn to_f32(&self) -> Vec<f32> {
        self.dtype.decode(self.all())
    }
}
