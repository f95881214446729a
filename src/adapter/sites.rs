//! Where adapters attach in each layer, and where each projection's entries stand in the layer's index.

use crate::adapter::Site;
use crate::checkpoint::{MlpKind, ModelConfig};
use crate::kernels::lora::LoraSite;
use crate::placement::ExpertShare;

/// The sites of one layer. Entries of a site follow those of the one before.
#[derive(Debug, Clone)]
pub struct LayerSites {
    /// q, k and v.
    pub qkv: LoraSite,
    /// o.
    pub o: LoraSite,
    /// The router; `None` in dense layers.
    pub router: Option<LoraSite>,
    /// gate and up: of every expert, or of the dense MLP.
    pub gate_up: LoraSite,
    /// down: of every expert, or of the dense MLP.
    pub down: LoraSite,
    /// Experts this rank holds; 1 for the dense MLP.
    pub experts: usize,
    /// Adapter slots L.
    pub slots: usize,
    /// Entries of the index of this layer.
    pub entries: usize,
}

impl LayerSites {
    /// The sites of a layer of `kind` on a rank that holds `share` of its experts, with `slots` adapter slots. A layer
    /// without experts takes no share.
    pub fn new(config: &ModelConfig, kind: MlpKind, share: &ExpertShare, slots: usize) -> Self {
        let mut entries = 0;
        let mut site = |out_dims: Vec<usize>, in_dim: usize, experts: usize| {
            let index_base = entries;
            entries += slots * experts * out_dims.len();
            LoraSite { index_base, out_dims, in_dim }
        };
        let d = config.hidden;
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let qkv = site(vec![q, kv, kv], d, 1);
        let o = site(vec![d], q, 1);
        let (router, experts, width) = match kind {
            MlpKind::Experts => (Some(site(vec![config.moe.experts], d, 1)), share.experts(), share.padded_width()),
            MlpKind::Dense => (None, 1, config.dense_width),
        };
        let gate_up = site(vec![width, width], d, experts);
        let down = site(vec![d], width, experts);
        Self { qkv, o, router, gate_up, down, experts, slots, entries }
    }

    /// `[out, in]` of a projection. `None` where the layer (with `routed` experts or a dense MLP) has no such projection.
    pub fn shape(&self, site: Site, routed: bool) -> Option<[usize; 2]> {
        let (of, projection) = match site {
            Site::Q => (&self.qkv, 0),
            Site::K => (&self.qkv, 1),
            Site::V => (&self.qkv, 2),
            Site::O => (&self.o, 0),
            Site::Router => (self.router.as_ref()?, 0),
            Site::Gate if !routed => (&self.gate_up, 0),
            Site::Up if !routed => (&self.gate_up, 1),
            Site::Down if !routed => (&self.down, 0),
            Site::ExpertGate if routed => (&self.gate_up, 0),
            Site::ExpertUp if routed => (&self.gate_up, 1),
            Site::ExpertDown if routed => (&self.down, 0),
            _ => return None,
        };
        Some([of.out_dims[projection], of.in_dim])
    }

    /// The index entry of a projection; `expert` is this rank's id. `None` where the layer has no such projection.
    pub fn entry(&self, slot: usize, site: Site, expert: usize) -> Option<usize> {
        let (site, projection, experts) = match site {
            Site::Q => (&self.qkv, 0, 1),
            Site::K => (&self.qkv, 1, 1),
            Site::V => (&self.qkv, 2, 1),
            Site::O => (&self.o, 0, 1),
            Site::Router => (self.router.as_ref()?, 0, 1),
            Site::Gate | Site::ExpertGate => (&self.gate_up, 0, self.experts),
            Site::Up | Site::ExpertUp => (&self.gate_up, 1, self.experts),
            Site::Down | Site::ExpertDown => (&self.down, 0, self.experts),
            _ => return None,
        };
        Some(site.index_base + (slot * experts + expert) * site.out_dims.len() + projection)
    }
}
