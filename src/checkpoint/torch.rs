//! One file of `torch.save`, mapped into memory: a zip archive with one pickle and one stored entry a storage.
//!
//! Layout: `torch/csrc/jit/serialization` and `torch/serialization.py` (zip format, since torch 1.6). On opening, the
//! archive's directory and the pickle are read and every tensor is checked against its storage; the storages themselves
//! are touched only where a tensor is asked for. Nothing in the file is executed. Checksums are not verified, for that
//! would read everything.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rawzip::{CompressionMethod, ZipArchive};

use super::pickle::{Id, Pickle, Refusal, Tensor};
use super::safetensors::{TensorHeader, TensorView};
use super::source::Source;
use super::untrusted::shown;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};

/// Largest pickle in an archive, in bytes.
const MAX_PICKLE_BYTES: usize = 64 << 20;
/// How the older format begins: a pickled number, protocol 2.
const LEGACY: &[u8] = &[0x80, 2];

/// A validated file of `torch.save` (`pytorch_model.bin`, `adapter_model.bin`, `.pt`).
#[derive(Debug)]
pub struct TorchFile {
    source: Source,
    entries: BTreeMap<String, Entry>,
}

/// One tensor of a file.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The storage type and place in the file, or why the tensor cannot be read.
    pub(crate) data: Result<(DType, Range<usize>), String>,
    /// Sizes, slowest dimension first.
    pub(crate) shape: Vec<usize>,
}

impl TorchFile {
    /// Maps the file `path`, reads its pickle and checks every tensor in it.
    ///
    /// The pickle must be a dictionary of tensors, or hold one under `state_dict`.
    ///
    /// Errors: `Io` when it cannot be read or is no regular file; `Format` for a broken archive or pickle and for a tensor
    /// that leaves its storage; `Unsupported` for the format before torch 1.6, compressed entries, big-endian data, and a
    /// pickle with anything but tensors in plain containers.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_counted(path, Arc::default())
    }

    /// [`open`](Self::open) with a counter that several files share.
    pub(crate) fn open_counted(path: &Path, bytes_read: Arc<AtomicU64>) -> Result<Self> {
        let source = Source::open(path, bytes_read)?;
        let entries = parse(source.map())
            .map_err(|(kind, message)| Error::new(kind, format!("`{}`: {message}", path.display())))?;
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

    /// Name, type, shape and size of every tensor, sorted by name; a tensor that cannot be read has the type `unread` and no
    /// bytes.
    pub fn headers(&self) -> impl ExactSizeIterator<Item = TensorHeader<'_>> {
        self.entries.iter().map(|(name, entry)| {
            let (dtype, n_bytes) =
                entry.data.as_ref().map_or(("unread", 0), |(dtype, range)| (dtype.name(), range.len() as u64));
            TensorHeader { name, dtype, shape: &entry.shape, n_bytes }
        })
    }

    /// The tensor `name`.
    ///
    /// Errors: `Tensor` when there is none; `Unsupported` when its type is not read here or it is not contiguous.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let fail = |kind, message: &str| {
            Err(Error::new(kind, format!("`{}`: tensor `{}`{message}", self.path().display(), shown(name))))
        };
        let Some((name, entry)) = self.entries.get_key_value(name) else {
            return fail(ErrorKind::Tensor, " is missing");
        };
        match &entry.data {
            Ok((dtype, range)) => Ok(TensorView::new(name, *dtype, &entry.shape, &self.source, range.clone())),
            Err(reason) => fail(ErrorKind::Unsupported, &format!(": {reason}")),
        }
    }

    /// Bytes of tensor data handed out so far.
    pub fn bytes_read(&self) -> u64 {
        self.source.bytes_read()
    }
}

/// The tensors of the file `bytes`, by name; ranges lie within `bytes`.
pub(crate) fn parse(bytes: &[u8]) -> Result<BTreeMap<String, Entry>, Refusal> {
    if bytes.starts_with(LEGACY) {
        let message = "the format of torch before 1.6 is not read; load and save it with a newer torch, or convert it to \
                       safetensors";
        return Err((ErrorKind::Unsupported, message.to_owned()));
    }
    let archive = Archive::read(bytes)?;
    let pickle = Pickle::read(archive.pickle)?;
    let mut entries = BTreeMap::new();
    for (name, id) in state_dict(&pickle)? {
        let at = |(kind, message): Refusal| (kind, format!("tensor `{}`: {message}", shown(name)));
        let Some(tensor) = pickle.tensor(id) else {
            return Err(at((ErrorKind::Unsupported, "expected a tensor".to_owned())));
        };
        let entry = archive.locate(tensor).map_err(at)?;
        if entries.insert(name.to_owned(), entry).is_some() {
            return Err(at((ErrorKind::Format, "occurs twice".to_owned())));
        }
    }
    Ok(entries)
}

/// Names and objects of the dictionary of tensors.
fn state_dict<'a>(pickle: &Pickle<'a>) -> Result<Vec<(&'a str, Id)>, Refusal> {
    let broken = |message: &str| (ErrorKind::Unsupported, format!("pickle: {message}"));
    let root = pickle.dict(pickle.root()).ok_or_else(|| broken("expected a dictionary of tensors"))?;
    let nested = root.iter().find(|(key, _)| pickle.text(*key) == Some("state_dict"));
    let entries = nested.and_then(|(_, inner)| pickle.dict(*inner)).unwrap_or(root);
    let named = entries.iter().map(|(key, value)| {
        let key = pickle.text(*key).ok_or_else(|| broken("expected strings as keys"))?;
        Ok((key, *value))
    });
    named.collect()
}

/// The directory of a zip archive.
struct Archive<'a> {
    pickle: &'a [u8],
    /// Where the storages lie in the file, by key.
    storages: BTreeMap<String, Range<usize>>,
}

impl<'a> Archive<'a> {
    /// Reads the directory; every entry must be stored as it is, within the file, once.
    fn read(bytes: &'a [u8]) -> Result<Self, Refusal> {
        let broken = |message: String| (ErrorKind::Format, message);
        let zip = |e: rawzip::Error| broken(format!("zip archive: {e}"));
        let archive = ZipArchive::from_slice(bytes).map_err(zip)?;
        let mut found = BTreeMap::new();
        let mut directory = archive.entries();
        while let Some(header) = directory.next_entry().map_err(zip)? {
            let path = header.file_path();
            let name = std::str::from_utf8(path.as_bytes()).map_err(|e| broken(format!("entry name: {e}")))?;
            let at = |message: &str| format!("entry `{}`: {message}", shown(name));
            let leads_out = |part: &str| part.is_empty() || part == "." || part == "..";
            if name.contains(['\\', '\0', ':']) || name.split('/').any(leads_out) {
                return Err(broken(at("expected a relative path without `..`")));
            }
            if header.compression_method() != CompressionMethod::STORE || header.flags().is_encrypted() {
                let hint = "compressed or encrypted; save it with `torch.save`, which stores plainly";
                return Err((ErrorKind::Unsupported, at(hint)));
            }
            let entry = archive.get_entry(header.wayfinder()).map_err(|e| broken(at(&e.to_string())))?;
            let (begin, end) = entry.compressed_data_range();
            let range = usize::try_from(begin).ok().zip(usize::try_from(end).ok()).map(|(b, e)| b..e);
            let range = range.filter(|r| bytes.get(r.clone()).is_some());
            let range = range.ok_or_else(|| broken(at("leaves the file")))?;
            if range.len() as u64 != header.uncompressed_size_hint() {
                return Err(broken(at("expected equal sizes of stored and original data")));
            }
            if found.insert(name.to_owned(), range).is_some() {
                return Err(broken(at("occurs twice")));
            }
        }
        Self::check_disjoint(&found)?;
        Self::of_entries(bytes, &found)
    }

    fn check_disjoint(entries: &BTreeMap<String, Range<usize>>) -> Result<(), Refusal> {
        let mut ranges: Vec<_> = entries.iter().filter(|(_, r)| !r.is_empty()).collect();
        ranges.sort_by_key(|(_, r)| r.start);
        match ranges.windows(2).find(|w| w[0].1.end > w[1].1.start) {
            Some(w) => Err((ErrorKind::Format, format!("entry `{}` overlaps the entry before it", shown(w[1].0)))),
            None => Ok(()),
        }
    }

    /// Picks the pickle and the storages, which lie in one folder.
    fn of_entries(bytes: &'a [u8], entries: &BTreeMap<String, Range<usize>>) -> Result<Self, Refusal> {
        let broken = |message: String| (ErrorKind::Format, message);
        let mut pickles = entries.iter().filter_map(|(name, range)| {
            let folder = name.strip_suffix("data.pkl")?;
            (folder.is_empty() || folder.ends_with('/')).then_some((folder, range))
        });
        let (folder, pickle) = match (pickles.next(), pickles.next()) {
            (Some(one), None) => one,
            (None, _) => return Err(broken("expected an entry `data.pkl`, got none".to_owned())),
            _ => return Err(broken("expected one entry `data.pkl`, got several".to_owned())),
        };
        if pickle.len() > MAX_PICKLE_BYTES {
            return Err(broken(format!("pickle: expected at most {MAX_PICKLE_BYTES} bytes, got {}", pickle.len())));
        }
        // Files before torch 2.1 have no mark; they come from little-endian machines.
        if let Some(order) = entries.get(&format!("{folder}byteorder"))
            && bytes[order.clone()] != *b"little"
        {
            return Err((ErrorKind::Unsupported, "`byteorder`: expected `little`".to_owned()));
        }
        let data = format!("{folder}data/");
        let storages = entries.iter().filter_map(|(name, r)| Some((name.strip_prefix(&data)?.to_owned(), r.clone())));
        Ok(Self { pickle: &bytes[pickle.clone()], storages: storages.collect() })
    }

    /// Where a tensor lies in the file.
    fn locate(&self, tensor: &Tensor<'_>) -> Result<Entry, Refusal> {
        let broken = |message: String| (ErrorKind::Format, message);
        let overflow = || broken("shape, strides or offset overflow".to_owned());
        let storage = self.storages.get(tensor.key);
        let storage =
            storage.ok_or_else(|| broken(format!("storage `{}` is not in the archive", shown(tensor.key))))?;
        let size = tensor.kind.size as u64;
        let n_bytes = tensor.n_stored.checked_mul(size).ok_or_else(overflow)?;
        if n_bytes != storage.len() as u64 {
            let key = shown(tensor.key);
            return Err(broken(format!("storage `{key}`: expected {n_bytes} bytes, got {}", storage.len())));
        }
        let shape = tensor.shape.iter().map(|n| usize::try_from(*n)).collect::<Result<Vec<_>, _>>();
        let shape = shape.map_err(|_| overflow())?;
        let dims = || tensor.shape.iter().zip(&tensor.strides);
        let n_elements = tensor.shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size)).ok_or_else(overflow)?;
        // One past the last element, for any strides.
        let end = if n_elements == 0 {
            tensor.offset
        } else {
            let last = dims().try_fold(tensor.offset, |at, (n, stride)| at.checked_add((n - 1).checked_mul(*stride)?));
            last.and_then(|at| at.checked_add(1)).ok_or_else(overflow)?
        };
        if end > tensor.n_stored {
            let (offset, n) = (tensor.offset, tensor.n_stored);
            return Err(broken(format!(
                "{:?} with strides {:?} at {offset} leaves its storage of {n} elements",
                tensor.shape, tensor.strides
            )));
        }
        let mut dense = 1;
        let contiguous = n_elements == 0
            || dims().rev().all(|(n, stride)| {
                let row_major = *n == 1 || *stride == dense;
                // Within the number of elements, which fits.
                dense *= n;
                row_major
            });
        let data = match tensor.kind.dtype {
            Err(got) => Err(format!("expected float, half, bfloat16 or int, got {got}")),
            Ok(_) if !contiguous => Err(format!(
                "expected a contiguous tensor, got {:?} with strides {:?}; call `.contiguous()` before saving",
                tensor.shape, tensor.strides
            )),
            // Both bounds lie within the storage, whose size fits.
            Ok(dtype) => {
                let begin = storage.start + (tensor.offset * size) as usize;
                Ok((dtype, begin..begin + (n_elements * size) as usize))
            }
        };
        Ok(Entry { data, shape })
    }
}
