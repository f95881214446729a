//! One matrix product a pair, with the matrix of its expert.

use super::index;

/// Semantics: `y[p] = w[ids[p]] · x[p / row_div]`.
///
/// `x`: `[rows, in]`, `w`: `[E_l, out, in]`, `ids`: `[P]`, `y`: `[P, out]`. `row_div` is A for gate and up (x has T rows) and 1
/// for down (x has P rows). Rows of ids outside 0..E_l are left alone, and the x rows of such pairs are not read.
pub fn expert_gemm(x: &[f32], w: &[f32], ids: &[i32], row_div: usize, out_dim: usize, in_dim: usize, y: &mut [f32]) {
    let experts_local = w.len() / (out_dim * in_dim);
    assert_eq!(w.len(), experts_local * out_dim * in_dim, "w: [E_l, out, in]");
    assert_eq!(y.len(), ids.len() * out_dim, "y: [P, out]");
    for p in 0..ids.len() {
        let Some(e) = index(ids[p]).filter(|e| *e < experts_local) else {
            continue;
        };
        let row = p / row_div;
        for o in 0..out_dim {
            let mut sum = 0.0;
            for i in 0..in_dim {
                sum += f64::from(w[(e * out_dim + o) * in_dim + i]) * f64::from(x[row * in_dim + i]);
            }
            y[p * out_dim + o] = sum as f32;
        }
    }
}

/// Semantics: `y[p] += bias[ids[p]]`.
///
/// `bias`: `[E_l, out]`, `ids`: `[P]`, `y`: `[P, out]`. Rows of ids outside 0..E_l are left alone.
pub fn expert_bias(bias: &[f32], ids: &[i32], out_dim: usize, y: &mut [f32]) {
    assert_eq!(y.len(), ids.len() * out_dim, "y: [P, out]");
    let experts_local = bias.len() / out_dim;
    for p in 0..ids.len() {
        let Some(e) = index(ids[p]).filter(|e| *e < experts_local) else {
            continue;
        };
        for o in 0..out_dim {
            y[p * out_dim + o] += bias[e * out_dim + o];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const W: [f32; 8] = [1.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0];

    #[test]
    fn gate_and_up_read_the_token_and_down_reads_the_pair() {
        let ids = [1, 0, 0, 1];
        let mut y = [f32::NAN; 8];
        expert_gemm(&[1.0, 10.0, 2.0, 20.0], &W, &ids, 2, 2, 2, &mut y);
        assert_eq!(y, [32.0, 54.0, 1.0, 10.0, 2.0, 20.0, 64.0, 108.0]);
        let x = [1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0, 0.0];
        expert_gemm(&x, &W, &ids, 1, 2, 2, &mut y);
        assert_eq!(y, [2.0, 4.0, 2.0, 0.0, 3.0, 0.0, 8.0, 16.0]);
    }

    #[test]
    fn rows_of_ids_that_are_not_held_are_left_alone() {
        let mut y = [f32::NAN; 6];
        expert_gemm(&[f32::NAN, 0.0, 1.0, 1.0, f32::NAN, 0.0], &W, &[-1, 1, 2], 1, 2, 2, &mut y);
        expert_bias(&[1.0, 1.0, 2.0, 2.0], &[-1, 1, 2], 2, &mut y);
        assert!(y[0].is_nan() && y[1].is_nan() && y[4].is_nan() && y[5].is_nan());
        assert_eq!(y[2..4], [7.0, 11.0]);
    }
}
