//! Model folders on disk: names, types, shapes and byte ranges, validated once, never copied.

pub mod config;
pub(crate) mod file;
pub(crate) mod header;
pub mod index;
mod pickle;
pub mod safetensors;
pub mod torch;
pub(crate) mod untrusted;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

pub use config::{Mixer, MlpKind, ModelConfig};
pub use index::Shards;
pub use safetensors::{SafetensorsFile, TensorHeader, TensorView};
pub use torch::TorchFile;
use untrusted::shown;

use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
pub use crate::family::ExpertPart;
use crate::family::Role;

/// Names that a message about missing or superfluous tensors shows of each side.
const SAMPLES: usize = 3;

/// A model folder: its configuration and its weights, of which everything but the values is checked.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    shards: Shards,
}

/// One projection of one expert, row-major, as stored.
#[derive(Debug, Clone, Copy)]
pub struct ExpertSlice<'a> {
    /// Storage type: f32, f16 or bf16.
    pub dtype: DType,
    /// Outputs: F for gate and up, D for down.
    pub rows: usize,
    /// Inputs: D for gate and up, F for down.
    pub cols: usize,
    /// `rows · cols` elements, little-endian.
    pub bytes: &'a [u8],
}

impl Checkpoint {
    /// Opens the model folder `dir`. Reads headers only; the weights stay in mapped files, which nobody may change while
    /// the checkpoint is open.
    ///
    /// Errors: those of [`ModelConfig::open`] and [`Shards::open`]; `Tensor` when a tensor of the model is missing or has
    /// another shape or type, is stored twice (fused and per expert), or when the files hold one that the model has not;
    /// `Unsupported` for a weight of a type that is not read, and for a family whose checkpoints are not read.
    pub fn open(dir: &Path) -> Result<Self> {
        let config = ModelConfig::open(dir)?;
        config.family.check_weights().map_err(|e| e.within(format!("`{}`", dir.display())))?;
        let shards = Shards::open(dir)?;
        let checkpoint = Self { dir: dir.to_owned(), config, shards };
        checkpoint.check_consumed()?;
        Ok(checkpoint)
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The tensor `name`.
    ///
    /// Errors: `Tensor` when there is none, `Unsupported` when its type is not read.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        self.shards.tensor(name).map_err(|e| e.within(format!("`{}`", self.dir.display())))
    }

    /// The tensor with `role`; errors as [`tensor`](Self::tensor).
    pub fn role(&self, role: Role) -> Result<TensorView<'_>> {
        self.tensor(&self.config.family.tensor_name(role))
    }

    /// Every tensor name, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.shards.names()
    }

    /// Name, type, shape and size of every tensor.
    pub fn headers(&self) -> impl Iterator<Item = TensorHeader<'_>> {
        self.shards.headers()
    }

    /// Bytes of tensor data handed out so far.
    pub fn bytes_read(&self) -> u64 {
        self.shards.bytes_read()
    }

    /// One projection of one expert, wherever the file keeps it: in a tensor of its own or fused with all the others.
    /// Only its own bytes count as read.
    ///
    /// Errors: `Tensor` when the model has no such layer or expert.
    pub fn expert_rows(&self, layer: usize, expert: usize, part: ExpertPart) -> Result<ExpertSlice<'_>> {
        let (view, skip) = self.expert_tensor(layer, expert, part)?;
        let [rows, cols] = self.expert_shape(part);
        // The shape was checked on opening, so these products fit.
        let n_bytes = rows * cols * view.dtype.size();
        let begin = skip * cols * view.dtype.size();
        Ok(ExpertSlice { dtype: view.dtype, rows, cols, bytes: view.bytes(begin..begin + n_bytes)? })
    }

    /// The storage type of one projection of one expert, without reading it; errors as [`expert_rows`](Self::expert_rows).
    pub fn expert_dtype(&self, layer: usize, expert: usize, part: ExpertPart) -> Result<DType> {
        Ok(self.expert_tensor(layer, expert, part)?.0.dtype)
    }

    /// `[out, in]` of one projection of an expert.
    fn expert_shape(&self, part: ExpertPart) -> [usize; 2] {
        let (d, f) = (self.config.hidden, self.config.moe.expert_width);
        match part {
            ExpertPart::Gate | ExpertPart::Up => [f, d],
            ExpertPart::Down => [d, f],
        }
    }

    /// The tensor that holds one projection of one expert, and how many rows precede it there.
    fn expert_tensor(&self, layer: usize, expert: usize, part: ExpertPart) -> Result<(TensorView<'_>, usize)> {
        let single = part.role(layer, expert);
        if self.config.family.shape(single, &self.config).is_none() {
            let message = format!("`{}`: no expert {expert} in layer {layer}", self.dir.display());
            return Err(Error::new(ErrorKind::Tensor, message));
        }
        let (f, d) = (self.config.moe.expert_width, self.config.hidden);
        let skip = match part {
            ExpertPart::Gate => expert * 2 * f,
            ExpertPart::Up => expert * 2 * f + f,
            ExpertPart::Down => expert * d,
        };
        let fused = part.fused_role(layer);
        if self.has(fused) {
            return Ok((self.role(fused)?, skip));
        }
        Ok((self.role(single)?, 0))
    }

    fn has(&self, role: Role) -> bool {
        self.shards.file_of(&self.config.family.tensor_name(role)).is_some()
    }

    /// Every tensor of the files belongs to the model, and every tensor of the model is there, once, in its shape.
    fn check_consumed(&self) -> Result<()> {
        let family = self.config.family;
        let mut superfluous = Vec::new();
        let mut fused = HashSet::new();
        let mut singles = Vec::new();
        for name in self.names() {
            let role = family.role(name);
            let Some((role, shape)) = role.and_then(|r| Some((r, family.shape(r, &self.config)?))) else {
                superfluous.push(format!("`{}`", shown(name)));
                continue;
            };
            self.check_tensor(name, &shape)?;
            match role {
                Role::FusedGateUp { layer } => fused.extend([(layer, ExpertPart::Gate), (layer, ExpertPart::Up)]),
                Role::FusedDown { layer } => _ = fused.insert((layer, ExpertPart::Down)),
                Role::ExpertGate { layer, .. } => singles.push((layer, ExpertPart::Gate, name)),
                Role::ExpertUp { layer, .. } => singles.push((layer, ExpertPart::Up, name)),
                Role::ExpertDown { layer, .. } => singles.push((layer, ExpertPart::Down, name)),
                _ => {}
            }
        }
        let missing = self.missing(&fused);
        if !superfluous.is_empty() || !missing.is_empty() {
            let message = format!(
                "`{}`: the weights are not those of the model `config.json` describes: expected {}, got unknown {}",
                self.dir.display(),
                samples(&missing),
                samples(&superfluous)
            );
            return Err(Error::new(ErrorKind::Tensor, message));
        }
        if let Some((.., name)) = singles.iter().find(|(layer, part, _)| fused.contains(&(*layer, *part))) {
            return Err(self.at(name, "is stored twice: in a tensor of its own and fused".to_owned()));
        }
        Ok(())
    }

    fn check_tensor(&self, name: &str, shape: &[usize]) -> Result<()> {
        let view = self.tensor(name)?;
        if view.dtype == DType::I32 {
            return Err(self.at(name, "expected `F32`, `F16` or `BF16`, got `I32`".to_owned()));
        }
        if view.shape != shape {
            return Err(self.at(name, format!("expected {shape:?}, got {:?}", view.shape)));
        }
        Ok(())
    }

    fn at(&self, name: &str, message: String) -> Error {
        let path = self.shards.file_of(name).unwrap_or(&self.dir);
        Error::new(ErrorKind::Tensor, format!("`{}`: tensor `{}`: {message}", path.display(), shown(name)))
    }

    /// The first few names the model needs and the files lack. Stops early: the model's sizes are a stranger's numbers.
    fn missing(&self, fused: &HashSet<(usize, ExpertPart)>) -> Vec<String> {
        let config = &self.config;
        let globals = [Some(Role::Embedding), Some(Role::FinalNorm), (!config.tie_embeddings).then_some(Role::LmHead)];
        let in_layers = (0..config.layers.len()).flat_map(|layer| config.family.layer_roles(layer, config));
        let with_experts = (0..config.layers.len()).filter(|&layer| config.layers[layer] == MlpKind::Experts);
        let experts = with_experts
            .flat_map(|layer| config.family.expert_parts().map(move |part| (layer, part)))
            .filter(|key| !fused.contains(key))
            .flat_map(|(layer, part)| (0..config.moe.experts).map(move |expert| part.role(layer, expert)));
        let needed = globals.into_iter().flatten().chain(in_layers).chain(experts);
        let missing = needed.filter(|role| !self.has(*role)).take(SAMPLES + 1);
        missing.map(|role| format!("`{}`", config.family.tensor_name(role))).collect()
    }
}

/// The first few names, for a message.
fn samples(names: &[String]) -> String {
    if names.is_empty() {
        return "nothing else".to_owned();
    }
    let more = if names.len() > SAMPLES { ", …" } else { "" };
    format!("{}{more}", names[..names.len().min(SAMPLES)].join(", "))
}
