//! How pairs meet matrices: one by one, or sorted into tiles.

use crate::plan::capabilities::Capabilities;

/// Tile height for `pairs` spread over `matrices`, or `None` for one pair at a time.
///
/// A tile reads a matrix once for all its pairs, but a bucket with fewer pairs than the tile wastes the rest.
pub fn tile(caps: &Capabilities, pairs: usize, matrices: usize) -> Option<usize> {
    let (pairs, matrices) = (pairs as f64, matrices.max(1) as f64);
    if pairs < caps.tuning.tiles_from * matrices {
        None
    } else if pairs < caps.tuning.tiles_of_8_from * matrices {
        Some(4)
    } else {
        Some(8)
    }
}

/// The same for adapters. Where the lanes of a product lie along the depth, tiles of 8 do not: a rank has too few columns
/// for lanes that own one each.
pub fn adapter_tile(caps: &Capabilities, pairs: usize, matrices: usize) -> Option<usize> {
    tile(caps, pairs, matrices).map(|tile| if caps.along_depth { tile.min(4) } else { tile })
}

/// How few pairs meet their experts, a row of the weights a subgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Few {
    /// One by one: hardly two share an expert.
    Single,
    /// In tiles of this height, so that pairs share what is read.
    Tiles(usize),
}

/// The tile height of few pairs.
pub const FEW_TILE: usize = 4;

/// Whether `tokens` tokens with `top_k` pairs each are few for `experts` experts, and how they then meet them. Only where a
/// subgroup reads a row together.
pub fn few(caps: &Capabilities, tokens: usize, top_k: usize, experts: usize) -> Option<Few> {
    let (pairs, tuning) = (tokens * top_k, &caps.tuning);
    let at_most = |per_expert: f64| pairs as f64 <= per_expert * experts as f64;
    if !caps.along_depth || pairs > tuning.few_pairs || !at_most(tuning.few_pairs_per_expert) {
        return None;
    }
    // The experts of a single token differ.
    let single = tokens <= 1 || at_most(tuning.single_pairs_per_expert);
    Some(if single { Few::Single } else { Few::Tiles(FEW_TILE) })
}

/// The workgroup that walks a long row: one of activations, or of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LongRow {
    /// Its invocations.
    pub lanes: u32,
    /// Subgroups that it is known to consist of; 1 where that is not known, or not wanted.
    pub subgroups: u32,
    /// It is exactly one subgroup.
    pub one_subgroup: bool,
}

/// Invocations of such a workgroup on hardware, where a subgroup alone would wait for one load after the other.
const LONG_ROW_LANES: u32 = 256;

impl LongRow {
    /// The workgroup on one device.
    pub fn of(caps: &Capabilities) -> Self {
        if caps.along_depth {
            let subgroups = LONG_ROW_LANES / caps.row_lanes;
            return Self { lanes: LONG_ROW_LANES, subgroups, one_subgroup: false };
        }
        Self { lanes: caps.row_lanes, subgroups: 1, one_subgroup: caps.one_subgroup }
    }
}

/// Whether pairs are so few for the factors of `buckets` experts and adapters that sorting them, so that they share what is read,
/// would not pay.
pub fn apart(caps: &Capabilities, pairs: usize, buckets: usize) -> bool {
    caps.along_depth && pairs <= MOST_APART && pairs as f64 <= caps.tuning.apart_pairs * buckets as f64
}

/// The same for whole tokens, whose adapters have few factors: those stay near, and sorting must save more than reading.
pub fn tokens_apart(caps: &Capabilities, tokens: usize) -> bool {
    caps.along_depth && tokens <= caps.tuning.apart_tokens
}

/// A dispatch has a row of workgroups for each of them.
const MOST_APART: usize = 65_535;

/// Subgroups of a workgroup whose lanes lie along the depth.
pub const SUBGROUPS: u32 = 4;

/// Loads of a row that a lane has on the way at once, for rows of `in_dim` columns: as many as share the row evenly.
pub fn steps(caps: &Capabilities, in_dim: usize) -> u32 {
    let loads = in_dim.div_ceil(8 * caps.row_lanes as usize);
    if loads.is_multiple_of(3) && !loads.is_multiple_of(4) { 3 } else { 4 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::classes::classes;
    use crate::plan::tuning::Tuning;

    #[test]
    fn tiles_grow_with_the_pairs_of_a_matrix() {
        for caps in classes() {
            assert_eq!([0, 31, 32, 191, 192].map(|n| tile(&caps, n, 16)), [None, None, Some(4), Some(4), Some(8)]);
            assert_eq!(tile(&caps, 5, 0), Some(4));
        }
    }

    #[test]
    fn thresholds_are_those_of_the_tuning() {
        for own in classes() {
            let of = |tuning: Tuning| Capabilities { tuning, ..own.clone() };
            let caps = of(Tuning { tiles_from: 1.5, tiles_of_8_from: 1.5, ..own.tuning });
            assert_eq!([23, 24].map(|n| tile(&caps, n, 16)), [None, Some(8)]);
            if !own.along_depth {
                continue;
            }
            let caps = of(Tuning { few_pairs: 32, single_pairs_per_expert: 0.1, ..own.tuning });
            let got = [1, 2, 4, 5].map(|tokens| few(&caps, tokens, 8, 128));
            assert_eq!(got, [Some(Few::Single), Some(Few::Tiles(FEW_TILE)), Some(Few::Tiles(FEW_TILE)), None]);
            let caps = of(Tuning { few_pairs_per_expert: 0.25, ..own.tuning });
            assert_eq!([4, 5].map(|tokens| few(&caps, tokens, 8, 128).is_some()), [true, false]);
            let caps = of(Tuning { apart_pairs: 0.5, apart_tokens: 9, ..own.tuning });
            assert_eq!([8, 9].map(|pairs| apart(&caps, pairs, 16)), [true, false]);
            assert_eq!([9, 10].map(|tokens| tokens_apart(&caps, tokens)), [true, false]);
            assert!(!apart(&of(Tuning { apart_pairs: 65_535.0, ..own.tuning }), MOST_APART + 1, 1 << 20));
        }
    }

    #[test]
    fn few_pairs_meet_experts_one_by_one_until_they_share_them() {
        for caps in classes() {
            let got = [1, 4, 16, 1000].map(|tokens| few(&caps, tokens, 8, 128));
            if caps.along_depth {
                assert_eq!(got, [Some(Few::Single), Some(Few::Single), Some(Few::Tiles(FEW_TILE)), None]);
                assert_eq!(few(&caps, 1, 8, 8), Some(Few::Single), "the experts of a token differ");
            } else {
                assert_eq!(got, [None; 4]);
            }
        }
    }
}
