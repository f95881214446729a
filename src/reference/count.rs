//! How often each expert is chosen.

use super::index;

/// Semantics: `counts[ids[p]] += 1` for p below `valid_pairs`.
///
/// `ids`: `[P]`, `counts`: `[E]` of one layer. Ids that are no expert count nowhere.
pub fn count(ids: &[i32], valid_pairs: usize, counts: &mut [u32]) {
    for p in 0..valid_pairs.min(ids.len()) {
        if let Some(e) = index(ids[p]).filter(|e| *e < counts.len()) {
            counts[e] += 1;
        }
    }
}
