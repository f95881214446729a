//! Log-probabilities from a row of logits, in f64.

use anyhow::ensure;

/// ln Σ exp(row), the normaliser of a row: `row[i] - log_sum_exp(row)` is the log-probability of token i.
///
/// A row that is not finite is an error: its probabilities would mean nothing.
pub fn log_sum_exp(row: &[f32]) -> anyhow::Result<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    ensure!(row.iter().all(|x| x.is_finite()), "the model gave logits that are not finite");
    let sum: f64 = row.iter().map(|x| (f64::from(*x) - f64::from(max)).exp()).sum();
    Ok(f64::from(max) + sum.ln())
}

/// The `k` best tokens of a row with their log-probabilities: best first, ties to the lower id.
pub fn top(row: &[f32], normaliser: f64, k: usize) -> Vec<(usize, f64)> {
    let mut ids: Vec<usize> = (0..row.len()).collect();
    let better = |a: &usize, b: &usize| row[*b].total_cmp(&row[*a]).then(a.cmp(b));
    if k < ids.len() {
        ids.select_nth_unstable_by(k, better);
        ids.truncate(k);
    }
    ids.sort_unstable_by(better);
    ids.into_iter().map(|id| (id, f64::from(row[id]) - normaliser)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_to_one_even_for_large_logits() {
        let row = [1000.0, 999.0, -1000.0, 998.5];
        let normaliser = log_sum_exp(&row).unwrap();
        let sum: f64 = row.iter().map(|x| (f64::from(*x) - normaliser).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        assert!(log_sum_exp(&[0.0, f32::NAN]).is_err());
    }

    #[test]
    fn the_best_come_first_and_ties_go_to_the_lower_id() {
        let row = [1.0, 3.0, 2.0, 3.0, 0.0];
        let ids = |k| top(&row, 0.0, k).into_iter().map(|(id, _)| id).collect::<Vec<_>>();
        assert_eq!(ids(0), [0usize; 0]);
        assert_eq!(ids(1), [1]);
        assert_eq!(ids(3), [1, 3, 2]);
        assert_eq!(ids(5), [1, 3, 2, 0, 4]);
    }
}
