//! The layer of the oracle as a whole: adapters against merged weights, ranks against one device.
#![expect(clippy::needless_range_loop, reason = "rows index several slices at once")]

mod common;

use common::{Rng, TOL_F32, each_case, rel_err};
use wgmoe::activation::Activation;
use wgmoe::adapter::Site;
use wgmoe::placement::Placement;
use wgmoe::reference::{Factors, MoeLayer, moe_layer};
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;

/// Row of an adapter's half to row of the gate_up matrix.
type Column = fn(usize) -> usize;

const SHAPE: MoeShape = MoeShape { experts: 4, top_k: 2, hidden: 6, expert_width: 5 };
const TOKENS: usize = 9;
const SLOTS: usize = 2;
const RANK: usize = 3;

/// Random weights of a layer and of one factor for each site and virtual expert.
struct Weights {
    placement: Placement,
    x: Vec<f32>,
    router: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Weights {
    fn new(activation: Activation) -> Self {
        let MoeShape { experts, hidden, expert_width, .. } = SHAPE;
        let mut rng = Rng::new(11);
        let columns = activation.input_columns(expert_width);
        let factors = 3 * SLOTS * experts * RANK;
        Self {
            placement: Placement::linear(experts, 1, 0).unwrap(),
            x: rng.floats(TOKENS * hidden),
            router: rng.floats(experts * hidden),
            gate_up: rng.floats(experts * columns * hidden),
            down: rng.floats(experts * hidden * expert_width),
            a: rng.floats(factors * hidden),
            b: rng.floats(factors * hidden),
        }
    }

    fn layer(&self, activation: Activation) -> MoeLayer<'_> {
        MoeLayer {
            shape: SHAPE,
            options: RouteOptions::default(),
            activation,
            placement: &self.placement,
            router: &self.router,
            router_bias: None,
            gate_up: &self.gate_up,
            gate_up_bias: None,
            down: &self.down,
            down_bias: None,
        }
    }

    fn factors(&self, site: Site, virtual_id: usize) -> Option<Factors<'_>> {
        let (out, inner) = match site {
            Site::ExpertDown => (SHAPE.hidden, SHAPE.expert_width),
            _ => (SHAPE.expert_width, SHAPE.hidden),
        };
        let place = match site {
            Site::ExpertGate => 0,
            Site::ExpertUp => 1,
            _ => 2,
        };
        let base = (place * SLOTS * SHAPE.experts + virtual_id) * RANK * SHAPE.hidden;
        Some(Factors {
            bias: None,
            rank: RANK,
            scale: 0.5,
            a: &self.a[base..base + RANK * inner],
            b: &self.b[base..base + out * RANK],
        })
    }

    /// The matrix rows `row(o)` of every expert plus the change of `slot` at `site`.
    fn merge(&self, w: &mut [f32], site: Site, slot: usize, rows: usize, row: impl Fn(usize) -> usize) {
        for e in 0..SHAPE.experts {
            let factor = self.factors(site, slot * SHAPE.experts + e).unwrap();
            let out = factor.b.len() / RANK;
            let inner = factor.a.len() / RANK;
            for o in 0..out {
                for i in 0..inner {
                    let mut sum = 0.0;
                    for r in 0..RANK {
                        sum += factor.b[o * RANK + r] * factor.a[r * inner + i];
                    }
                    w[(e * rows + row(o)) * inner + i] += factor.scale * sum;
                }
            }
        }
    }
}

#[test]
fn a_mixed_batch_equals_a_merged_model_for_each_adapter() {
    let f = SHAPE.expert_width;
    let d = SHAPE.hidden;
    let kinds = [
        Activation::Silu,
        Activation::Gelu,
        Activation::SwigluClamped { alpha: 1.702, limit: 7.0 },
        Activation::ReluSquared,
    ];
    each_case(&kinds, |&kind| {
        let weights = Weights::new(kind);
        let layer = weights.layer(kind);
        let mapping = [0, 1, -1, 1, 0, -1, 1, 1, 0];
        let mixed = moe_layer(&layer, &weights.x, &mapping, SLOTS, &|s, v| weights.factors(s, v));
        for slot in [-1, 0, 1] {
            let mut gate_up = weights.gate_up.clone();
            let mut down = weights.down.clone();
            if let Ok(s) = usize::try_from(slot) {
                let columns = kind.input_columns(f);
                let (gate, up): (Column, Column) = match kind {
                    Activation::SwigluClamped { .. } => (|o| 2 * o, |o| 2 * o + 1),
                    Activation::ReluSquared => (|o| o, |o| o),
                    _ => (|o| o, |o| o + SHAPE.expert_width),
                };
                if kind.gated() {
                    weights.merge(&mut gate_up, Site::ExpertGate, s, columns, gate);
                }
                weights.merge(&mut gate_up, Site::ExpertUp, s, columns, up);
                weights.merge(&mut down, Site::ExpertDown, s, d, |o| o);
            }
            let merged = MoeLayer { gate_up: &gate_up, down: &down, ..layer };
            let alone = moe_layer(&merged, &weights.x, &[-1; TOKENS], SLOTS, &|_, _| None);
            for t in 0..TOKENS {
                if mapping[t] == slot {
                    let error = rel_err(&mixed.out[t * d..(t + 1) * d], &alone.out[t * d..(t + 1) * d]);
                    if error > TOL_F32 {
                        return Err(format!("slot {slot}, token {t}: {error}"));
                    }
                }
            }
        }
        Ok(())
    });
}

/// Columns start..end of a row-major matrix.
fn columns(w: &[f32], width: usize, start: usize, end: usize) -> Vec<f32> {
    w.chunks(width).flat_map(|row| row[start..end].to_vec()).collect()
}

/// World size 4 with two expert groups: experts are split by `rank / 2`, their width by `rank % 2`. Slicing by the outer
/// rank instead reads past the width from rank 2 on.
#[test]
fn partial_sums_of_four_ranks_add_up_when_experts_and_their_width_are_split() {
    let (d, f) = (SHAPE.hidden, SHAPE.expert_width);
    let weights = Weights::new(Activation::Silu);
    let layer = weights.layer(Activation::Silu);
    let mapping = [0, 1, -1, 1, 0, -1, 1, 1, 0];
    let whole = moe_layer(&layer, &weights.x, &mapping, SLOTS, &|s, v| weights.factors(s, v));
    let mut sum = vec![0.0; whole.out.len()];
    for rank in 0..4 {
        let (ep_rank, moe_tp_rank) = (rank / 2, rank % 2);
        let (start, end) = [(0, 3), (3, 5)][moe_tp_rank];
        let width = end - start;
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for e in 2 * ep_rank..2 * ep_rank + 2 {
            for half in [0, f] {
                let base = e * 2 * f + half;
                gate_up.extend_from_slice(&weights.gate_up[(base + start) * d..(base + end) * d]);
            }
            down.extend(columns(&weights.down[e * d * f..(e + 1) * d * f], f, start, end));
        }

        // local virtual id -> that of the whole layer
        let global = |v: usize| v / 2 * SHAPE.experts + ep_rank * 2 + v % 2;
        let mut down_a = Vec::new();
        for v in 0..SLOTS * 2 {
            let factor = weights.factors(Site::ExpertDown, global(v)).unwrap();
            down_a.push(columns(factor.a, f, start, end));
        }
        let factors = |site, v: usize| {
            let mut factor = weights.factors(site, global(v))?;
            match site {
                Site::ExpertDown => factor.a = &down_a[v],
                _ => factor.b = &factor.b[start * RANK..end * RANK],
            }
            Some(factor)
        };
        let part = MoeLayer {
            shape: MoeShape { expert_width: width, ..SHAPE },
            placement: &Placement::linear(SHAPE.experts, 2, ep_rank).unwrap(),
            gate_up: &gate_up,
            down: &down,
            ..layer
        };
        let output = moe_layer(&part, &weights.x, &mapping, SLOTS, &factors);
        assert_eq!(output.routed, whole.routed);
        for i in 0..sum.len() {
            sum[i] += output.out[i];
        }
    }
    assert!(rel_err(&sum, &whole.out) < TOL_F32);
}
