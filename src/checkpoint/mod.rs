//! Model folders on disk: names, types, shapes and byte ranges, validated once, never copied.

pub mod block;
pub mod config;
mod experts;
pub(crate) mod file;
pub(crate) mod header;
pub mod index;
mod pickle;
pub mod safetensors;
mod source;
pub mod torch;
pub(crate) mod untrusted;
mod window;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

pub use block::Block;
pub use config::{Mixer, MlpKind, ModelConfig};
pub use index::Shards;
pub use safetensors::{SafetensorsFile, TensorHeader, TensorView};
pub use torch::TorchFile;
use untrusted::shown;
pub(crate) use window::Window;

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
