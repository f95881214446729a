//! Head norm and rotary position of queries or keys.

use super::rms_norm;

/// Semantics: `result[i] = theta^(-2i / rotary_dim)`, result: `[rotary_dim / 2]`.
pub fn inverse_frequencies(theta: f64, rotary_dim: usize) -> Vec<f64> {
    let mut frequencies = Vec::new();
    for i in 0..rotary_dim / 2 {
        frequencies.push(theta.powf(-2.0 * i as f64 / rotary_dim as f64));
    }
    frequencies
}

/// Semantics: `x[t,h] = n·cos + rotate_half(n)·sin` with `n = rms_norm(x[t,h])`, angle = position · inverse frequency.
///
/// `x`: `[T, heads, head_dim]`, in place; `norm_weight`: `[head_dim]`, None for models without head norm; `positions`: `[T]`;
/// `inverse_frequencies`: `[rotary_dim / 2]`. Element i turns with element i + rotary_dim / 2 (the halves, not neighbours);
/// elements from rotary_dim on are normed only. cos and sin are f64.
pub fn rope(
    x: &mut [f32],
    norm_weight: Option<&[f32]>,
    eps: f64,
    positions: &[u32],
    heads: usize,
    head_dim: usize,
    inverse_frequencies: &[f64],
) {
    let half = inverse_frequencies.len();
    assert_eq!(x.len(), positions.len() * heads * head_dim, "x: [T, heads, head_dim]");
    assert!(2 * half <= head_dim, "the rotary part lies inside a head");
    for t in 0..positions.len() {
        for h in 0..heads {
            let base = (t * heads + h) * head_dim;
            let head = &mut x[base..base + head_dim];
            if let Some(weight) = norm_weight {
                let input = head.to_vec();
                rms_norm(&input, weight, eps, head);
            }
            for i in 0..half {
                let angle = f64::from(positions[t]) * inverse_frequencies[i];
                let (sin, cos) = angle.sin_cos();
                let (first, second) = (f64::from(head[i]), f64::from(head[i + half]));
                head[i] = (first * cos - second * sin) as f32;
                head[i + half] = (second * cos + first * sin) as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_turn_together_and_the_rest_of_the_head_stays() {
        let mut x = [1.0, 2.0, 3.0, 4.0, 9.0];
        let quarter = std::f64::consts::FRAC_PI_2;
        rope(&mut x, None, 0.0, &[1], 1, 5, &[quarter, 0.0]);
        let expected = [-3.0, 2.0, 1.0, 4.0, 9.0];
        for i in 0..5 {
            assert!((x[i] - expected[i]).abs() < 1e-6, "{x:?}");
        }
    }

    #[test]
    fn position_zero_is_the_head_norm_alone() {
        let mut x = [1.0, 7.0, 3.0, 4.0];
        let mut expected = [f32::NAN; 4];
        rms_norm(&x, &[1.0, 0.5], 1e-6, &mut expected);
        rope(&mut x, Some(&[1.0, 0.5]), 1e-6, &[0], 2, 2, &inverse_frequencies(1e4, 2));
        assert_eq!(x, expected);
    }

    #[test]
    fn frequencies_fall_from_one_towards_one_over_theta() {
        let got = inverse_frequencies(10_000.0, 4);
        assert_eq!(got.len(), 2);
        assert!((got[0] - 1.0).abs() < 1e-12 && (got[1] - 0.01).abs() < 1e-12);
    }
}
