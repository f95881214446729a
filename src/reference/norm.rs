//! Root-mean-square norm.

/// Semantics: `out[t] = weight · x[t] / sqrt(mean(x[t]²) + eps)`.
///
/// `x`: `[T, D]`, `weight`: `[D]`, `out`: `[T, D]`; D is the length of `weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f64, out: &mut [f32]) {
    let d = weight.len();
    assert_eq!(x.len() % d, 0, "x: [T, D]");
    assert_eq!(x.len(), out.len(), "out: [T, D]");
    for t in 0..x.len() / d {
        let mut squares = 0.0;
        for i in 0..d {
            squares += f64::from(x[t * d + i]) * f64::from(x[t * d + i]);
        }
        let factor = 1.0 / (squares / d as f64 + eps).sqrt();
        for i in 0..d {
            out[t * d + i] = (f64::from(weight[i]) * f64::from(x[t * d + i]) * factor) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_scaled_to_mean_square_one_and_zeros_stay_zero() {
        let mut out = [f32::NAN; 4];
        rms_norm(&[1.0, 7.0, 0.0, 0.0], &[1.0, 2.0], 1e-12, &mut out);
        assert_eq!(out, [0.2, 2.8, 0.0, 0.0]);
    }
}
