//! The layer of the oracle as a whole: adapters against merged weights, ranks against one device.
#![expect(
    clippy::needless_range_loop,
    reason = "rows index several slices at once"
)]

mod common;

use common::{Rng, TOL_F32, each_case, rel_err};
use wgmoe::activation::Activation;
use wgmoe::adapter::Site;
use wgmoe::reference::{Factors, MoeLayer, moe_layer};
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;

/// Row of an adapter's half to row of the gate_up matrix.
type Column = fn(usize) -> usize;

const SHAPE: MoeShape = MoeShape {
    experts: 4,
    top_k: 2,
    hidden: 6,
    expert_width: 5,
};
const TOKENS: usize = 9;
const SLOTS: usize = 2;
const RANK: usize = 3;

/// Random weights of a layer and of one factor for each site and virtual expert.
struct Weights {
    x: Vec<f32>,
    router: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Weights {
    fn new(activation: Activation) -> Self {
        let MoeShape {
            experts,
            hidden,
            expert_width,
            ..
        } = SHAPE;
        let mut rng = Rng::new(11);
        let columns = activation.input_columns(expert_width);
        let factors = 3 * SLOTS * experts * RANK;
        Self {
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
            table: &[0, 1, 2, 3],
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
            rank: RANK,
            scale: 0.5,
            a: &self.a[base..base + RANK * inner],
            b: &self.b[base..base + out * RANK],
        })
    }

    /// The matrix rows `row(o)` of every expert plus the change of `slot` at `site`.
    fn merge(
        &self,
        w: &mut [f32],
        site: Site,
        slot: usize,
        rows: usize,
        row: impl Fn(usize) -> usize,
    ) {
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
        Activation::SwigluClamped {
            alpha: 1.702,
            limit: 7.0,
        },
        Activation::ReluSquared,
    ];
    each_case(&kinds, |&kind| {
        let weights = Weights::new(kind);
        let layer = weights.layer(kind);
        let mapping = [0, 1, -1, 1, 0, -1, 1, 1, 0];
        let mixed = moe_layer(&layer, &weights.x, &mapping, SLOTS, &|s, v| {
            weights.factors(s, v)
        });
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
            let merged = MoeLayer {
                gate_up: &gate_up,
                down: &down,
                ..layer
            };
            let alone = moe_layer(&merged, &weights.x, &[-1; TOKENS], SLOTS, &|_, _| None);
            for t in 0..TOKENS {
                if mapping[t] == slot {
                    let error = rel_err(
                        &mixed.out[t * d..(t + 1) * d],
                        &alone.out[t * d..(t + 1) * d],
                    );
                    if error > TOL_F32 {
                        return Err(format!("slot {slot}, token {t}: {error}"));
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn partial_sums_of_the_ranks_add_up_to_the_whole_layer() {
    let weights = Weights::new(Activation::Silu);
    let layer = weights.layer(Activation::Silu);
    let mapping = [0, 1, -1, 1, 0, -1, 1, 1, 0];
    let whole = moe_layer(&layer, &weights.x, &mapping, SLOTS, &|s, v| {
        weights.factors(s, v)
    });
    let gate_up_rows = weights.gate_up.len() / 2;
    let down_rows = weights.down.len() / 2;
    let mut sum = vec![0.0; whole.out.len()];
    for (rank, table) in [[0, 1, -1, -1], [-1, -1, 0, 1]].iter().enumerate() {
        let part = MoeLayer {
            table,
            gate_up: &weights.gate_up[rank * gate_up_rows..][..gate_up_rows],
            down: &weights.down[rank * down_rows..][..down_rows],
            ..layer
        };
        // local virtual ids to those of the whole layer
        let factors = |s, v: usize| weights.factors(s, v / 2 * SHAPE.experts + rank * 2 + v % 2);
        let output = moe_layer(&part, &weights.x, &mapping, SLOTS, &factors);
        assert_eq!(output.routed, whole.routed);
        for i in 0..sum.len() {
            sum[i] += output.out[i];
        }
    }
    assert!(rel_err(&sum, &whole.out) < TOL_F32);
}
