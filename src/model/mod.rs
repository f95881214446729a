//! The decoder around the mixture-of-experts layer: resident weights, and one step recorded layer by layer.

pub mod cache;
mod commands;
mod dispatch;
pub mod load;
pub mod step;

pub use cache::KvCache;
pub use commands::Commands;
pub use load::LoadOptions;
pub use step::{StepDispatch, StepTensors};

use crate::checkpoint::ModelConfig;
use crate::kernels::View;
use crate::kernels::operands::Weights;
use crate::layer::MoeLayer;
use crate::placement::{PlacementRule, RankShare, Topology};

/// A model's weights on a device.
#[derive(Debug)]
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) embedding: Weights,
    /// `None`: the embedding.
    pub(crate) lm_head: Option<Weights>,
    pub(crate) final_norm: View,
    pub(crate) layers: Vec<DecoderLayer>,
    pub(crate) topology: Topology,
    pub(crate) placement: PlacementRule,
    /// What this rank holds of every layer.
    pub(crate) share: RankShare,
    pub(crate) bytes_resident: u64,
}

/// One decoder layer.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    pub input_norm: View,
    /// q, k and v rows of this rank's heads in one matrix.
    pub qkv: Weights,
    /// f32 `[2, head_dim]`.
    pub head_norms: View,
    /// The columns of this rank's heads.
    pub o: Weights,
    pub mlp_norm: View,
    pub mlp: Mlp,
}

/// What follows attention.
#[derive(Debug)]
pub(crate) enum Mlp {
    Experts(Box<MoeLayer>),
    Dense { gate_up: Weights, down: Weights },
}

impl Model {
    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of weights on the device, padding included.
    pub fn bytes_resident(&self) -> u64 {
        self.bytes_resident
    }

    /// This rank's place among all.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// How experts are shared out.
    pub fn placement(&self) -> &PlacementRule {
        &self.placement
    }

    /// What this rank holds of every layer.
    pub fn share(&self) -> &RankShare {
        &self.share
    }

    /// The experts of a layer, for callers that record them into commands of their own; `None` where it has none.
    pub fn moe_layer(&self, layer: usize) -> Option<&MoeLayer> {
        match &self.layers.get(layer)?.mlp {
            Mlp::Experts(moe) => Some(moe),
            Mlp::Dense { .. } => None,
        }
    }

    /// The matrix of the LM head.
    pub(crate) fn head(&self) -> &Weights {
        self.lm_head.as_ref().unwrap_or(&self.embedding)
    }
}
