//! The low-rank change of one projection.

use super::index;

/// The factors of one slot, expert and projection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors<'a> {
    /// R; 0 is no change.
    pub rank: usize,
    /// s: alpha / R, or alpha / sqrt(R) with rsLoRA.
    pub scale: f32,
    /// `[R, in]`
    pub a: &'a [f32],
    /// `[out, R]`
    pub b: &'a [f32],
    /// `[out]` (`lora_bias`)
    pub bias: Option<&'a [f32]>,
}

/// Semantics: `y[p, y_column..][..out] += s · (B · (A · x[p / row_div]) + bias)`.
///
/// `x`: `[rows, in]`, `virtual_ids`: `[P]`, `y`: `[P, y_stride]`, of which columns y_column..y_column + out change. `factors`
/// maps a virtual id (slot·E_l + expert) to what is loaded there. Pairs with a negative id or without factors are left
/// alone and their rows are not read; unshifted ids must be masked by the caller. The shrunk vector A·x stays f64.
pub fn lora<'a>(
    x: &[f32],
    row_div: usize,
    virtual_ids: &[i32],
    factors: &dyn Fn(usize) -> Option<Factors<'a>>,
    out_dim: usize,
    in_dim: usize,
    y: &mut [f32],
    y_stride: usize,
    y_column: usize,
) {
    assert!(y_column + out_dim <= y_stride, "the columns lie inside a row of y");
    assert_eq!(y.len(), virtual_ids.len() * y_stride, "y: [P, y_stride]");
    for p in 0..virtual_ids.len() {
        let Some(factor) = index(virtual_ids[p]).and_then(factors) else {
            continue;
        };
        if factor.rank == 0 {
            continue;
        }
        assert_eq!(factor.a.len(), factor.rank * in_dim, "a: [R, in]");
        assert_eq!(factor.b.len(), out_dim * factor.rank, "b: [out, R]");
        let row = p / row_div;

        // shrink
        let mut shrunk = vec![0.0; factor.rank];
        for r in 0..factor.rank {
            for i in 0..in_dim {
                shrunk[r] += f64::from(factor.a[r * in_dim + i]) * f64::from(x[row * in_dim + i]);
            }
        }

        // expand
        for o in 0..out_dim {
            let mut sum = factor.bias.map_or(0.0, |bias| f64::from(bias[o]));
            for r in 0..factor.rank {
                sum += f64::from(factor.b[o * factor.rank + r]) * shrunk[r];
            }
            let at = p * y_stride + y_column + o;
            y[at] = (f64::from(y[at]) + f64::from(factor.scale) * sum) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_of_different_rank_change_only_their_pairs_and_columns() {
        let one = Factors { rank: 1, scale: 2.0, a: &[1.0, 1.0], b: &[1.0, 10.0], bias: None };
        let two = Factors {
            rank: 2,
            scale: 0.5,
            a: &[1.0, 0.0, 0.0, 1.0],
            b: &[0.0, 1.0, 1.0, 0.0],
            bias: Some(&[4.0, 0.0]),
        };
        let none = Factors { rank: 0, scale: 1.0, a: &[], b: &[], bias: None };
        let factors = |v: usize| match v {
            0 => Some(one),
            3 => Some(two),
            4 => Some(none),
            _ => None,
        };
        let x = [1.0, 2.0, 3.0, 4.0];
        // pairs of token 0: slots with rank 1 and 2; of token 1: rank 0 and nothing loaded
        let mut y = [1.0; 12];
        lora(&x, 2, &[0, 3, 4, 1], &factors, 2, 2, &mut y, 3, 1);
        assert_eq!(y, [1.0, 7.0, 61.0, 1.0, 4.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_negative_id_reads_and_writes_nothing() {
        let factors = |_: usize| Some(Factors { rank: 1, scale: 1.0, a: &[1.0], b: &[1.0], bias: None });
        let mut y = [5.0, 6.0];
        lora(&[f32::NAN, 1.0], 1, &[-7, 0], &factors, 1, 1, &mut y, 1, 0);
        assert_eq!(y, [5.0, 7.0]);
    }
}
