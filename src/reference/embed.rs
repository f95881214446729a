//! Rows of the embedding.

/// Semantics: `out[t] = table[ids[t]]`.
///
/// `table`: `[vocab, D]`, `ids`: `[T]`, `out`: `[T, D]`. An id outside the vocabulary gives zeros.
pub fn embed(table: &[f32], ids: &[u32], d: usize, out: &mut [f32]) {
    assert_eq!(out.len(), ids.len() * d, "out: [T, D]");
    let vocab = table.len() / d;
    for t in 0..ids.len() {
        let row = ids[t] as usize;
        for i in 0..d {
            out[t * d + i] = if row < vocab { table[row * d + i] } else { 0.0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_outside_the_vocabulary_give_zeros() {
        let mut out = [f32::NAN; 6];
        embed(&[1.0, 2.0, 3.0, 4.0], &[1, 0, 2], 2, &mut out);
        assert_eq!(out, [3.0, 4.0, 1.0, 2.0, 0.0, 0.0]);
    }
}
