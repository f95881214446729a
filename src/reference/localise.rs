//! Global expert ids to the ids of this rank.

use super::index;
use crate::placement::Owner;

/// Semantics: `local[p] = owners[ids[p]].local`, -1 where the expert is not held here or another rank's copy has its turn.
///
/// `ids`: `[P]` with P = T·A, `owners`: `[E]`, result `[P]`. Of n copies of expert e, token t takes number (t + e) mod n. A
/// negative id keeps its bits, an id >= E becomes -1. Pairs of rows from `rows_valid` on (p / A >= `rows_valid`) become -1
/// after the look-up, whatever their id.
pub fn localise(ids: &[i32], owners: &[Owner], rows_valid: usize, top_k: usize) -> Vec<i32> {
    let mut local = vec![-1; ids.len()];
    for p in 0..ids.len() {
        let token = p / top_k;
        if token >= rows_valid {
            continue;
        }
        local[p] = match index(ids[p]) {
            None => ids[p],
            Some(e) if e < owners.len() && (token + e) % owners[e].copies() == owners[e].copy() => owners[e].local,
            Some(_) => -1,
        };
    }
    local
}
