//! Which rank holds which expert, and under which local number, and which heads: the only place that knows.

pub mod balance;
mod copies;
mod counts;
mod heads;
mod rule;
mod share;
mod topology;

pub use copies::Copies;
pub use counts::RoutingCounts;
pub use heads::{HeadShare, Heads};
pub use rule::PlacementRule;
pub use share::{ExpertShare, RankShare};
pub use topology::Topology;

use crate::error::{Error, ErrorKind, Result};

/// Most experts of a table that gives some of them several ranks: the choice among copies counts them in workgroup memory.
pub const MAX_COPIED_EXPERTS: usize = 1024;
/// Most ranks (expert groups) of such a table.
pub const MAX_COPIED_RANKS: usize = 1024;

/// The experts that one rank holds, out of all E. Local numbers follow the order of the global ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    ranks: usize,
    rank: usize,
    /// By global id: the ranks that hold a copy, ascending.
    holders: Vec<Vec<usize>>,
    /// By global id.
    locals: Vec<i32>,
}

impl Placement {
    /// Contiguous blocks: rank 0 holds the first experts, and so on. The first E mod `ranks` ranks hold one more.
    ///
    /// Errors: `Config` when there is no expert or rank, or `rank` is none of them.
    pub fn linear(experts: usize, ranks: usize, rank: usize) -> Result<Self> {
        check(experts, ranks, rank)?;
        let (base, extra) = (experts / ranks, experts % ranks);
        let n = |rank: usize| base + usize::from(rank < extra);
        Ok(Self::of(ranks, rank, (0..ranks).flat_map(|rank| vec![vec![rank]; n(rank)]).collect()))
    }

    /// Expert e lives on rank e mod `ranks`. Errors as [`linear`](Self::linear).
    pub fn round_robin(experts: usize, ranks: usize, rank: usize) -> Result<Self> {
        check(experts, ranks, rank)?;
        Ok(Self::of(ranks, rank, (0..experts).map(|e| vec![e % ranks]).collect()))
    }

    /// `owners[e]` lists the ranks that hold expert e, in any order; several may hold a copy.
    ///
    /// Errors: as [`linear`](Self::linear), and `Config` when an expert has no owner, an owner that is no rank, or the
    /// same owner twice, or when there are copies and more than [`MAX_COPIED_EXPERTS`] experts or [`MAX_COPIED_RANKS`] ranks.
    pub fn table(owners: &[Vec<usize>], ranks: usize, rank: usize) -> Result<Self> {
        check(owners.len(), ranks, rank)?;
        let fail = |message: String| Err(Error::new(ErrorKind::Config, message));
        for (expert, list) in owners.iter().enumerate() {
            if list.is_empty() {
                return fail(format!("expert {expert}: expected at least one owner, got none"));
            }
            for (i, &owner) in list.iter().enumerate() {
                if owner >= ranks {
                    return fail(format!("expert {expert}: expected an owner below {ranks}, got {owner}"));
                }
                if list[..i].contains(&owner) {
                    return fail(format!("expert {expert}: owner {owner} is listed twice"));
                }
            }
        }
        let copied = owners.iter().any(|list| list.len() > 1);
        if copied && (owners.len() > MAX_COPIED_EXPERTS || ranks > MAX_COPIED_RANKS) {
            return fail(format!(
                "placement: with copies expected at most {MAX_COPIED_EXPERTS} experts and {MAX_COPIED_RANKS} owners, got {} and {ranks}",
                owners.len()
            ));
        }
        let mut holders = owners.to_vec();
        holders.iter_mut().for_each(|list| list.sort_unstable());
        Ok(Self::of(ranks, rank, holders))
    }

    fn of(ranks: usize, rank: usize, holders: Vec<Vec<usize>>) -> Self {
        let mut next = 0;
        let local = |list: &Vec<usize>| {
            if !list.contains(&rank) {
                return -1;
            }
            next += 1;
            next - 1
        };
        let locals = holders.iter().map(local).collect();
        Self { ranks, rank, holders, locals }
    }

    /// E: experts of a layer.
    pub fn experts(&self) -> usize {
        self.locals.len()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Local numbers by global id, `[E]`; -1 where this rank does not hold the expert.
    pub fn locals(&self) -> &[i32] {
        &self.locals
    }

    /// The ranks that hold a copy of the expert `expert`, ascending; none when there is no such expert.
    pub fn holders(&self, expert: usize) -> &[usize] {
        self.holders.get(expert).map_or(&[], Vec::as_slice)
    }

    /// The local number of the expert `expert`; `None` when this rank does not hold it, or there is none.
    pub fn local(&self, expert: usize) -> Option<usize> {
        usize::try_from(*self.locals.get(expert)?).ok()
    }

    /// The global ids of this rank's experts, by local number: `[E_l]`.
    pub fn owned(&self) -> Vec<usize> {
        (0..self.experts()).filter(|&expert| self.locals[expert] >= 0).collect()
    }

    /// The global ids of the experts that several ranks hold, ascending.
    pub fn copied(&self) -> Vec<usize> {
        (0..self.experts()).filter(|&expert| self.holders[expert].len() > 1).collect()
    }

    /// E_l: number of experts that this rank holds.
    pub fn n_owned(&self) -> usize {
        self.locals.iter().filter(|local| **local >= 0).count()
    }

    /// The same rank without any expert.
    fn emptied(self) -> Self {
        Self { locals: vec![-1; self.locals.len()], ..self }
    }

    /// True when this rank alone holds every expert, so that global and local numbers are the same.
    pub fn is_identity(&self) -> bool {
        self.locals.iter().all(|local| *local >= 0) && self.holders.iter().all(|list| list.len() == 1)
    }
}

fn check(experts: usize, ranks: usize, rank: usize) -> Result<()> {
    let fail = |message: String| Err(Error::new(ErrorKind::Config, format!("placement: {message}")));
    if experts == 0 || i32::try_from(experts).is_err() {
        return fail(format!("expected 1 to {} experts, got {experts}", i32::MAX));
    }
    if ranks == 0 || ranks > usize::from(u16::MAX) {
        return fail(format!("expected 1 to {} ranks, got {ranks}", u16::MAX));
    }
    if rank >= ranks {
        return fail(format!("expected a rank below {ranks}, got {rank}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expert_lives_on_exactly_one_rank() {
        let mut failures = Vec::new();
        for (experts, ranks) in [(1, 1), (8, 1), (8, 2), (7, 3), (6, 4), (3, 5), (128, 7)] {
            for (name, make) in [("linear", Placement::linear as fn(_, _, _) -> _), ("robin", Placement::round_robin)] {
                let all: Vec<Placement> = (0..ranks).map(|r| make(experts, ranks, r).unwrap()).collect();
                let mut ids: Vec<usize> = all.iter().flat_map(Placement::owned).collect();
                ids.sort_unstable();
                let sizes: Vec<usize> = all.iter().map(|p| p.owned().len()).collect();
                let even =
                    sizes.iter().enumerate().all(|(r, n)| *n == experts / ranks + usize::from(r < experts % ranks));
                let numbered = all.iter().all(|p| p.owned().iter().enumerate().all(|(i, &e)| p.local(e) == Some(i)));
                let identity = all.iter().all(|p| p.is_identity() == (ranks == 1 || experts == p.owned().len()));
                if ids != (0..experts).collect::<Vec<_>>() || !even || !numbered || !identity {
                    failures.push((name, experts, ranks));
                }
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
    }

    #[test]
    fn uneven_blocks_are_contiguous_and_larger_first() {
        let owned: Vec<_> = (0..3).map(|r| Placement::linear(7, 3, r).unwrap().owned()).collect();
        assert_eq!(owned, [vec![0, 1, 2], vec![3, 4], vec![5, 6]]);
        assert_eq!(Placement::linear(7, 3, 1).unwrap().locals(), [-1, -1, -1, 0, 1, -1, -1]);
        assert_eq!(Placement::round_robin(7, 3, 1).unwrap().locals(), [-1, 0, -1, -1, 1, -1, -1]);
    }

    #[test]
    fn a_table_may_hold_copies() {
        let owners = [vec![1], vec![1, 0], vec![0]];
        assert_eq!(Placement::table(&owners, 2, 0).unwrap().owned(), [1, 2]);
        let second = Placement::table(&owners, 2, 1).unwrap();
        assert_eq!((second.locals(), second.holders(1), second.copied()), (&[0, 1, -1][..], &[0, 1][..], vec![1]));
        let all = Placement::table(&[vec![0, 1], vec![1, 0]], 2, 0).unwrap();
        assert!(!all.is_identity(), "copies share the pairs");
    }

    #[test]
    fn nonsense_is_refused() {
        let cases = [
            Placement::linear(0, 1, 0),
            Placement::linear(4, 0, 0),
            Placement::round_robin(4, 2, 2),
            Placement::table(&[], 1, 0),
            Placement::table(&[vec![]], 1, 0),
            Placement::table(&[vec![1]], 1, 0),
            Placement::table(&[vec![0, 0]], 1, 0),
            Placement::table(&vec![vec![0, 1]; MAX_COPIED_EXPERTS + 1], 2, 0),
            Placement::table(&[vec![0, 1]], MAX_COPIED_RANKS + 1, 0),
        ];
        let accepted: Vec<_> = cases.iter().filter(|c| c.is_ok()).collect();
        assert!(accepted.is_empty(), "{accepted:?}");
    }
}
