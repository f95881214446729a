//! The stages of one mixture-of-experts layer in order, and nothing else.

use super::{Factors, Routed, activation, combine, expert_bias, expert_gemm, localise, lora, remap, route};
use crate::activation::Activation;
use crate::adapter::Site;
use crate::placement::Placement;
use crate::router::{NoAdapter, RouteOptions};
use crate::shape::MoeShape;

/// One layer as this rank holds it.
#[derive(Debug, Clone, Copy)]
pub struct MoeLayer<'a> {
    /// E, A, D, F.
    pub shape: MoeShape,
    /// Selection and weights.
    pub options: RouteOptions,
    /// Nonlinearity of the experts.
    pub activation: Activation,
    /// Of E experts: which are here.
    pub placement: &'a Placement,
    /// `[E, D]`
    pub router: &'a [f32],
    /// `[E]`: selection bias.
    pub router_bias: Option<&'a [f32]>,
    /// `[E_l, 2F, D]` (`[E_l, F, D]` without a gate)
    pub gate_up: &'a [f32],
    /// `[E_l, 2F]`
    pub gate_up_bias: Option<&'a [f32]>,
    /// `[E_l, D, F]`
    pub down: &'a [f32],
    /// `[E_l, D]`
    pub down_bias: Option<&'a [f32]>,
}

/// What [`moe_layer`] returns.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeOutput {
    /// `[T, D]`: this rank's partial sum, without residual and shared experts.
    pub out: Vec<f32>,
    /// `[T, A]` over global ids.
    pub routed: Routed,
    /// `[P]`: localised ids.
    pub local_ids: Vec<i32>,
    /// Status bits of all stages.
    pub status: u32,
}

/// Semantics: `out[t] = Σ_k w[t,k] · W_down' · act(W_gate_up' · x[t])` with `W' = W + s·B·A` of the token's adapter.
///
/// `x`: `[T, D]`, `token_lora_mapping`: `[T]`, slots L. `factors` maps a site (`ExpertGate`, `ExpertUp`, `ExpertDown`) and a
/// virtual id (slot·E_l + local expert) to what is loaded there; gate and up factors have F rows, however the activation
/// lays its columns out. An MLP without a gate takes `ExpertUp`.
pub fn moe_layer<'a>(
    layer: &MoeLayer<'_>,
    x: &[f32],
    token_lora_mapping: &[i32],
    slots: usize,
    factors: &dyn Fn(Site, usize) -> Option<Factors<'a>>,
) -> MoeOutput {
    let MoeShape { experts, top_k, hidden: d, expert_width: f } = layer.shape;
    let tokens = token_lora_mapping.len();
    let pairs = tokens * top_k;
    let columns = layer.activation.input_columns(f);
    let experts_local = layer.down.len() / (d * f);
    assert_eq!(x.len(), tokens * d, "x: [T, D]");
    assert_eq!(layer.placement.experts(), experts, "placement: of E experts");

    let logits = router_logits(x, layer.router, tokens, experts, d);
    let routed = route(&logits, layer.router_bias, tokens, experts, top_k, &layer.options);
    let ids = localise(&routed.ids, layer.placement, tokens, top_k);
    let remapped = remap(&ids, token_lora_mapping, top_k, experts_local, slots, NoAdapter::Skip);
    let virtual_ids = &remapped.virtual_topk_ids;

    let mut gate_up = vec![0.0; pairs * columns];
    expert_gemm(x, layer.gate_up, &ids, top_k, columns, d, &mut gate_up);
    if let Some(bias) = layer.gate_up_bias {
        expert_bias(bias, &ids, columns, &mut gate_up);
    }
    let gate = |v: usize| factors(Site::ExpertGate, v);
    let up = |v: usize| factors(Site::ExpertUp, v);
    if layer.activation.interleaved() {
        lora_interleaved(x, top_k, virtual_ids, &gate, f, d, &mut gate_up, 0);
        lora_interleaved(x, top_k, virtual_ids, &up, f, d, &mut gate_up, 1);
    } else if layer.activation.gated() {
        lora(x, top_k, virtual_ids, &gate, f, d, &mut gate_up, columns, 0);
        lora(x, top_k, virtual_ids, &up, f, d, &mut gate_up, columns, f);
    } else {
        lora(x, top_k, virtual_ids, &up, f, d, &mut gate_up, columns, 0);
    }

    let mut inner = vec![0.0; pairs * f];
    activation(&gate_up, &ids, f, layer.activation, &mut inner);

    let mut y = vec![0.0; pairs * d];
    expert_gemm(&inner, layer.down, &ids, 1, d, f, &mut y);
    if let Some(bias) = layer.down_bias {
        expert_bias(bias, &ids, d, &mut y);
    }
    let down = |v: usize| factors(Site::ExpertDown, v);
    lora(&inner, 1, virtual_ids, &down, d, f, &mut y, d, 0);

    let mut out = vec![0.0; tokens * d];
    combine(&y, &routed.weights, &ids, top_k, d, &mut out, false);
    let status = routed.status | remapped.status;
    MoeOutput { out, routed, local_ids: ids, status }
}

/// Semantics: `logits[t] = router · x[t]`; `[T, E]`.
fn router_logits(x: &[f32], router: &[f32], tokens: usize, experts: usize, d: usize) -> Vec<f32> {
    let mut logits = vec![0.0; tokens * experts];
    // The router is one expert that every token visits.
    expert_gemm(x, router, &vec![0; tokens], 1, experts, d, &mut logits);
    logits
}

/// [`lora`] on every second column of `y`: `[P, 2·out]`, from column `first`.
fn lora_interleaved<'a>(
    x: &[f32],
    row_div: usize,
    virtual_ids: &[i32],
    factors: &dyn Fn(usize) -> Option<Factors<'a>>,
    out_dim: usize,
    in_dim: usize,
    y: &mut [f32],
    first: usize,
) {
    let mut half = vec![0.0; y.len() / 2];
    for i in 0..half.len() {
        half[i] = y[2 * i + first];
    }
    lora(x, row_div, virtual_ids, factors, out_dim, in_dim, &mut half, out_dim, 0);
    for i in 0..half.len() {
        y[2 * i + first] = half[i];
    }
}
