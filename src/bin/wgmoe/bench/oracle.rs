//! The same layer on the CPU, for a few tokens.

use std::collections::BTreeMap;

use wgmoe::adapter::Site;
use wgmoe::kernels::random::Random;
use wgmoe::reference::{self, Factors};
use wgmoe::shape::MoeShape;

use crate::bench::synthetic::Synthetic;

/// Tokens whose choice of experts is closer than this may be routed otherwise in other arithmetic.
const CLEAR: f32 = 1e-3;

/// What the router chooses for the row `x`; `None` where the choice is too close to be compared.
pub fn clear(layer: &Synthetic, x: &[f32]) -> Option<reference::Routed> {
    let MoeShape { experts, top_k, hidden: d, .. } = layer.layer.shape;
    let mut logits = vec![0.0; experts];
    reference::expert_gemm(x, &layer.router, &[0], 1, experts, d, &mut logits);
    let routed = reference::route(&logits, None, 1, experts, top_k, &layer.layer.options);
    (routed.gap[0] >= CLEAR).then_some(routed)
}

/// The output `[D]` for the row `x`, and the experts chosen; `None` where the choice is too close to be compared.
pub fn token(layer: &Synthetic, x: &[f32], slot: Option<usize>) -> Option<Vec<f32>> {
    let MoeShape { top_k, hidden: d, expert_width: f, .. } = layer.layer.shape;
    let routed = clear(layer, x)?;
    // Only the experts that are met, under numbers of their own.
    let met: BTreeMap<i32, usize> = routed.ids.iter().enumerate().map(|(k, id)| (*id, k)).collect();
    let ids: Vec<i32> = routed.ids.iter().map(|id| met[id] as i32).collect();
    let weights = |random: &Random, size: usize| -> Vec<f32> {
        let from = routed.ids.iter().map(|id| *id as usize * size);
        from.flat_map(|from| (from..from + size).map(|i| random.value(i as u32))).collect()
    };
    let factors: BTreeMap<Site, _> = slot
        .map(|slot| {
            let of = layer.adapters[slot].factors.iter().filter(|f| f.expert == 0);
            of.map(|f| (f.site, (f.rank, f.scale, f.a.dtype.decode(&f.a.bytes), f.b.dtype.decode(&f.b.bytes))))
                .collect()
        })
        .unwrap_or_default();
    let part = |site: Site| {
        let found = factors.get(&site);
        move |_: usize| found.map(|(rank, scale, a, b)| Factors { rank: *rank, scale: *scale, a, b, bias: None })
    };

    let mut gate_up = vec![0.0; top_k * 2 * f];
    reference::expert_gemm(x, &weights(&layer.gate_up, 2 * f * d), &ids, top_k, 2 * f, d, &mut gate_up);
    if layer.layer.activation.interleaved() {
        for (first, site) in [(0, Site::ExpertGate), (1, Site::ExpertUp)] {
            let mut half: Vec<f32> = gate_up.iter().skip(first).step_by(2).copied().collect();
            reference::lora(x, top_k, &ids, &part(site), f, d, &mut half, f, 0);
            gate_up.iter_mut().skip(first).step_by(2).zip(half).for_each(|(to, v)| *to = v);
        }
    } else {
        reference::lora(x, top_k, &ids, &part(Site::ExpertGate), f, d, &mut gate_up, 2 * f, 0);
        reference::lora(x, top_k, &ids, &part(Site::ExpertUp), f, d, &mut gate_up, 2 * f, f);
    }
    let mut inner = vec![0.0; top_k * f];
    reference::activation(&gate_up, &ids, f, layer.layer.activation, &mut inner);
    let mut y = vec![0.0; top_k * d];
    reference::expert_gemm(&inner, &weights(&layer.down, d * f), &ids, 1, d, f, &mut y);
    reference::lora(&inner, 1, &ids, &part(Site::ExpertDown), d, f, &mut y, d, 0);
    let mut out = vec![0.0; d];
    reference::combine(&y, &routed.weights, &ids, top_k, d, &mut out, false);
    Some(out)
}
