//! Top-k selection over router logits.

use super::{cleaned, sigmoid};
use crate::router::{GroupScore, RouteOptions, STATUS_NON_FINITE, Score};

/// What [`route`] returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Routed {
    /// `topk_ids`: `[T, A]`, best first; -1 where no candidate was left.
    pub ids: Vec<i32>,
    /// `topk_weights`: `[T, A]`; 0 beside an id of -1.
    pub weights: Vec<f32>,
    /// Status bits: `STATUS_NON_FINITE` or 0.
    pub status: u32,
    /// `[T]`: the smallest difference of keys that decided the ids of the token: between neighbours from the best to the
    /// first not selected, and between the last kept and the first dropped group. +inf where nothing was decided.
    /// A kernel that computes its keys in f32 owes the same ids only where this exceeds its error.
    pub gap: Vec<f32>,
}

/// Semantics: `ids[t] = argtop_A(key[t])`, `weights[t,k] = scale · score[t,ids[t,k]] / Σ_j score[t,ids[t,j]]`.
///
/// `logits`: `[T, E]`, `bias`: `[E]`, results `[T, A]`. The key is the logit itself where the score is monotone in it (no bias
/// and one group), else score + bias; the bias never reaches the weights, and without `renormalise` nothing divides.
/// NaN counts as -inf, +inf as the largest finite, ties go to the lower index. Experts whose logit is -inf are no
/// candidates and take no part in the softmax. A sum of zero leaves the weights at zero.
pub fn route(
    logits: &[f32],
    bias: Option<&[f32]>,
    tokens: usize,
    experts: usize,
    top_k: usize,
    options: &RouteOptions,
) -> Routed {
    assert_eq!(logits.len(), tokens * experts, "logits: [T, E]");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), experts, "bias: [E]");
    }
    let groups = options.groups as usize;
    assert!(groups >= 1 && experts.is_multiple_of(groups), "the groups must divide E");

    let mut routed = Routed {
        ids: vec![-1; tokens * top_k],
        weights: vec![0.0; tokens * top_k],
        status: 0,
        gap: vec![f32::INFINITY; tokens],
    };
    for t in 0..tokens {
        let mut row = vec![0.0; experts];
        for e in 0..experts {
            row[e] = cleaned(logits[t * experts + e]);
        }
        let scores = scores(&row, options.score);
        let mut keys = vec![f64::NEG_INFINITY; experts];
        for e in 0..experts {
            if row[e] == f32::NEG_INFINITY {
                continue;
            }
            keys[e] = match bias {
                Some(bias) => key_with_bias(scores[e], bias[e]),
                None if groups > 1 => scores[e],
                None => f64::from(row[e]),
            };
        }
        let mut gap = f64::INFINITY;
        if groups > 1 {
            gap = drop_groups(&mut keys, options);
        }

        let mut sum = 0.0;
        let mut previous = f64::INFINITY;
        for k in 0..top_k {
            let Some(e) = best(&keys) else {
                routed.status |= STATUS_NON_FINITE;
                break;
            };
            gap = gap.min(previous - keys[e]);
            previous = keys[e];
            keys[e] = f64::NEG_INFINITY;
            sum += scores[e];
            routed.ids[t * top_k + k] = i32::try_from(e).expect("E fits an i32");
        }
        if let Some(e) = best(&keys) {
            gap = gap.min(previous - keys[e]);
        }
        routed.gap[t] = gap as f32;

        for k in 0..top_k {
            let Some(e) = super::index(routed.ids[t * top_k + k]) else {
                continue;
            };
            let mut weight = scores[e];
            if options.renormalise && sum > 0.0 {
                weight /= sum;
            }
            routed.weights[t * top_k + k] = (weight * f64::from(options.scale)) as f32;
        }
    }
    routed
}

/// Scores of one row of cleaned logits: `[E]`; 0 where the logit is -inf.
fn scores(row: &[f32], score: Score) -> Vec<f64> {
    let mut scores = vec![0.0; row.len()];
    match score {
        Score::Sigmoid => {
            for e in 0..row.len() {
                scores[e] = sigmoid(f64::from(row[e]));
            }
        }
        Score::Softmax => {
            let mut max = f64::NEG_INFINITY;
            for e in 0..row.len() {
                max = max.max(f64::from(row[e]));
            }
            if max == f64::NEG_INFINITY {
                return scores;
            }
            let mut sum = 0.0;
            for e in 0..row.len() {
                scores[e] = (f64::from(row[e]) - max).exp();
                sum += scores[e];
            }
            for e in 0..row.len() {
                scores[e] /= sum;
            }
        }
    }
    scores
}

/// score + bias; a bias that is not finite is cleaned like a logit.
fn key_with_bias(score: f64, bias: f32) -> f64 {
    score + f64::from(cleaned(bias))
}

/// Takes the experts of all but the best groups out of `keys`: `[E]`; returns the gap between the groups.
fn drop_groups(keys: &mut [f64], options: &RouteOptions) -> f64 {
    let groups = options.groups as usize;
    let size = keys.len() / groups;
    let mut group_keys = vec![f64::NEG_INFINITY; groups];
    for g in 0..groups {
        let (mut first, mut second) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
        for e in g * size..(g + 1) * size {
            if keys[e] > first {
                second = first;
                first = keys[e];
            } else if keys[e] > second {
                second = keys[e];
            }
        }
        group_keys[g] = first;
        if options.group_score == GroupScore::TopTwo && second > f64::NEG_INFINITY {
            group_keys[g] += second;
        }
    }

    let mut kept = vec![false; groups];
    let mut last = f64::INFINITY;
    for _ in 0..options.top_groups {
        let Some(g) = best(&group_keys) else {
            break;
        };
        kept[g] = true;
        last = group_keys[g];
        group_keys[g] = f64::NEG_INFINITY;
    }
    for e in 0..keys.len() {
        if !kept[e / size] {
            keys[e] = f64::NEG_INFINITY;
        }
    }
    match best(&group_keys) {
        Some(g) => last - group_keys[g],
        None => f64::INFINITY,
    }
}

/// Index of the largest key above -inf; the lower one of equals.
fn best(keys: &[f64]) -> Option<usize> {
    let mut found: Option<usize> = None;
    for e in 0..keys.len() {
        if keys[e] > found.map_or(f64::NEG_INFINITY, |f| keys[f]) {
            found = Some(e);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::RouteOptions;

    fn close(got: &[f32], expected: &[f32]) {
        assert_eq!(got.len(), expected.len());
        for i in 0..got.len() {
            assert!((got[i] - expected[i]).abs() < 1e-6, "{got:?} {expected:?}");
        }
    }

    #[test]
    fn softmax_weights_are_renormalised_over_the_selected() {
        let logits = [0.0, 2f32.ln(), 4f32.ln(), 1f32.ln()];
        let routed = route(&logits, None, 1, 4, 2, &RouteOptions::default());
        assert_eq!(routed.ids, [2, 1]);
        close(&routed.weights, &[2.0 / 3.0, 1.0 / 3.0]);
        close(&routed.gap, &[2f32.ln()]);
        let options = RouteOptions { renormalise: false, scale: 2.0, ..Default::default() };
        close(&route(&logits, None, 1, 4, 2, &options).weights, &[1.0, 0.5]);
    }

    #[test]
    fn ties_go_to_the_lower_index_also_for_signed_zeros() {
        let routed = route(&[-0.0, 1.0, 0.0, 1.0], None, 1, 4, 4, &Default::default());
        assert_eq!(routed.ids, [1, 3, 0, 2]);
        assert_eq!(routed.gap, [0.0]);
    }

    #[test]
    fn nan_is_last_and_infinity_is_the_largest_finite() {
        let nan = f32::from_bits(0xffc0_0001);
        let logits = [nan, f32::INFINITY, f32::MAX, f32::NEG_INFINITY];
        let routed = route(&logits, None, 1, 4, 3, &Default::default());
        assert_eq!(routed.ids, [1, 2, -1]);
        close(&routed.weights, &[0.5, 0.5, 0.0]);
        assert_eq!(routed.status, STATUS_NON_FINITE);
    }

    #[test]
    fn a_row_without_finite_logits_selects_nothing_and_spares_its_neighbours() {
        let logits = [f32::NAN, f32::NAN, 1.0, 0.0];
        let routed = route(&logits, None, 2, 2, 1, &Default::default());
        assert_eq!(routed.ids, [-1, 0]);
        close(&routed.weights, &[0.0, 1.0]);
        assert_eq!(routed.status, STATUS_NON_FINITE);
    }

    #[test]
    fn bias_selects_but_does_not_weight() {
        let options = RouteOptions { score: Score::Sigmoid, renormalise: false, ..Default::default() };
        let bias = [0.0, 0.0, 1.0];
        let routed = route(&[0.0, 1.0, -1.0], Some(&bias), 1, 3, 2, &options);
        assert_eq!(routed.ids, [2, 1]);
        close(&routed.weights, &[0.268_941_43, 0.731_058_6]);
    }

    #[test]
    fn only_experts_of_the_best_groups_are_candidates() {
        let logits = [3.0, -9.0, 2.0, 2.0, 1.0, 1.0];
        let mut options = RouteOptions { score: Score::Sigmoid, groups: 3, top_groups: 1, ..Default::default() };
        let by_max = route(&logits, None, 1, 6, 2, &options);
        assert_eq!(by_max.ids, [0, 1]);
        options.group_score = GroupScore::TopTwo;
        let by_two = route(&logits, None, 1, 6, 2, &options);
        assert_eq!(by_two.ids, [2, 3]);
        let too_many = route(&logits, None, 1, 6, 3, &options);
        assert_eq!(too_many.ids, [2, 3, -1]);
        assert_eq!(too_many.status, STATUS_NON_FINITE);
    }

    #[test]
    fn scores_that_underflow_leave_zero_weights() {
        let options = RouteOptions { score: Score::Sigmoid, ..Default::default() };
        let routed = route(&[-2000.0, -3000.0], None, 1, 2, 1, &options);
        assert_eq!((routed.ids[0], routed.weights[0]), (0, 0.0));
    }
}
