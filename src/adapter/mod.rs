//! LoRA adapters: a PEFT folder becomes canonical factors (config, names, layout); the pool holds them on the device.

pub(crate) mod config;
mod names;
mod layout;
mod window;
mod cut;
mod decode;
mod fused;
mod packed;
pub mod sites;
mod image;
mod check;
mod free_list;
mod room;
mod store;
pub mod pool;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use config::MAX_RANK;

use crate::checkpoint::ModelConfig;
use crate::checkpoint::file::WeightFile;
use crate::checkpoint::untrusted::shown;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::placement::{Heads, RankShare};
use crate::plan::matrix;

/// A place in the model that an adapter can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Site {
    /// Query projection, `[heads·head_dim, D]`.
    Q,
    /// Key projection, `[kv_heads·head_dim, D]`.
    K,
    /// Value projection, `[kv_heads·head_dim, D]`.
    V,
    /// Output projection, `[D, heads·head_dim]`.
    O,
    /// Router, `[E, D]`.
    Router,
    /// Gate projection of a dense MLP, `[dense_width, D]`.
    Gate,
    /// Up projection of a dense MLP, `[dense_width, D]`.
    Up,
    /// Down projection of a dense MLP, `[D, dense_width]`.
    Down,
    /// Gate projection of one routed expert, `[F, D]`.
    ExpertGate,
    /// Up projection of one routed expert, `[F, D]`.
    ExpertUp,
    /// Down projection of one routed expert, `[D, F]`.
    ExpertDown,
    /// Gate projection of the shared expert.
    SharedGate,
    /// Up projection of the shared expert.
    SharedUp,
    /// Down projection of the shared expert.
    SharedDown,
    /// What weighs the shared expert, `[1, D]`.
    SharedRouter,
    /// Token embedding, as the matrix `[D, vocab]` that takes one-hot tokens. Outside the layers: `layer` is their number.
    Embedding,
    /// LM head, `[vocab, D]`. Outside the layers: `layer` is their number.
    LmHead,
}

/// A dense row-major matrix as stored in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    /// Storage type: f32, f16 or bf16.
    pub dtype: DType,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// `rows · cols` elements, little-endian, without padding.
    pub bytes: Vec<u8>,
}

/// One low-rank change `W += scale · B · A` of one projection of one layer (and expert).
#[derive(Debug, Clone)]
pub struct Factor {
    /// Decoder layer, from 0.
    pub layer: usize,
    /// Which projection.
    pub site: Site,
    /// Global expert id for the `Expert*` sites, otherwise 0.
    pub expert: usize,
    /// R, at least 1.
    pub rank: usize,
    /// alpha / R, or alpha / sqrt(R) with rsLoRA.
    pub scale: f32,
    /// `[R, in]`; factors that share A (fused gate and up) share the allocation.
    pub a: Arc<Matrix>,
    /// `[out, R]`.
    pub b: Arc<Matrix>,
    /// `[out, 1]`, added to B·(A·x) before the scale (`lora_bias`).
    pub bias: Option<Arc<Matrix>>,
}

impl Factor {
    /// Whether products on cooperative matrices can add it, see [`matrix::factor_folds`], where `largest` is the largest magnitude
    /// of A; true for the embedding, which has no product.
    pub(crate) fn folds(&self, largest: f32) -> bool {
        let Self { a, b, .. } = self;
        // A bias is a column of B, whose part of u is as large as a row's power of two.
        let folds =
            || matrix::factor_folds([largest, matrix::largest_magnitude(b.dtype, &b.bytes)], a.cols, self.scale);
        self.site == Site::Embedding || (self.bias.is_none() && folds())
    }
}

/// An adapter in canonical form, checked against one model.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// The folder it came from.
    pub path: PathBuf,
    /// Every factor, sorted by (layer, site, expert); at most one for each.
    pub factors: Vec<Factor>,
    /// Bytes of tensor data read from the file.
    pub bytes_read: u64,
    /// The part of the model that was read: factors of other experts are left out, and those of these experts and of
    /// attention are cut to its columns and heads (rows of B for gate, up, q, k and v, columns of A for down and o). `None`:
    /// everything.
    pub share: Option<RankShare>,
}

impl Adapter {
    /// Reads the PEFT folder `dir` (`adapter_config.json` and `adapter_model.safetensors` or `adapter_model.bin`) as an
    /// adapter of the model `model`: LoRA on embedding, attention, router, MLPs and LM head; on routed experts as modules of
    /// their own (transformers 4), fused (`target_parameters`, transformers 5), or packed with a dimension for the experts.
    /// The files must not change while they are read.
    ///
    /// Errors: `Io` and `Format` for the files; `Config` for a value out of range; `Unsupported` for a method that is not
    /// plain LoRA; `Adapter` when a tensor does not fit the model, lacks its other half, occurs twice, or is unknown.
    /// Nothing in the file is ignored but copies of base weights beside their factors, whose shape must be the model's.
    pub fn open(dir: &Path, model: &ModelConfig) -> Result<Self> {
        Self::read(dir, model, None)
    }

    /// [`open`](Self::open) of the part that a rank with `share` of the model needs: of routed experts, only those that it
    /// holds and only the columns of their width are read, whatever the layout of the file, and of attention its heads;
    /// everything else is read whole. What a B of the down or output projection adds (`lora_bias`) belongs to the rank with
    /// the first columns.
    ///
    /// Every rank checks all names and shapes, so a file that one refuses is refused by all.
    ///
    /// Errors: as [`open`](Self::open), and `Config` when `share` is not one of this model.
    pub fn open_for(dir: &Path, model: &ModelConfig, share: &RankShare) -> Result<Self> {
        let experts = &share.experts;
        let (got, want) =
            ([experts.placement().experts(), experts.full_width()], [model.moe.experts, model.moe.expert_width]);
        if got != want {
            let message = format!(
                "adapter `{}`: expected a share of {} experts of width {}, got one of {} of width {}",
                dir.display(),
                want[0],
                want[1],
                got[0],
                got[1]
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        let (got, want) = (share.heads.all(), Heads::of(model));
        if got != want {
            let shown = |h: Heads| format!("{} heads of {}, {} for keys and values", h.heads, h.head_dim, h.kv_heads);
            let (want, got) = (shown(want), shown(got));
            let message = format!("adapter `{}`: expected a share of {want}, got one of {got}", dir.display());
            return Err(Error::new(ErrorKind::Config, message));
        }
        Self::read(dir, model, Some(share))
    }

    fn read(dir: &Path, model: &ModelConfig, share: Option<&RankShare>) -> Result<Self> {
        let config = config::AdapterConfig::open(&dir.join("adapter_config.json"))?;
        let mut path = dir.join("adapter_model.safetensors");
        let torch = dir.join("adapter_model.bin");
        if !path.exists() && torch.exists() {
            path = torch;
        }
        let file = WeightFile::open(&path, Arc::default())?;
        let names = names::sorted(file.names(), model.family).map_err(|(kind, name, reason)| {
            Error::new(kind, format!("`{}`: tensor `{}`: {reason}", path.display(), shown(&name)))
        })?;
        if names.pairs.is_empty() {
            return Err(Error::new(ErrorKind::Adapter, format!("`{}`: no tensors", path.display())));
        }
        let decoder = decode::Decoder { file: &file, config: &config, model, share };
        let decode::Decoded { mut factors, mut places } = decoder.decode(&names)?;
        factors.sort_by_key(Factor::place);
        places.sort_unstable();
        if let Some([_, twice]) = places.windows(2).find(|w| w[0] == w[1]) {
            let (layer, site, expert) = twice;
            let message = format!(
                "`{}`: layer {layer}, {site:?}, expert {expert}: both fused and as a module of its own",
                path.display()
            );
            return Err(Error::new(ErrorKind::Adapter, message));
        }
        Ok(Self { path: dir.to_owned(), factors, bytes_read: file.bytes_read(), share: share.cloned() })
    }

    /// The factors of one layer.
    pub(crate) fn of_layer(&self, layer: usize) -> &[Factor] {
        let begin = self.factors.partition_point(|f| f.layer < layer);
        let end = self.factors.partition_point(|f| f.layer <= layer);
        &self.factors[begin..end]
    }
}

impl Site {
    /// True for the projections of routed experts, of which ranks hold parts.
    pub(crate) const fn of_expert(self) -> bool {
        matches!(self, Self::ExpertGate | Self::ExpertUp | Self::ExpertDown)
    }
}

impl Factor {
    /// What it changes: layer, site, expert.
    pub fn place(&self) -> (usize, Site, usize) {
        (self.layer, self.site, self.expert)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_with_a_bias_or_outside_the_range_of_halves_are_not_folded() {
        let matrix = |rows: usize, cols: usize, value: f32| {
            let bytes = DType::F32.encode(&vec![value; rows * cols]);
            Arc::new(Matrix { dtype: DType::F32, rows, cols, bytes })
        };
        let factor = |site: Site, b: f32, bias: Option<f32>| Factor {
            layer: 0,
            site,
            expert: 0,
            rank: 2,
            scale: 1.0,
            a: matrix(2, 8, 0.1),
            b: matrix(4, 2, b),
            bias: bias.map(|v| matrix(4, 1, v)),
        };
        for site in [Site::Q, Site::ExpertGate, Site::ExpertDown, Site::LmHead] {
            assert!(factor(site, 0.1, None).folds(0.1), "{site:?}");
            assert!(!factor(site, 0.1, Some(0.1)).folds(0.1), "{site:?}: the power of two of a row may be any");
            assert!(!factor(site, 5e3, None).folds(0.1), "{site:?}: B exceeds f16");
        }
        assert!(factor(Site::Embedding, 5e3, None).folds(0.1));
    }
}
