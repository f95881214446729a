//! Causal attention of one sequence, with fewer key heads than query heads.

/// Sizes of one attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Factor on q·k, usually 1 / sqrt(head_dim).
    pub scale: f32,
}

/// Semantics: `out[t,h] = Σ_j softmax_j(scale · q[t,h]·k[j,g]) · v[j,g]` over j <= start + t, with g = h / (heads / kv_heads).
///
/// `q`: `[T, heads, head_dim]` at positions start..start + T of one sequence, `k` and `v`: `[S, kv_heads, head_dim]` with
/// S >= start + T, `out`: `[T, heads, head_dim]`. Keys past a query's position are not read.
pub fn attention(q: &[f32], k: &[f32], v: &[f32], start: usize, shape: &AttentionShape, out: &mut [f32]) {
    let AttentionShape { heads, kv_heads, head_dim, scale } = *shape;
    assert_eq!(heads % kv_heads, 0, "the key heads must divide the query heads");
    let tokens = q.len() / (heads * head_dim);
    assert_eq!(q.len(), tokens * heads * head_dim, "q: [T, heads, head_dim]");
    assert_eq!(out.len(), q.len(), "out: [T, heads, head_dim]");
    assert_eq!(k.len(), v.len(), "k and v: [S, kv_heads, head_dim]");
    assert!(k.len() >= (start + tokens) * kv_heads * head_dim, "S >= start + T");
    for t in 0..tokens {
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            let q_base = (t * heads + h) * head_dim;
            let keys = start + t + 1;
            let mut logits = vec![0.0; keys];
            let mut max = f64::NEG_INFINITY;
            for j in 0..keys {
                let mut dot = 0.0;
                for i in 0..head_dim {
                    dot += f64::from(q[q_base + i]) * f64::from(k[(j * kv_heads + g) * head_dim + i]);
                }
                logits[j] = dot * f64::from(scale);
                max = max.max(logits[j]);
            }
            let mut sum = 0.0;
            for j in 0..keys {
                logits[j] = (logits[j] - max).exp();
                sum += logits[j];
            }
            for i in 0..head_dim {
                let mut value = 0.0;
                for j in 0..keys {
                    value += logits[j] * f64::from(v[(j * kv_heads + g) * head_dim + i]);
                }
                out[q_base + i] = (value / sum) as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 1, scale: 1.0 };

    #[test]
    fn a_query_does_not_see_later_keys() {
        let mut out = [f32::NAN; 4];
        attention(&[0.0; 4], &[1.0, 2.0, f32::NAN], &[4.0, 8.0, f32::NAN], 0, &SHAPE, &mut out);
        assert_eq!(out, [4.0, 4.0, 6.0, 6.0]);
    }

    #[test]
    fn one_step_at_a_time_equals_the_whole_prompt() {
        let q = [0.5, -1.0, 2.0, 0.1, -0.3, 0.7];
        let (k, v) = ([1.0, -2.0, 0.5], [3.0, 1.0, -1.0]);
        let mut whole = [f32::NAN; 6];
        attention(&q, &k, &v, 0, &SHAPE, &mut whole);
        for t in 0..3 {
            let mut step = [f32::NAN; 2];
            attention(&q[2 * t..2 * t + 2], &k, &v, t, &SHAPE, &mut step);
            assert_eq!(step, whole[2 * t..2 * t + 2]);
        }
    }

    #[test]
    fn query_heads_read_the_key_head_of_their_group() {
        let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 1, scale: 1.0 };
        let mut out = [f32::NAN; 4];
        attention(&[1.0; 4], &[0.0, 0.0], &[5.0, 6.0], 0, &shape, &mut out);
        assert_eq!(out, [5.0, 5.0, 6.0, 6.0]);
    }
}
