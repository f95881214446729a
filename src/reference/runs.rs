//! Pairs sorted by expert and adapter.

use super::align::workgroups;
use super::{Aligned, align, index};

/// What [`align_runs`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runs {
    /// Each expert padded to whole tiles.
    pub aligned: Aligned,
    /// `[R]`: virtual id slot · E + expert, its first place, the place behind its last.
    pub runs: Vec<[i32; 3]>,
    /// Workgroups `[x, y, z]` of each consumer of runs: x column tiles, y·z at least the runs.
    pub dispatch: Vec<[u32; 3]>,
}

/// Semantics: as [`align()`] by expert, but the pairs of an expert, and those of none, in the order of their adapters' slots, pairs without
/// one last, stable; and the pairs of each expert and adapter cut every `run`, in the order of their places.
///
/// `ids`: `[P]`, `mapping`: `[P / top_k]`, slots outside 0..`slots` mean none; `consumers` of tiles and of runs: column tiles of each.
pub fn align_runs(
    ids: &[i32],
    mapping: &[i32],
    top_k: usize,
    [experts, slots]: [usize; 2],
    [tile, run]: [usize; 2],
    [consumers, run_consumers]: [&[u32]; 2],
) -> Runs {
    let mut aligned = align(ids, experts, tile, consumers);
    let slot = |pair: i32| index(mapping[pair as usize / top_k]).filter(|slot| *slot < slots).unwrap_or(slots);
    let mut runs = Vec::new();
    let is_pair = |pair: &i32| *pair < ids.len() as i32;
    // The tiles of an expert follow each other.
    let mut begin = 0;
    while let Some(expert) = aligned.expert_ids.get(begin / tile).copied().filter(|expert| *expert >= 0) {
        let tiles = aligned.expert_ids[begin / tile..].iter().take_while(|e| **e == expert).count();
        let own = &mut aligned.sorted_token_ids[begin..begin + tiles * tile];
        let pairs = own.iter().filter(|pair| is_pair(pair)).count();
        own[..pairs].sort_by_key(|pair| slot(*pair));
        let mut first = 0;
        while first < pairs && slot(own[first]) < slots {
            let of = slot(own[first]);
            let same = own[first..pairs].iter().take(run).take_while(|pair| slot(**pair) == of).count();
            let places =
                [begin + first, begin + first + same].map(|place| i32::try_from(place).expect("C fits an i32"));
            runs.push([i32::try_from(of * experts).expect("ids fit an i32") + expert, places[0], places[1]]);
            first += same;
        }
        begin += tiles * tile;
    }
    // Those of no expert come behind all tiles.
    aligned.sorted_token_ids[begin..].sort_by_key(|pair| if is_pair(pair) { slot(*pair) } else { usize::MAX });
    let dispatch = workgroups(runs.len(), run_consumers);
    Runs { aligned, runs, dispatch }
}
