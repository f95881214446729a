//! One mixture-of-experts layer: the stages in order and nothing else.
//!
//! [`MoeLayer::record`] is [`MoeLayer::route`] and then [`MoeLayer::experts`]. Tokens may be routed on one rank and meet their
//! experts on another: each half can be recorded alone.

mod batch;
mod dense;
mod experts;
mod pairs;
mod tiles;

pub use batch::LoraBatch;
pub(crate) use batch::distinct;
pub(crate) use dense::Adapters;
pub use dense::Dense;

use crate::activation::Activation;
use crate::adapter::sites::LayerSites;
use crate::error::Result;
use crate::kernels::localise::Owners;
use crate::kernels::lora::{Factors, LoraSite};
use crate::kernels::operands::Weights;
use crate::kernels::pack::{Packed, Reads, pack};
use crate::kernels::route::Route;
use crate::kernels::{Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::router::RouteOptions;
use crate::shape::MoeShape;

/// The resident weights and rules of one mixture-of-experts layer.
#[derive(Debug, Clone)]
pub struct MoeLayer {
    /// Sizes of the whole layer, all ranks together.
    pub shape: MoeShape,
    /// E_l: experts this rank holds.
    pub experts: usize,
    /// F_l: columns of each that this rank holds, padded with zero weights to a multiple of 8; F where it holds all.
    pub width: usize,
    /// Where experts are; `None` when this rank alone holds all of them in order.
    pub owners: Option<Owners>,
    /// Router, one matrix `[E, D]`.
    pub router: Weights,
    /// Selection rule.
    pub options: RouteOptions,
    /// gate rows, then up rows of each expert (interleaved for the clamped swiglu): `[E_l, 2F_l, D]`.
    pub gate_up: Weights,
    /// `[E_l, D, F_l]`.
    pub down: Weights,
    /// Between the two.
    pub activation: Activation,
}

/// The tensors of one pass through a layer.
pub struct MoeTensors<'a> {
    /// T.
    pub tokens: usize,
    /// f32 `[T, D]`, normed.
    pub x: &'a View,
    /// f32 `[T, D]`, written, or added to.
    pub out: &'a View,
    /// `out` holds the residual: add to it. Not with several ranks, where partial sums are exchanged first.
    pub accumulate: bool,
    /// u32 `[1]` status word.
    pub status: &'a View,
    /// Adapters of the batch with the sites and factors of this layer; `None` when no token has one.
    pub lora: Option<(&'a LoraBatch, &'a LayerSites, &'a Factors)>,
}

impl MoeLayer {
    /// The site of gate and up, or of down, as this layer's products have its columns.
    fn site(&self, sites: &LayerSites, down: bool) -> LoraSite {
        let site = if down { &sites.down } else { &sites.gate_up };
        LoraSite { alternating: !down && self.activation.interleaved(), ..site.clone() }
    }
}

impl MoeTensors<'_> {
    /// Whether an adapter of the batch may change what `site` computes.
    fn adapts(&self, site: &LoraSite) -> bool {
        self.lora.is_some_and(|(batch, _, factors)| batch.adapts(site, factors))
    }

    /// Those of the router.
    fn router_adapters(&self) -> Option<Adapters<'_>> {
        self.lora.and_then(|(batch, sites, factors)| Some((batch, sites.router.as_ref()?, factors)))
    }

    /// Whether one may change what experts compute.
    fn adapts_experts(&self) -> bool {
        self.lora.is_some_and(|(_, sites, _)| self.adapts(&sites.gate_up) || self.adapts(&sites.down))
    }
}

/// Names of the scratch of x that is packed.
const LABELS: [&str; 2] = ["packed x", "packed x in blocks"];

/// What the router chose for each token.
#[derive(Debug, Clone)]
pub struct Routed {
    /// i32 `[T, A]`, experts, -1 for no choice.
    pub topk_ids: View,
    /// The ids are this rank's own numbers; otherwise global ones, of which a copy elsewhere may have its turn.
    pub local: bool,
    /// f32 `[T, A]`.
    pub topk_weights: View,
}

impl MoeLayer {
    /// Records the layer into the caller's pass, and returns what the router chooses there. Nothing is submitted. A rank without
    /// experts or columns routes, so that the status is the same on all ranks, and adds nothing. Few tokens on a rank that holds all
    /// experts are routed by their first product.
    ///
    /// # Errors
    /// Those of [`route`](Self::route) and [`experts`](Self::experts).
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, t: &MoeTensors<'_>) -> Result<Routed> {
        let caps = rec.gpu().capabilities();
        let packed = match [self.router_reads(caps, t), self.experts_reads(caps, t)].map(|reads| reads.packed) {
            // Both read what is packed for the router.
            [Some(form), Some(_)] => Some(pack(rec, pass, LABELS, t.x, [t.tokens, self.shape.hidden], &form)?),
            _ => None,
        };
        self.record_rows(rec, pass, t, packed.as_ref())
    }

    /// The same for x that may be `packed`, as [`reads`](Self::reads) says.
    pub(crate) fn record_rows(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        packed: Option<&Packed>,
    ) -> Result<Routed> {
        if self.chooses_late(rec, t) {
            return self.record_choosing(rec, pass, t);
        }
        let routed = self.route_rows(rec, pass, t, packed)?;
        self.experts_rows(rec, pass, t, &routed, packed)?;
        Ok(routed)
    }

    /// In which forms the layer reads x.
    pub(crate) fn reads(&self, caps: &Capabilities, t: &MoeTensors<'_>) -> Reads {
        let [router, experts] = [self.router_reads(caps, t), self.experts_reads(caps, t)];
        // Rows that are packed twice serve experts, too.
        Reads { plain: router.plain || experts.plain, packed: router.packed.or(experts.packed) }
    }

    /// In which forms the router reads x.
    pub(crate) fn router_reads(&self, caps: &Capabilities, t: &MoeTensors<'_>) -> Reads {
        Dense::reads(caps, t.tokens, &self.router, t.router_adapters(), true)
    }

    /// Parts of its logits.
    pub(crate) fn router_parts(&self, caps: &Capabilities, t: &MoeTensors<'_>) -> usize {
        Dense::parts(caps, t.tokens, &self.router, true)
    }

    /// Records the router and its adapters, and returns the logits, f32 `[parts, T, E]`, and the parts. x may be `packed`.
    fn router(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        packed: Option<&Packed>,
    ) -> Result<(View, usize)> {
        let parts = self.router_parts(rec.gpu().capabilities(), t);
        let logits = rec.scratch("router logits", (parts * t.tokens * self.shape.experts * 4) as u64)?;
        Dense {
            tokens: t.tokens,
            x: t.x,
            packed,
            weights: &self.router,
            adapters: t.router_adapters(),
            y: &logits,
            parts,
            accumulate: false,
            exact: true,
            status: t.status,
        }
        .record(rec, pass)?;
        Ok((logits, parts))
    }

    /// Records the router, its adapters and the choice of experts.
    ///
    /// # Errors
    /// When the device refuses a shader or has no room for scratch.
    pub fn route(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, t: &MoeTensors<'_>) -> Result<Routed> {
        self.route_rows(rec, pass, t, None)
    }

    /// The same for x that may be `packed`.
    pub(crate) fn route_rows(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        t: &MoeTensors<'_>,
        packed: Option<&Packed>,
    ) -> Result<Routed> {
        let MoeShape { experts: e, top_k: a, .. } = self.shape;
        let pairs = t.tokens * a;
        let (logits, parts) = self.router(rec, pass, t, packed)?;
        let topk_ids = rec.scratch("topk_ids", (pairs * 4) as u64)?;
        let topk_weights = rec.scratch("topk_weights", (pairs * 4) as u64)?;
        Route {
            tokens: t.tokens,
            experts: e,
            top_k: a,
            options: &self.options,
            logits: &logits,
            parts,
            bias: None,
            topk_ids: &topk_ids,
            topk_weights: &topk_weights,
            status: t.status,
        }
        .record(rec, pass)?;
        Ok(Routed { topk_ids, local: false, topk_weights })
    }
}
