//! Writes model and adapter folders, good ones and broken ones, for the tests of readers.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod layouts;
pub mod zip;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use wgmoe::adapter::Adapter;
use wgmoe::checkpoint::{ModelConfig, SafetensorsFile};
use wgmoe::dtype::DType;
use wgmoe::{ErrorKind, Result};

/// The tiny model and its adapters, in the test data.
pub const TINY: &str = "tiny/qwen3_moe";

/// The folder `path` of the test data.
pub fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// One tensor to write.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// A tensor of zero bytes; `size` is that of an element.
    pub fn zeros(name: &str, dtype: &str, shape: &[usize], size: usize) -> Self {
        let n = shape.iter().product::<usize>() * size;
        Self { name: name.to_owned(), dtype: dtype.to_owned(), shape: shape.to_vec(), bytes: vec![0; n] }
    }
}

/// The tensors of a safetensors file.
pub fn read(path: &Path) -> Vec<Tensor> {
    let file = SafetensorsFile::open(path).unwrap();
    let all = file.names().map(|name| {
        let view = file.tensor(name).unwrap();
        Tensor {
            name: name.to_owned(),
            dtype: view.dtype.name().to_uppercase(),
            shape: view.shape.to_vec(),
            bytes: view.all().to_vec(),
        }
    });
    all.collect()
}

/// The adapter in `dir`, which has none, with a bias on every projection.
pub fn biased(dir: &Path) -> TempDir {
    let mut tensors = read(&dir.join("adapter_model.safetensors"));
    let biases: Vec<_> = tensors
        .iter()
        .filter_map(|t| {
            let module = t.name.strip_suffix(".lora_B.weight")?;
            let values = layouts::values(t.shape[0], 1, module.len()).2;
            let (name, dtype) = (format!("{module}.lora_B.bias"), "BF16".to_owned());
            Some(Tensor { name, dtype, shape: vec![t.shape[0]], bytes: DType::Bf16.encode(&values) })
        })
        .collect();
    tensors.extend(biases);
    let config = patched(json_file(&dir.join("adapter_config.json")), &json!({"lora_bias": true}));
    folder(&[("adapter_config.json", config.to_string().into()), ("adapter_model.safetensors", encode(&tensors))])
}

/// A safetensors file with this header and data.
pub fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// A well-formed safetensors file of these tensors.
pub fn encode(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for t in tensors {
        let offsets = [data.len(), data.len() + t.bytes.len()];
        header.insert(t.name.clone(), json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": offsets}));
        data.extend_from_slice(&t.bytes);
    }
    raw(&Value::Object(header).to_string(), &data)
}

/// A temporary folder with these files.
pub fn folder(files: &[(&str, Vec<u8>)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

/// A JSON file.
pub fn json_file(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// `base` with `changes` on top; a change to the string `"<absent>"` removes the key.
pub fn patched(mut base: Value, changes: &Value) -> Value {
    let map = base.as_object_mut().unwrap();
    for (key, value) in changes.as_object().unwrap() {
        if value == "<absent>" {
            map.remove(key);
        } else {
            map.insert(key.clone(), value.clone());
        }
    }
    base
}

/// The model of `tests/data/tiny/qwen3_moe`.
pub fn tiny() -> ModelConfig {
    ModelConfig::open(&data(TINY)).unwrap()
}

/// An adapter of `model` with this configuration and these tensors.
pub fn open_adapter(config: &Value, tensors: &[Tensor], model: &ModelConfig) -> Result<Adapter> {
    let dir =
        folder(&[("adapter_config.json", config.to_string().into()), ("adapter_model.safetensors", encode(tensors))]);
    Adapter::open(dir.path(), model)
}

/// Configuration and tensors of an adapter of the tiny model.
pub fn load_adapter(case: &str) -> (Value, Vec<Tensor>) {
    let dir = data(TINY).join("adapters").join(case);
    (json_file(&dir.join("adapter_config.json")), read(&dir.join("adapter_model.safetensors")))
}

/// Collects what went wrong in a table, to report all rows at once.
#[derive(Default)]
pub struct Table(Vec<String>);

impl Table {
    /// The row `case` must have failed with `kind` and a message that contains every one of `parts`.
    pub fn fails<T>(&mut self, case: &str, got: Result<T>, kind: ErrorKind, parts: &[&str]) {
        match got {
            Ok(_) => self.0.push(format!("{case}: accepted")),
            Err(e) => {
                let text = e.to_string();
                if e.kind() != kind || parts.iter().any(|p| !text.contains(p)) {
                    self.0.push(format!("{case}: expected {kind:?} with {parts:?}, got {:?}: {text}", e.kind()));
                }
            }
        }
    }

    /// The row `case` must hold.
    pub fn holds(&mut self, case: &str, ok: bool, detail: impl std::fmt::Debug) {
        if !ok {
            self.0.push(format!("{case}: {detail:?}"));
        }
    }

    /// Fails the test when any row failed.
    pub fn finish(self) {
        assert!(self.0.is_empty(), "{} rows failed:\n{}", self.0.len(), self.0.join("\n"));
    }
}
