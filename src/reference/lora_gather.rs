//! The first half of an adapter of the embedding.

use super::{Factors, index};

/// Semantics: `u[t][..R] = s · A[:, ids[t]]`.
///
/// `ids`: `[T]`, `slots`: `[T]`, `u`: `[T, max_rank]`. `factors` maps a slot to what is loaded there, with A `[R, vocab]`. Rows
/// with a negative slot or without factors, and columns past the rank, are left alone.
pub fn lora_gather<'a>(
    ids: &[u32],
    slots: &[i32],
    factors: &dyn Fn(usize) -> Option<Factors<'a>>,
    vocab: usize,
    max_rank: usize,
    u: &mut [f32],
) {
    assert_eq!(u.len(), ids.len() * max_rank, "u: [T, max_rank]");
    for t in 0..ids.len() {
        let Some(factor) = index(slots[t]).and_then(factors) else {
            continue;
        };
        assert_eq!(factor.a.len(), factor.rank * vocab, "a: [R, vocab]");
        for r in 0..factor.rank {
            u[t * max_rank + r] = factor.scale * factor.a[r * vocab + ids[t] as usize];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_takes_its_column_of_a() {
        let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let factors = |slot: usize| (slot == 1).then_some(Factors { rank: 2, scale: 0.5, a: &a, b: &[], bias: None });
        let mut u = [9.0; 9];
        lora_gather(&[2, 1, 0], &[1, -1, 0], &factors, 3, 3, &mut u);
        assert_eq!(u, [1.5, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]);
    }
}
