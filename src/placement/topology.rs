//! How a world of ranks is arranged: groups that share out the experts, ranks of a group that share each expert's width, and
//! whether all of them share out the heads of attention.

use std::ops::Range;

use crate::error::{Error, ErrorKind, Result};

/// One rank's place in the world. W = `tp` ranks (`ep` where `tp` is not given) form `ep` expert groups of
/// `moe_tp = W / ep` ranks each: a group holds its share of the experts, and its ranks share their width. Where `tp` is given,
/// all W ranks share out the heads of attention; otherwise each has all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    world: usize,
    ep: usize,
    attention_tp: usize,
    rank: usize,
}

impl Default for Topology {
    /// One rank.
    fn default() -> Self {
        Self { world: 1, ep: 1, attention_tp: 1, rank: 0 }
    }
}

impl Topology {
    /// Most ranks of a world.
    pub const MAX_RANKS: usize = 1 << 12;

    /// The place of `rank`; without `tp` the world is `ep` ranks, without `ep` every rank holds a part of every expert.
    ///
    /// Errors: `Config` when a number is 0 or too large, when `ep` does not divide the world, or `rank` is not below it.
    pub fn new(tp: Option<usize>, ep: Option<usize>, rank: usize) -> Result<Self> {
        let fail = |message: String| Err(Error::new(ErrorKind::Config, format!("topology: {message}")));
        let (world, ep) = (tp.or(ep).unwrap_or(1), ep.unwrap_or(1));
        for (name, n) in [("ep", ep), ("tp", world)] {
            if n == 0 || n > Self::MAX_RANKS {
                return fail(format!("expected `{name}` from 1 to {}, got {n}", Self::MAX_RANKS));
            }
        }
        if !world.is_multiple_of(ep) {
            return fail(format!("expected `ep` to divide the {world} ranks, got {ep}"));
        }
        if rank >= world {
            return fail(format!("expected a rank below {world}, got {rank}"));
        }
        Ok(Self { world, ep, attention_tp: tp.unwrap_or(1), rank })
    }

    /// The same world seen from `rank`. Errors: `Config` when there is no such rank.
    pub fn at(self, rank: usize) -> Result<Self> {
        // Without `tp` the world is `ep` ranks.
        let tp = (self.attention_tp == self.world).then_some(self.world);
        Self::new(tp, Some(self.ep), rank)
    }

    /// W: number of ranks.
    pub fn world(self) -> usize {
        self.world
    }

    /// Number of expert groups.
    pub fn ep(self) -> usize {
        self.ep
    }

    /// This rank, below W.
    pub fn rank(self) -> usize {
        self.rank
    }

    /// Ranks that share out the heads of attention: W where `tp` was given, otherwise 1.
    pub fn attention_tp(self) -> usize {
        self.attention_tp
    }

    /// Ranks that share the width of one expert.
    pub fn moe_tp(self) -> usize {
        self.world / self.ep
    }

    /// The expert group of this rank.
    pub fn ep_rank(self) -> usize {
        self.rank / self.moe_tp()
    }

    /// This rank's place within its expert group.
    pub fn moe_tp_rank(self) -> usize {
        self.rank % self.moe_tp()
    }

    /// The columns of an expert of width `width` (F) that this rank holds: the first F mod `moe_tp` ranks of a group hold
    /// one more. Empty where there are more ranks than columns.
    pub fn width_range(self, width: usize) -> Range<usize> {
        let (base, extra) = (width / self.moe_tp(), width % self.moe_tp());
        let place = self.moe_tp_rank();
        let begin = place * base + place.min(extra);
        begin..begin + base + usize::from(place < extra)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_covers_the_width_once_in_order() {
        let mut failures = Vec::new();
        for tp in 1..=16 {
            for ep in 1..=16 {
                let divides = tp % ep == 0;
                if Topology::new(Some(tp), Some(ep), 0).is_ok() != divides {
                    failures.push(format!("tp {tp}, ep {ep}: accepted is {}", !divides));
                }
                if !divides {
                    continue;
                }
                for width in [1, 5, 40, 768, 769] {
                    let all: Vec<_> = (0..tp).map(|r| Topology::new(Some(tp), Some(ep), r).unwrap()).collect();
                    for group in all.chunks(tp / ep) {
                        let columns: Vec<usize> = group.iter().flat_map(|t| t.width_range(width)).collect();
                        let sizes: Vec<_> = group.iter().map(|t| t.width_range(width).len()).collect();
                        let even = sizes.is_sorted_by(|a, b| a >= b) && sizes[0] - sizes[sizes.len() - 1] <= 1;
                        if columns != (0..width).collect::<Vec<_>>() || !even {
                            failures.push(format!("tp {tp}, ep {ep}, width {width}: {sizes:?}"));
                        }
                    }
                    let places: Vec<_> = all.iter().map(|t| t.ep_rank() * t.moe_tp() + t.moe_tp_rank()).collect();
                    let below = all.iter().all(|t| t.ep_rank() < ep && t.moe_tp_rank() < t.moe_tp());
                    if places != (0..tp).collect::<Vec<_>>() || !below {
                        failures.push(format!("tp {tp}, ep {ep}: {places:?}"));
                    }
                }
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
    }

    #[test]
    fn the_world_is_tp_where_given_and_else_ep() {
        let numbers = |tp, ep, rank| {
            let t = Topology::new(tp, ep, rank).unwrap();
            [t.world(), t.ep(), t.moe_tp(), t.ep_rank(), t.moe_tp_rank()]
        };
        assert_eq!(numbers(None, None, 0), [1, 1, 1, 0, 0]);
        assert_eq!(numbers(None, Some(3), 2), [3, 3, 1, 2, 0]);
        assert_eq!(numbers(Some(3), None, 2), [3, 1, 3, 0, 2]);
        assert_eq!(numbers(Some(4), Some(2), 3), [4, 2, 2, 1, 1]);
        let columns = |rank| Topology::new(Some(4), Some(2), rank).unwrap().width_range(5);
        assert_eq!([columns(0), columns(1), columns(2), columns(3)], [0..3, 3..5, 0..3, 3..5]);
    }

    #[test]
    fn attention_is_shared_out_where_tp_was_given() {
        let degree = |tp, ep| {
            let first = Topology::new(tp, ep, 0).unwrap();
            let last = first.at(first.world() - 1).unwrap();
            assert_eq!(last, Topology::new(tp, ep, first.world() - 1).unwrap(), "{tp:?} {ep:?}");
            [first.attention_tp(), last.attention_tp()]
        };
        let cases =
            [(None, None, 1), (None, Some(4), 1), (Some(4), None, 4), (Some(4), Some(4), 4), (Some(4), Some(2), 4)];
        for (tp, ep, want) in cases {
            assert_eq!(degree(tp, ep), [want; 2], "{tp:?} {ep:?}");
        }
        assert_eq!(Topology::new(Some(1), Some(1), 0).unwrap(), Topology::default());
    }

    #[test]
    fn nonsense_is_refused() {
        let cases = [
            (Some(0), None, 0),
            (None, Some(0), 0),
            (Some(4), Some(3), 0),
            (Some(2), Some(4), 0),
            (Some(2), None, 2),
            (Some(usize::MAX), None, 0),
        ];
        let accepted: Vec<_> = cases.iter().filter(|(tp, ep, rank)| Topology::new(*tp, *ep, *rank).is_ok()).collect();
        assert!(accepted.is_empty(), "{accepted:?}");
    }
}
