//! Global expert ids to the ids of this rank.

use super::index;

/// Semantics: `local[p] = table[ids[p]]`, -1 where the expert is not held here.
///
/// `ids`: `[P]` with P = T·A, `table`: `[E]` global -> local or -1, result `[P]`. A negative id keeps its bits, an id >= E
/// becomes -1. Pairs of rows from `rows_valid` on (p / A >= `rows_valid`) become -1 after the look-up, whatever their id.
pub fn localise(ids: &[i32], table: &[i32], rows_valid: usize, top_k: usize) -> Vec<i32> {
    let mut local = vec![-1; ids.len()];
    for p in 0..ids.len() {
        if p / top_k >= rows_valid {
            continue;
        }
        local[p] = match index(ids[p]) {
            None => ids[p],
            Some(e) if e < table.len() => table[e],
            Some(_) => -1,
        };
    }
    local
}
