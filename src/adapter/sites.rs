//! Where adapters attach in each layer, and where each projection's entries stand in the layer's index. A site is what has
//! a binding of factors; several projections may share it.

use crate::adapter::Site;
use crate::adapter::cut::Cut;
use crate::checkpoint::{MlpKind, ModelConfig};
use crate::kernels::lora::LoraSite;
use crate::placement::{ExpertShare, HeadShare, RankShare};

/// The sites of one layer. Entries of a site follow those of the one before.
#[derive(Debug, Clone)]
pub struct LayerSites {
    /// What this rank holds of attention: `qkv` and `o` are those of its heads.
    pub heads: HeadShare,
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

/// The sites outside the layers.
#[derive(Debug, Clone)]
pub struct EndSites {
    /// The token embedding. Its input is a token, a column of A out of `in_dim`.
    pub embedding: LoraSite,
    /// The LM head.
    pub lm_head: LoraSite,
    /// Adapter slots L.
    pub slots: usize,
    /// Entries of their index.
    pub entries: usize,
}

impl EndSites {
    /// The sites of a model with `slots` adapter slots.
    pub fn new(config: &ModelConfig, slots: usize) -> Self {
        let (d, vocab) = (config.hidden, config.vocab);
        let embedding = LoraSite { ordinal: 0, index_base: 0, out_dims: vec![d], alternating: false, in_dim: vocab };
        let lm_head = LoraSite { ordinal: 1, index_base: slots, out_dims: vec![vocab], alternating: false, in_dim: d };
        Self { embedding, lm_head, slots, entries: 2 * slots }
    }
}

/// The index entries of one site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// What messages call the site.
    pub name: &'static str,
    /// First entry of slot 0.
    pub base: usize,
    /// Entries of one slot.
    pub count: usize,
}

/// The places of one entry of the pool.
#[derive(Debug, Clone)]
pub(crate) enum PoolSites {
    /// Those of a layer, and what this rank holds of its experts: `None` with a dense MLP.
    Layer(Box<LayerSites>, Option<ExpertShare>),
    /// Those outside the layers.
    Ends(EndSites),
}

impl LayerSites {
    /// The sites of a layer of `kind` on a rank that holds `share` of it, with `slots` adapter slots. A layer without
    /// experts takes the heads alone.
    pub fn new(config: &ModelConfig, kind: MlpKind, share: &RankShare, slots: usize) -> Self {
        let (mut sites, mut entries) = (0, 0);
        let mut site = |out_dims: Vec<usize>, in_dim: usize, experts: usize| {
            let (ordinal, index_base) = (sites, entries);
            sites += 1;
            entries += slots * experts * out_dims.len();
            LoraSite { ordinal, index_base, out_dims, alternating: false, in_dim }
        };
        let d = config.hidden;
        let (heads, share) = (share.heads.clone(), &share.experts);
        let (q, kv) = (heads.q_range().len(), heads.kv_range().len());
        let qkv = site(vec![q, kv, kv], d, 1);
        let o = site(vec![d], q, 1);
        let (router, experts, width) = match kind {
            MlpKind::Experts => (Some(site(vec![config.moe.experts], d, 1)), share.experts(), share.padded_width()),
            MlpKind::Dense => (None, 1, config.dense_width),
        };
        let gate_up = site(vec![width, width], d, experts);
        let down = site(vec![d], width, experts);
        Self { heads, qkv, o, router, gate_up, down, experts, slots, entries }
    }

    /// The index entry of a projection; `expert` is this rank's id. `None` where the layer has no such projection.
    pub fn entry(&self, slot: usize, site: Site, expert: usize) -> Option<usize> {
        let (site, projection, experts) = self.projection(site)?;
        Some(site.index_base + (slot * experts + expert) * site.out_dims.len() + projection)
    }

    /// The site that a projection belongs to, its number there, and the experts that have one.
    fn projection(&self, site: Site) -> Option<(&LoraSite, usize, usize)> {
        Some(match site {
            Site::Q => (&self.qkv, 0, 1),
            Site::K => (&self.qkv, 1, 1),
            Site::V => (&self.qkv, 2, 1),
            Site::O => (&self.o, 0, 1),
            Site::Router => (self.router.as_ref()?, 0, 1),
            Site::Gate | Site::ExpertGate => (&self.gate_up, 0, self.experts),
            Site::Up | Site::ExpertUp => (&self.gate_up, 1, self.experts),
            Site::Down | Site::ExpertDown => (&self.down, 0, self.experts),
            _ => return None,
        })
    }
}

impl PoolSites {
    /// `[out, in]` of a whole projection, over all ranks. `None` where the layer has no such projection.
    pub fn shape(&self, site: Site) -> Option<[usize; 2]> {
        let of = |site: &LoraSite, projection: usize| Some([site.out_dims[projection], site.in_dim]);
        let (s, experts) = match self {
            Self::Layer(sites, share) => (sites, share.is_some()),
            Self::Ends(ends) => {
                return match site {
                    Site::Embedding => of(&ends.embedding, 0),
                    Site::LmHead => of(&ends.lm_head, 0),
                    _ => None,
                };
            }
        };
        let [mut out, mut input] = match (site, experts) {
            (Site::Q, _) => of(&s.qkv, 0),
            (Site::K, _) => of(&s.qkv, 1),
            (Site::V, _) => of(&s.qkv, 2),
            (Site::O, _) => of(&s.o, 0),
            (Site::Router, _) => of(s.router.as_ref()?, 0),
            (Site::Gate, false) | (Site::ExpertGate, true) => of(&s.gate_up, 0),
            (Site::Up, false) | (Site::ExpertUp, true) => of(&s.gate_up, 1),
            (Site::Down, false) | (Site::ExpertDown, true) => of(&s.down, 0),
            _ => None,
        }?;
        // What the device holds is cut and padded.
        if let Some(cut) = self.cut(site) {
            *(if cut.inputs { &mut input } else { &mut out }) = cut.full;
        }
        Some([out, input])
    }

    /// What this rank holds of a projection that ranks share out.
    pub fn cut(&self, site: Site) -> Option<Cut> {
        match self {
            Self::Layer(sites, share) => Cut::of(site, &sites.heads, share.as_ref()),
            Self::Ends(_) => None,
        }
    }

    /// What this rank holds of attention; `None` outside the layers.
    pub fn heads(&self) -> Option<&HeadShare> {
        match self {
            Self::Layer(sites, _) => Some(&sites.heads),
            Self::Ends(_) => None,
        }
    }

    /// What this rank holds of the experts; `None` where there are none.
    pub fn experts(&self) -> Option<&ExpertShare> {
        match self {
            Self::Layer(_, share) => share.as_ref(),
            Self::Ends(_) => None,
        }
    }

    /// The ordinal of a projection's site and its index entry in slot 0; `expert` is this rank's id.
    pub fn entry(&self, site: Site, expert: usize) -> Option<(usize, usize)> {
        match (self, site) {
            (Self::Layer(sites, _), _) => Some((sites.projection(site)?.0.ordinal, sites.entry(0, site, expert)?)),
            (Self::Ends(ends), Site::Embedding) => Some((ends.embedding.ordinal, ends.embedding.index_base)),
            (Self::Ends(ends), Site::LmHead) => Some((ends.lm_head.ordinal, ends.lm_head.index_base)),
            _ => None,
        }
    }

    /// Entries of all slots.
    pub fn entries(&self) -> usize {
        match self {
            Self::Layer(sites, _) => sites.entries,
            Self::Ends(ends) => ends.entries,
        }
    }

    /// The entries of each site, by ordinal.
    pub fn runs(&self) -> Vec<Run> {
        let of = |name, site: &LoraSite, experts: usize| {
            let run = Run { name, base: site.index_base, count: experts * site.out_dims.len() };
            (site.ordinal, run)
        };
        let mut all = match self {
            Self::Ends(ends) => vec![of("embedding", &ends.embedding, 1), of("lm_head", &ends.lm_head, 1)],
            Self::Layer(s, _) => {
                let experts = [of("gate_up", &s.gate_up, s.experts), of("down", &s.down, s.experts)];
                let router = s.router.as_ref().map(|site| of("router", site, 1));
                [of("qkv", &s.qkv, 1), of("o", &s.o, 1)].into_iter().chain(router).chain(experts).collect()
            }
        };
        all.sort_unstable_by_key(|(ordinal, _)| *ordinal);
        all.into_iter().map(|(_, run)| run).collect()
    }
}
