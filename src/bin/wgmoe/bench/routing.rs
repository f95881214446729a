//! Router weights and tokens that spread tokens over experts as asked, and what was spread.

use std::collections::{HashMap, HashSet};

use wgmoe::dtype::DType;
use wgmoe::kernels::random::Random;
use wgmoe::shape::MoeShape;

use crate::bench::shape::Routing;

/// Logit of the expert that every token visits.
const CERTAIN: f32 = 30.0;
/// Standard deviation of the noise of a Gumbel distribution: the largest of log p + noise are then drawn with about the
/// probabilities p.
const NOISE: f32 = 1.28;

/// Router weights `[E, D]`. The first value of each token is 1 (see [`tokens`]), so the first column is what an expert is
/// favoured by.
pub fn router(shape: &MoeShape, routing: Routing, seed: u32) -> Vec<f32> {
    let MoeShape { experts, hidden: d, .. } = *shape;
    let random = Random { dtype: DType::F32, exponent: 0, seed };
    // Values of tokens and weights are uniform: their variance is a third of the square of their range.
    let scale = 3.0 * NOISE / (d as f32).sqrt();
    let mut values: Vec<f32> = (0..experts * d).map(|i| random.value(i as u32) * scale).collect();
    for place in 0..experts {
        // Popular experts do not stand side by side.
        let expert = (place * 37 + 11) % experts;
        values[expert * d] = match routing {
            Routing::Uniform => 0.0,
            Routing::Zipf(s) => (-s * ((place + 1) as f64).ln()) as f32,
            Routing::OneExpert => {
                if place == 0 {
                    CERTAIN
                } else {
                    0.0
                }
            }
        };
    }
    values
}

/// Rows `[T, D]`.
pub fn tokens(n: usize, d: usize, seed: u32) -> Vec<f32> {
    let random = Random { dtype: DType::F32, exponent: 0, seed };
    let mut rows: Vec<f32> = (0..n * d).map(|i| random.value(i as u32)).collect();
    rows.iter_mut().step_by(d).for_each(|v| *v = 1.0);
    rows
}

/// What a batch touches.
#[derive(Debug, Clone, Copy, Default)]
pub struct Touched {
    /// Experts with a pair, and the largest number of pairs of one.
    pub experts: usize,
    pub most_pairs: usize,
    /// Different (adapter, expert) with a pair, weighted by rank.
    pub adapter_ranks: usize,
    /// Pairs with an adapter, weighted by rank.
    pub pair_ranks: usize,
}

/// Counts over `ids` `[T, A]` and the adapter of each token; `ranks` are those of the adapters.
pub fn touched(ids: &[i32], top_k: usize, slots: &[Option<usize>], ranks: &[usize]) -> Touched {
    let mut pairs: HashMap<i32, usize> = HashMap::new();
    let mut adapted = HashSet::new();
    let mut touched = Touched::default();
    for (token, chosen) in ids.chunks(top_k).enumerate() {
        for id in chosen.iter().copied().filter(|id| *id >= 0) {
            *pairs.entry(id).or_default() += 1;
            if let Some(slot) = slots[token] {
                touched.pair_ranks += ranks[slot];
                if adapted.insert((slot, id)) {
                    touched.adapter_ranks += ranks[slot];
                }
            }
        }
    }
    touched.experts = pairs.len();
    touched.most_pairs = pairs.values().copied().max().unwrap_or(0);
    touched
}
