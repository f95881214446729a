//! Pairs sorted by bucket, each bucket padded to whole tiles.

use super::index;
use crate::shape::align_capacity;

/// What [`align`] returns; C is [`align_capacity`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aligned {
    /// `[C]`: pairs in bucket order; P in the padding and past the count.
    pub sorted_token_ids: Vec<i32>,
    /// `[C / B]`: the bucket of each tile; -1 for tiles of the sentinel bucket and past the count.
    pub expert_ids: Vec<i32>,
    /// Slots in use, padding and sentinel bucket included; a multiple of B.
    pub num_tokens_post_padded: u32,
    /// Workgroups `[x, y, z]` of each consumer: x column tiles, y·z at least the tiles before the sentinel bucket.
    pub dispatch: Vec<[u32; 3]>,
}

/// Semantics: `sorted_token_ids` = pairs 0..P stably sorted by bucket, each bucket padded with P to a multiple of B.
///
/// `ids`: `[P]`, `consumers`: column tiles of each. Ids outside 0..N go to the sentinel bucket N, the last one: counted in
/// `num_tokens_post_padded`, not in the dispatch arguments. With n tiles before it, y = min(n, 65535) and
/// z = ceil(n / 65535), at least 1; a consumer's tile is z_index·65535 + y_index.
pub fn align(ids: &[i32], buckets: usize, tile: usize, consumers: &[u32]) -> Aligned {
    let pairs = ids.len();
    let capacity = align_capacity(pairs, buckets, tile);

    // count
    let mut counts = vec![0; buckets + 1];
    for p in 0..pairs {
        counts[bucket(ids[p], buckets)] += 1;
    }

    // scan
    let mut starts = vec![0; buckets + 2];
    for n in 0..buckets + 1 {
        starts[n + 1] = starts[n] + usize::next_multiple_of(counts[n], tile);
    }

    // scatter
    let padding = i32::try_from(pairs).expect("P fits an i32");
    let mut sorted_token_ids = vec![padding; capacity];
    let mut cursors = starts.clone();
    for p in 0..pairs {
        let n = bucket(ids[p], buckets);
        sorted_token_ids[cursors[n]] = i32::try_from(p).expect("P fits an i32");
        cursors[n] += 1;
    }
    let mut expert_ids = vec![-1; capacity / tile];
    for n in 0..buckets {
        for i in starts[n] / tile..starts[n + 1] / tile {
            expert_ids[i] = i32::try_from(n).expect("N fits an i32");
        }
    }

    Aligned {
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded: u32::try_from(starts[buckets + 1]).expect("C fits a u32"),
        dispatch: workgroups(starts[buckets] / tile, consumers),
    }
}

/// Workgroups of consumers of `items`: `[x, y, z]` for each number x of column tiles.
pub(super) fn workgroups(items: usize, consumers: &[u32]) -> Vec<[u32; 3]> {
    const FOLD: u32 = 65_535;
    let items = u32::try_from(items).expect("tiles fit a u32");
    consumers.iter().map(|x| [*x, items.min(FOLD), items.div_ceil(FOLD).max(1)]).collect()
}

/// The bucket of an id: itself inside 0..N, else the sentinel N.
fn bucket(id: i32, buckets: usize) -> usize {
    match index(id) {
        Some(n) if n < buckets => n,
        _ => buckets,
    }
}
