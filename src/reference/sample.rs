//! The next token from one row of logits.

use super::cleaned;

/// Semantics: `argmax_i logits[i]`, the lower index of equals; NaN counts as -inf, +inf as the largest finite.
///
/// `logits`: `[vocab]`. A row without finite logits gives 0.
pub fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for i in 1..logits.len() {
        if cleaned(logits[i]) > cleaned(logits[best]) {
            best = i;
        }
    }
    best
}

/// Semantics: the first i with `Σ_{j<=i} kept_j > u · Σ_j kept_j`, where kept are the probabilities that the filters leave.
///
/// `logits`: `[vocab]`, cleaned as in [`argmax`]; `u` in 0..1. Filters in order: entries at least as large as the
/// `top_k`-th largest (0 keeps all); softmax of logit / temperature over those; the smallest set by falling probability
/// whose mass reaches `top_p` (1 keeps all). Ties at either threshold all stay, so the result does not depend on a sort.
/// A temperature of 0 is [`argmax`].
pub fn sample(logits: &[f32], temperature: f32, top_k: usize, top_p: f32, u: f64) -> usize {
    if temperature <= 0.0 {
        return argmax(logits);
    }
    let mut row = vec![0.0; logits.len()];
    for i in 0..logits.len() {
        row[i] = cleaned(logits[i]);
    }
    let max = row[argmax(logits)];
    if max == f32::NEG_INFINITY {
        return 0;
    }

    // top-k
    let mut threshold = f32::NEG_INFINITY;
    if top_k > 0 && top_k < row.len() {
        let mut sorted = row.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        threshold = sorted[top_k - 1];
    }

    // softmax, without the division
    let mut masses = vec![0.0; row.len()];
    let mut total = 0.0;
    for i in 0..row.len() {
        if row[i] >= threshold {
            masses[i] = ((f64::from(row[i]) - f64::from(max)) / f64::from(temperature)).exp();
            total += masses[i];
        }
    }

    // top-p
    if top_p < 1.0 {
        let mut sorted = masses.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let mut mass = 0.0;
        let mut least = sorted[0];
        for i in 0..sorted.len() {
            mass += sorted[i];
            least = sorted[i];
            if mass >= f64::from(top_p) * total {
                break;
            }
        }
        total = 0.0;
        for i in 0..masses.len() {
            if masses[i] < least {
                masses[i] = 0.0;
            }
            total += masses[i];
        }
    }

    let mut cumulative = 0.0;
    let mut last = 0;
    for i in 0..masses.len() {
        if masses[i] == 0.0 {
            continue;
        }
        cumulative += masses[i];
        last = i;
        if cumulative > u * total {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn argmax_takes_the_lower_of_equals_and_no_nan() {
        assert_eq!(argmax(&[f32::NAN, 1.0, 2.0, 2.0]), 2);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), 0);
        assert_eq!(argmax(&[1.0, f32::INFINITY, f32::INFINITY]), 1);
    }

    #[test]
    fn filters_keep_the_ties_at_their_threshold() {
        // probabilities 1/8, 1/2, 1/4, 1/8
        let logits = [0.0, 4f32.ln(), 2f32.ln(), 0.0];
        let walk = |top_k, top_p| {
            let mut seen = Vec::new();
            for step in 0..1000 {
                let i = sample(&logits, 1.0, top_k, top_p, f64::from(step) / 1000.0);
                if seen.last() != Some(&i) {
                    seen.push(i);
                }
            }
            seen
        };
        assert_eq!(walk(0, 1.0), [0, 1, 2, 3]);
        assert_eq!(walk(1, 1.0), [1]);
        assert_eq!(walk(2, 1.0), [1, 2]);
        assert_eq!(walk(3, 1.0), [0, 1, 2, 3]);
        assert_eq!(walk(0, 0.4), [1]);
        assert_eq!(walk(0, 0.7), [1, 2]);
        assert_eq!(walk(0, 0.8), [0, 1, 2, 3]);
        assert_eq!(walk(0, 0.0), [1]);
    }

    #[test]
    fn the_draw_walks_the_masses_in_index_order() {
        let logits = [0.0, 4f32.ln(), 2f32.ln(), 0.0];
        let cases = [(0.0, 0), (0.124, 0), (0.126, 1), (0.624, 1), (0.626, 2), (0.874, 2), (0.999, 3)];
        for (u, expected) in cases {
            assert_eq!(sample(&logits, 1.0, 0, 1.0, u), expected, "u = {u}");
        }
    }

    #[test]
    fn zero_temperature_is_greedy_and_no_finite_logit_is_zero() {
        assert_eq!(sample(&[0.0, 3.0, 1.0], 0.0, 0, 1.0, 0.9), 1);
        assert_eq!(sample(&[f32::NAN, f32::NAN], 1.0, 0, 1.0, 0.9), 0);
    }
}
