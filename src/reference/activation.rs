//! Gate and up halves to the input of the down projection.

use super::sigmoid;
use crate::activation::Activation;

/// Semantics: `out[p] = act(gate[p]) · up[p]`, as [`Activation`] defines it for each kind.
///
/// `gate_up`: `[P, 2F]` (`[P, F]` without a gate), `ids`: `[P]`, `out`: `[P, F]`. Rows of negative ids are neither read nor
/// written.
pub fn activation(gate_up: &[f32], ids: &[i32], f: usize, kind: Activation, out: &mut [f32]) {
    let columns = kind.input_columns(f);
    assert_eq!(gate_up.len(), ids.len() * columns, "gate_up: [P, 2F] or [P, F]");
    assert_eq!(out.len(), ids.len() * f, "out: [P, F]");
    for p in 0..ids.len() {
        if ids[p] < 0 {
            continue;
        }
        for i in 0..f {
            let at = |column: usize| f64::from(gate_up[p * columns + column]);
            let value = match kind {
                Activation::Silu => {
                    let gate = at(i);
                    gate * sigmoid(gate) * at(f + i)
                }
                Activation::Gelu => gelu_tanh(at(i)) * at(f + i),
                Activation::SwigluClamped { alpha, limit } => {
                    let limit = f64::from(limit);
                    let gate = at(2 * i).min(limit);
                    let up = at(2 * i + 1).clamp(-limit, limit);
                    (up + 1.0) * gate * sigmoid(f64::from(alpha) * gate)
                }
                Activation::ReluSquared => {
                    let positive = at(i).max(0.0);
                    positive * positive
                }
            };
            out[p * f + i] = value as f32;
        }
    }
}

/// 0.5·x·(1 + tanh(sqrt(2/π)·(x + 0.044715·x³)))
fn gelu_tanh(x: f64) -> f64 {
    let inner = std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(kind: Activation, gate_up: &[f32]) -> f32 {
        let mut out = [f32::NAN];
        activation(gate_up, &[0], 1, kind, &mut out);
        out[0]
    }

    #[test]
    fn each_kind_gives_its_known_value() {
        let clamped = Activation::SwigluClamped { alpha: 1.702, limit: 7.0 };
        let cases: [(Activation, &[f32], f32); 6] = [
            (Activation::Silu, &[1.0, 2.0], 1.462_117_2),
            (Activation::Gelu, &[1.0, 2.0], 1.682_384),
            (clamped, &[1.0, 2.0], 2.537_387_4),
            (clamped, &[100.0, -100.0], -41.999_72),
            (Activation::ReluSquared, &[3.0], 9.0),
            (Activation::ReluSquared, &[-3.0], 0.0),
        ];
        for (kind, gate_up, expected) in cases {
            let got = one(kind, gate_up);
            assert!((got - expected).abs() < 1e-4, "{kind:?}: expected {expected}, got {got}");
        }
    }

    #[test]
    fn large_negative_gates_give_zero_and_not_nan() {
        for kind in [Activation::Silu, Activation::Gelu] {
            assert_eq!(one(kind, &[-1e6, 1.0]), 0.0);
        }
    }

    #[test]
    fn rows_of_negative_ids_are_left_alone() {
        let mut out = [f32::NAN, f32::NAN];
        activation(&[f32::NAN, f32::NAN, 0.0, 1.0], &[-1, 0], 1, Activation::Silu, &mut out);
        assert!(out[0].is_nan());
        assert_eq!(out[1], 0.0);
    }
}
