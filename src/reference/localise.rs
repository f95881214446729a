//! Global expert ids to the ids of this rank.

use super::index;
use crate::placement::Placement;

/// Semantics: `local[p] = locals[ids[p]]`, -1 where the expert is not held here or another rank's copy of it takes the pair.
///
/// `ids`: `[P]` with P = T·A, result `[P]`. A negative id keeps its bits, an id >= E becomes -1. Pairs of rows from `rows_valid`
/// on (p / A >= `rows_valid`) become -1 after the look-up, whatever their id, and count nowhere.
///
/// The load of a rank is the number of its pairs. At first the holders of an expert, ascending, have equal shares of its
/// pairs, the first ones one more where they do not divide. Then, in the order of ids, each expert with several holders is
/// shared out anew: each of its pairs goes to the holder with the least load, the lowest of those. So many pairs each holder
/// takes, the first holder the first of them in the order of pairs, the second the next, and so on. The most loaded rank of
/// all never has more than with equal shares.
pub fn localise(ids: &[i32], placement: &Placement, rows_valid: usize, top_k: usize) -> Vec<i32> {
    let experts = placement.experts();
    let mut counts = vec![0usize; experts];
    for p in 0..ids.len() {
        if let Some(e) = index(ids[p]).filter(|e| *e < experts && p / top_k < rows_valid) {
            counts[e] += 1;
        }
    }

    let mut loads = vec![0usize; placement.ranks()];
    let share = |e: usize, i: usize| {
        let copies = placement.holders(e).len();
        counts[e] / copies + usize::from(i < counts[e] % copies)
    };
    for e in 0..experts {
        for (i, holder) in placement.holders(e).iter().enumerate() {
            loads[*holder] += share(e, i);
        }
    }
    // Which pairs of each expert are this rank's.
    let mut begins = vec![0usize; experts];
    let mut ends = counts.clone();
    for e in placement.copied() {
        let holders = placement.holders(e);
        for i in 0..holders.len() {
            loads[holders[i]] -= share(e, i);
        }
        let mut quotas = vec![0usize; holders.len()];
        for _ in 0..counts[e] {
            let mut least = 0;
            for i in 1..holders.len() {
                if loads[holders[i]] < loads[holders[least]] {
                    least = i;
                }
            }
            quotas[least] += 1;
            loads[holders[least]] += 1;
        }
        let before = holders.iter().take_while(|holder| **holder < placement.rank()).count();
        begins[e] = quotas[..before].iter().sum();
        ends[e] = begins[e] + quotas.get(before).copied().unwrap_or(0);
    }

    let mut seen = vec![0usize; experts];
    let mut local = vec![-1; ids.len()];
    for p in 0..ids.len() {
        if p / top_k >= rows_valid {
            continue;
        }
        match index(ids[p]) {
            None => local[p] = ids[p],
            Some(e) if e < experts => {
                if seen[e] >= begins[e] && seen[e] < ends[e] {
                    local[p] = placement.locals()[e];
                }
                seen[e] += 1;
            }
            Some(_) => {}
        }
    }
    local
}
