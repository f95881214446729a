//! What one rank holds of attention: which query heads, and which key and value heads go with them.

use std::ops::Range;

use super::Topology;
use crate::checkpoint::ModelConfig;
use crate::family::table::HeadNorms;

/// Columns of the output projection come in groups of this many: kernels read rows in steps of eight elements.
const GROUP: usize = 8;

/// The heads of a model's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` consecutive query heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Queries and keys are normed over all heads together, so that no rank can do with some of them.
    pub normed_together: bool,
}

impl Heads {
    /// Those of the model `config`.
    pub fn of(config: &ModelConfig) -> Self {
        Self {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            normed_together: config.family.table().head_norms == HeadNorms::Whole,
        }
    }
}

/// One rank's heads: consecutive query heads, and the key and value heads that they attend with, evenly many query heads
/// for each.
///
/// With N ranks sharing, N must divide the query heads. Key and value heads are then divided too where N divides them;
/// where they divide N, each is held by N / `kv_heads` consecutive ranks. Any other number of heads leaves all of attention
/// to every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadShare {
    all: Heads,
    heads: Range<usize>,
    kv_heads: Range<usize>,
}

impl HeadShare {
    /// The share of the rank at `topology` of the heads `all`.
    pub fn new(all: Heads, topology: Topology) -> Self {
        let (ranks, rank) = (topology.attention_tp(), topology.rank());
        let Heads { heads, kv_heads, head_dim, normed_together } = all;
        let even = heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads) && heads.is_multiple_of(ranks);
        if ranks == 1 || !even || normed_together || !(heads / ranks * head_dim).is_multiple_of(GROUP) {
            return Self::whole(all);
        }
        let own = |n: usize| rank * n..(rank + 1) * n;
        let kv = if kv_heads.is_multiple_of(ranks) {
            own(kv_heads / ranks)
        } else if ranks.is_multiple_of(kv_heads) {
            let kv = rank / (ranks / kv_heads);
            kv..kv + 1
        } else {
            return Self::whole(all);
        };
        Self { all, heads: own(heads / ranks), kv_heads: kv }
    }

    /// All of `all`.
    pub fn whole(all: Heads) -> Self {
        Self { all, heads: 0..all.heads, kv_heads: 0..all.kv_heads }
    }

    /// The heads of all ranks.
    pub fn all(&self) -> Heads {
        self.all
    }

    /// Query heads, out of all.
    pub fn heads(&self) -> Range<usize> {
        self.heads.clone()
    }

    /// Key and value heads, out of all.
    pub fn kv_heads(&self) -> Range<usize> {
        self.kv_heads.clone()
    }

    /// Rows of the query projection, and columns of the output projection.
    pub fn q_range(&self) -> Range<usize> {
        self.scaled(&self.heads)
    }

    /// Rows of the key projection, and of the value projection.
    pub fn kv_range(&self) -> Range<usize> {
        self.scaled(&self.kv_heads)
    }

    /// True when the rank holds every head: what attention then gives is whole, and is no part of a sum.
    pub fn is_whole(&self) -> bool {
        self.heads.len() == self.all.heads
    }

    fn scaled(&self, heads: &Range<usize>) -> Range<usize> {
        heads.start * self.all.head_dim..heads.end * self.all.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heads(heads: usize, kv_heads: usize, head_dim: usize) -> Heads {
        Heads { heads, kv_heads, head_dim, normed_together: false }
    }

    fn shares(all: Heads, tp: usize) -> Vec<HeadShare> {
        (0..tp).map(|rank| HeadShare::new(all, Topology::new(Some(tp), None, rank).unwrap())).collect()
    }

    #[test]
    fn every_query_head_is_held_once_beside_its_own_key_and_value_head() {
        let mut failures = Vec::new();
        for kv in 1..=16 {
            for group in [1, 2, 3, 4, 6, 8, 16] {
                let n = kv * group;
                for tp in 1..=16 {
                    let all = shares(heads(n, kv, 8), tp);
                    // A split is exact where every rank has as many query heads for each of its key heads as any other.
                    let mut numbers = std::collections::BTreeSet::new();
                    for rank in 0..tp {
                        let mut queries = std::collections::BTreeMap::new();
                        (rank * n / tp..(rank + 1) * n / tp).for_each(|h| *queries.entry(h / group).or_insert(0) += 1);
                        numbers.insert(queries.into_values().collect::<Vec<usize>>());
                    }
                    let even = |counts: &Vec<usize>| counts.iter().all(|n| *n == counts[0]);
                    let splits = n % tp == 0 && numbers.len() == 1 && numbers.iter().all(even);
                    let fine = |share: &HeadShare| {
                        let (q, kv) = (share.heads(), share.kv_heads());
                        let each = q.len() / kv.len();
                        let uniform = q.len() % kv.len() == 0;
                        // Local head i attends with local key head i / each; globally that is head / group.
                        uniform && (0..q.len()).all(|i| (q.start + i) / group == kv.start + i / each)
                    };
                    let mut times = vec![0; n];
                    all.iter().flat_map(HeadShare::heads).for_each(|head| times[head] += 1);
                    let copies = if splits { 1 } else { tp };
                    let kv_total: usize = all.iter().map(|share| share.kv_heads().len()).sum();
                    let kv_want = if splits { kv.max(tp) } else { kv * tp };
                    let ok = all.iter().all(|share| fine(share) && share.is_whole() == (!splits || tp == 1));
                    if !ok || times.iter().any(|t| *t != copies) || kv_total != kv_want {
                        failures.push(format!("{n} heads, {kv} kv, tp {tp}: {all:?}"));
                    }
                }
            }
        }
        assert!(failures.is_empty(), "{failures:#?}");
    }

    #[test]
    fn heads_are_left_whole_where_they_cannot_be_shared() {
        let whole = |all, tp| shares(all, tp).iter().all(HeadShare::is_whole);
        assert!(!whole(heads(4, 2, 8), 4));
        assert!(whole(heads(4, 2, 8), 8), "fewer heads than ranks");
        assert!(whole(heads(12, 6, 8), 4), "three heads of two groups");
        assert!(whole(heads(4, 2, 6), 4) && whole(heads(4, 2, 6), 2), "six or twelve columns");
        assert!(!whole(heads(16, 4, 6), 2), "48 columns");
        assert!(whole(Heads { normed_together: true, ..heads(4, 2, 8) }, 2), "a norm of all heads");
        let experts_only = Topology::new(None, Some(4), 1).unwrap();
        assert!(HeadShare::new(heads(4, 2, 8), experts_only).is_whole(), "without tp");
    }

    #[test]
    fn ranges_count_values() {
        let third = &shares(heads(32, 4, 128), 8)[3];
        assert_eq!((third.heads(), third.kv_heads()), (12..16, 1..2));
        assert_eq!((third.q_range(), third.kv_range()), (1536..2048, 128..256));
    }
}
