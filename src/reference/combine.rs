//! The weighted sum over the experts of a token.

/// Semantics: `out[t] = Σ_k weights[t·A + k] · y[t·A + k]`, or `out[t] += …` with `accumulate`.
///
/// `y`: `[P, D]`, `weights`: `[P]`, `ids`: `[P]` localised, `out`: `[T, D]`. Pairs with a negative id are skipped: neither their
/// rows nor their weights are read. A token without pairs gets zeros (or keeps its row with `accumulate`).
pub fn combine(y: &[f32], weights: &[f32], ids: &[i32], top_k: usize, d: usize, out: &mut [f32], accumulate: bool) {
    assert_eq!(y.len(), ids.len() * d, "y: [P, D]");
    assert_eq!(weights.len(), ids.len(), "weights: [P]");
    let tokens = ids.len() / top_k;
    assert_eq!(out.len(), tokens * d, "out: [T, D]");
    for t in 0..tokens {
        for i in 0..d {
            let mut sum = 0.0;
            if accumulate {
                sum = f64::from(out[t * d + i]);
            }
            for p in t * top_k..(t + 1) * top_k {
                if ids[p] >= 0 {
                    sum += f64::from(weights[p]) * f64::from(y[p * d + i]);
                }
            }
            out[t * d + i] = sum as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_pairs_are_not_read() {
        let y = [1.0, 2.0, f32::NAN, f32::NAN, f32::NAN, f32::NAN, f32::NAN, f32::NAN];
        let weights = [0.5, f32::NAN, 1.0, 1.0];
        let ids = [3, -1, -2, i32::MIN];
        let mut out = [f32::NAN; 4];
        combine(&y, &weights, &ids, 2, 2, &mut out, false);
        assert_eq!(out, [0.5, 1.0, 0.0, 0.0]);
        let mut out = [1.0, 1.0, 7.0, 8.0];
        combine(&y, &weights, &ids, 2, 2, &mut out, true);
        assert_eq!(out, [1.5, 2.0, 7.0, 8.0]);
    }
}
