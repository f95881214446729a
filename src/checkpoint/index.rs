//! Which files of a folder make up one checkpoint: one file, shards with an index, or every `*.safetensors`; files of
//! `torch.save` where there is no other.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;

use super::file::WeightFile;
use super::safetensors::{TensorHeader, TensorView};
use super::untrusted::{UniqueMap, read_capped, shown};
use crate::error::{Error, ErrorKind, Result};

/// Name of the file of an unsharded checkpoint.
const SINGLE: &str = "model.safetensors";
/// Name of the index of a sharded checkpoint.
const INDEX: &str = "model.safetensors.index.json";
/// The same of `torch.save`.
const TORCH_SINGLE: &str = "pytorch_model.bin";
/// The same of `torch.save`.
const TORCH_INDEX: &str = "pytorch_model.bin.index.json";
/// Largest index, in bytes: a million tensors with long names.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// The files of one checkpoint; every tensor name occurs in exactly one of them.
#[derive(Debug)]
pub struct Shards {
    files: Vec<WeightFile>,
    by_name: BTreeMap<String, usize>,
    bytes_read: Arc<AtomicU64>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

impl Shards {
    /// Opens the weights of the folder `dir`: `model.safetensors`, else the shards that `model.safetensors.index.json`
    /// names, else all `*.safetensors`, else `pytorch_model.bin` or the shards of `pytorch_model.bin.index.json`.
    ///
    /// Errors: `Io` when there are none or one cannot be read; `Format` for a broken file or index, an index that names a
    /// file outside the folder, a tensor in two files, and a tensor that index and file do not agree on.
    pub fn open(dir: &Path) -> Result<Self> {
        let bytes_read = Arc::<AtomicU64>::default();
        let (paths, index) = sources(dir)?;
        let files = paths.iter().map(|p| WeightFile::open(p, bytes_read.clone())).collect::<Result<Vec<_>>>()?;

        let mut by_name = BTreeMap::new();
        for (file_ix, file) in files.iter().enumerate() {
            for name in file.names() {
                if let Some(other) = by_name.insert(name.to_owned(), file_ix) {
                    let (a, b) = (files[other].path().display(), file.path().display());
                    return Err(Error::new(
                        ErrorKind::Format,
                        format!("tensor `{}` occurs in two files: `{a}` and `{b}`", shown(name)),
                    ));
                }
            }
        }
        if let Some((index, map)) = index {
            check_index(dir, &index, &map, &files, &by_name)?;
        }
        Ok(Self { files, by_name, bytes_read })
    }

    /// The tensor `name`; errors as [`SafetensorsFile::tensor`](super::SafetensorsFile::tensor) and
    /// [`TorchFile::tensor`](super::TorchFile::tensor).
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        match self.by_name.get(name) {
            Some(&file_ix) => self.files[file_ix].tensor(name),
            None => Err(Error::new(ErrorKind::Tensor, format!("tensor `{}` is missing", shown(name)))),
        }
    }

    /// The file that holds the tensor `name`, if one does.
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        self.by_name.get(name).map(|&file_ix| self.files[file_ix].path())
    }

    /// Every tensor name, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Name, type, shape and size of every tensor, file by file.
    pub fn headers(&self) -> impl Iterator<Item = TensorHeader<'_>> {
        self.files.iter().flat_map(WeightFile::headers)
    }

    /// Bytes of tensor data handed out so far, all files together.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }
}

/// An index: its path, and tensor name and file name for every tensor it lists.
type IndexMap = (PathBuf, Vec<(String, String)>);

/// The files of the checkpoint in `dir`, and the index that names them, if one does.
fn sources(dir: &Path) -> Result<(Vec<PathBuf>, Option<IndexMap>)> {
    let single = |name: &str| Some(dir.join(name)).filter(|p| p.exists());
    let indexed = |index: PathBuf| {
        let map = read_index(&index)?;
        Ok((shard_paths(dir, &index, &map)?, Some((index, map))))
    };
    if let Some(file) = single(SINGLE) {
        return Ok((vec![file], None));
    }
    if let Some(index) = single(INDEX) {
        return indexed(index);
    }
    let loose = loose_files(dir)?;
    if !loose.is_empty() {
        return Ok((loose, None));
    }
    if let Some(file) = single(TORCH_SINGLE) {
        return Ok((vec![file], None));
    }
    if let Some(index) = single(TORCH_INDEX) {
        return indexed(index);
    }
    let message = format!("`{}`: no `*.safetensors` file and no `{TORCH_SINGLE}`", dir.display());
    Err(Error::new(ErrorKind::Io, message))
}

/// Tensor name and file name, for every tensor that the index `path` lists.
fn read_index(path: &Path) -> Result<Vec<(String, String)>> {
    let bytes = read_capped(path, MAX_INDEX_BYTES)?;
    let index: Index = serde_json::from_slice(&bytes)
        .map_err(|e| Error::new(ErrorKind::Format, format!("`{}`: {e}", path.display())))?;
    Ok(index.weight_map.0)
}

/// The shards that an index names, each once, in order of first mention.
fn shard_paths(dir: &Path, index: &Path, map: &[(String, String)]) -> Result<Vec<PathBuf>> {
    let root = dir.canonicalize().map_err(|e| Error::io(dir, &e))?;
    let mut seen = std::collections::HashSet::new();
    let mut paths = Vec::new();
    for (_, file) in map {
        if !seen.insert(file.as_str()) {
            continue;
        }
        let escapes = || {
            let message = format!("`{}`: shard `{}` leads out of the folder", index.display(), shown(file));
            Error::new(ErrorKind::Format, message)
        };
        if file.is_empty()
            || file.contains(['\\', '\0'])
            || !Path::new(file).components().all(|c| matches!(c, Component::Normal(_)))
        {
            return Err(escapes());
        }
        let path = dir.join(file);
        let real = path.canonicalize().map_err(|e| Error::io(&path, &e).within(format!("`{}`", index.display())))?;
        if !real.starts_with(&root) && !is_hub_blob(&root, &real) {
            return Err(escapes());
        }
        paths.push(path);
    }
    if paths.is_empty() {
        return Err(Error::new(ErrorKind::Format, format!("`{}`: `weight_map` names no file", index.display())));
    }
    Ok(paths)
}

/// True for the one link out of a folder that is no attack: a download cache that keeps `<repo>/snapshots/<commit>/` as
/// links into its own `<repo>/blobs/`.
fn is_hub_blob(root: &Path, real: &Path) -> bool {
    let Some(snapshots) = root.parent().filter(|p| p.file_name().is_some_and(|n| n == "snapshots")) else {
        return false;
    };
    snapshots.parent().is_some_and(|repo| real.parent() == Some(&repo.join("blobs")))
}

/// Index and files must agree on every tensor.
fn check_index(
    dir: &Path,
    index: &Path,
    map: &[(String, String)],
    files: &[WeightFile],
    by_name: &BTreeMap<String, usize>,
) -> Result<()> {
    let fail = |message: String| Err(Error::new(ErrorKind::Format, format!("`{}`: {message}", index.display())));
    let file_ix: HashMap<&Path, usize> = files.iter().enumerate().map(|(i, f)| (f.path(), i)).collect();
    for (name, file) in map {
        if by_name.get(name) != file_ix.get(dir.join(file).as_path()) {
            return fail(format!("tensor `{}` is not in `{}`", shown(name), shown(file)));
        }
    }
    // Names are unique on both sides and the index is a subset, so only a larger file set can differ.
    if map.len() != by_name.len() {
        let listed: std::collections::HashSet<&str> = map.iter().map(|(n, _)| n.as_str()).collect();
        let extra = by_name.keys().find(|n| !listed.contains(n.as_str())).map_or("", String::as_str);
        return fail(format!("tensor `{}` is in a shard but not in the index", shown(extra)));
    }
    Ok(())
}

/// All `*.safetensors` of `dir`, sorted by name; may be none.
fn loose_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io(dir, &e))? {
        let path = entry.map_err(|e| Error::io(dir, &e))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}
