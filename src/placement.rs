//! Which rank holds which expert, and under which local number: the only place that knows.

mod rule;
mod topology;

pub use rule::PlacementRule;
pub use topology::Topology;

use crate::error::{Error, ErrorKind, Result};

/// The experts that one rank holds, out of all E. Local numbers follow the order of the global ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    experts: usize,
    ranks: usize,
    rank: usize,
    /// Global id to local number, -1 for experts that live elsewhere.
    local: Vec<i32>,
}

impl Placement {
    /// Contiguous blocks: rank 0 holds the first experts, and so on. The first E mod `ranks` ranks hold one more.
    ///
    /// Errors: `Config` when there is no expert or rank, or `rank` is none of them.
    pub fn linear(experts: usize, ranks: usize, rank: usize) -> Result<Self> {
        check(experts, ranks, rank)?;
        let (base, extra) = (experts / ranks, experts % ranks);
        let first = rank * base + rank.min(extra);
        let n = base + usize::from(rank < extra);
        Ok(Self::of(experts, ranks, rank, |expert| (first..first + n).contains(&expert)))
    }

    /// Expert e lives on rank e mod `ranks`. Errors as [`linear`](Self::linear).
    pub fn round_robin(experts: usize, ranks: usize, rank: usize) -> Result<Self> {
        check(experts, ranks, rank)?;
        Ok(Self::of(experts, ranks, rank, |expert| expert % ranks == rank))
    }

    /// `owners[e]` lists the ranks that hold expert e; several may hold a copy.
    ///
    /// Errors: as [`linear`](Self::linear), and `Config` when an expert has no owner, an owner that is no rank, or the
    /// same owner twice.
    pub fn table(owners: &[Vec<usize>], ranks: usize, rank: usize) -> Result<Self> {
        check(owners.len(), ranks, rank)?;
        for (expert, list) in owners.iter().enumerate() {
            let fail = |message: String| Err(Error::new(ErrorKind::Config, format!("expert {expert}: {message}")));
            if list.is_empty() {
                return fail("expected at least one owner, got none".to_owned());
            }
            for (i, &owner) in list.iter().enumerate() {
                if owner >= ranks {
                    return fail(format!("expected an owner below {ranks}, got {owner}"));
                }
                if list[..i].contains(&owner) {
                    return fail(format!("owner {owner} is listed twice"));
                }
            }
        }
        Ok(Self::of(owners.len(), ranks, rank, |expert| owners[expert].contains(&rank)))
    }

    fn of(experts: usize, ranks: usize, rank: usize, holds: impl Fn(usize) -> bool) -> Self {
        let mut next = 0;
        let mut number = |expert| {
            if !holds(expert) {
                return -1;
            }
            next += 1;
            next - 1
        };
        Self { experts, ranks, rank, local: (0..experts).map(&mut number).collect() }
    }

    /// E: experts of a layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Global id to local number, `[E]`; -1 for an expert that this rank does not hold.
    pub fn local_table(&self) -> &[i32] {
        &self.local
    }

    /// The global ids of this rank's experts, by local number: `[E_l]`.
    pub fn owned(&self) -> Vec<usize> {
        (0..self.experts).filter(|&expert| self.local[expert] >= 0).collect()
    }

    /// True when this rank holds every expert, so that global and local numbers are the same.
    pub fn is_identity(&self) -> bool {
        self.local.iter().all(|&local| local >= 0)
    }
}

fn check(experts: usize, ranks: usize, rank: usize) -> Result<()> {
    let fail = |message: String| Err(Error::new(ErrorKind::Config, format!("placement: {message}")));
    if experts == 0 || i32::try_from(experts).is_err() {
        return fail(format!("expected 1 to {} experts, got {experts}", i32::MAX));
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
                let numbered =
                    all.iter().all(|p| p.owned().iter().enumerate().all(|(i, &e)| p.local_table()[e] == i as i32));
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
        assert_eq!(Placement::linear(7, 3, 1).unwrap().local_table(), [-1, -1, -1, 0, 1, -1, -1]);
        assert_eq!(Placement::round_robin(7, 3, 1).unwrap().local_table(), [-1, 0, -1, -1, 1, -1, -1]);
    }

    #[test]
    fn a_table_may_hold_copies() {
        let owners = [vec![1], vec![0, 1], vec![0]];
        assert_eq!(Placement::table(&owners, 2, 0).unwrap().owned(), [1, 2]);
        assert_eq!(Placement::table(&owners, 2, 1).unwrap().local_table(), [0, 1, -1]);
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
        ];
        let accepted: Vec<_> = cases.iter().filter(|c| c.is_ok()).collect();
        assert!(accepted.is_empty(), "{accepted:?}");
    }
}
