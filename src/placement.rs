//! Which rank holds which expert, and under which local number, and which heads: the only place that knows.

mod heads;
mod rule;
mod share;
mod topology;

pub use heads::{HeadShare, Heads};
pub use rule::PlacementRule;
pub use share::{ExpertShare, RankShare};
pub use topology::Topology;

use crate::error::{Error, ErrorKind, Result};

/// Where one rank finds an expert. Laid out as `struct Owner` of `localise.wgsl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Owner {
    /// Local number, -1 where this rank does not hold the expert.
    pub local: i32,
    /// Which copy this rank holds in the low half, the number of copies in the high half.
    copy_and_copies: u32,
}

impl Owner {
    /// The expert under the local number `local` (-1: not here); this rank's copy is number `copy` of `copies`.
    pub const fn new(local: i32, copy: u16, copies: u16) -> Self {
        Self { local, copy_and_copies: copy as u32 | (copies as u32) << 16 }
    }

    /// Which copy this rank holds; of no meaning where it holds none.
    pub const fn copy(self) -> usize {
        (self.copy_and_copies & 0xffff) as usize
    }

    /// Ranks that hold a copy, at least 1.
    pub const fn copies(self) -> usize {
        let copies = (self.copy_and_copies >> 16) as usize;
        if copies == 0 { 1 } else { copies }
    }
}

/// The experts that one rank holds, out of all E. Local numbers follow the order of the global ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    ranks: usize,
    rank: usize,
    /// By global id.
    owners: Vec<Owner>,
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
        Ok(Self::of(ranks, rank, (0..experts).map(|e| (first..first + n).contains(&e).then_some((0, 1)))))
    }

    /// Expert e lives on rank e mod `ranks`. Errors as [`linear`](Self::linear).
    pub fn round_robin(experts: usize, ranks: usize, rank: usize) -> Result<Self> {
        check(experts, ranks, rank)?;
        Ok(Self::of(ranks, rank, (0..experts).map(|e| (e % ranks == rank).then_some((0, 1)))))
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
        Ok(Self::of(
            ranks,
            rank,
            // Ranks are few enough for 16 bits: `check`.
            owners.iter().map(|list| Some((list.iter().position(|o| *o == rank)? as u16, list.len() as u16))),
        ))
    }

    /// `held` gives, for each expert, this rank's copy and the number of copies, or `None` where it holds none.
    fn of(ranks: usize, rank: usize, held: impl Iterator<Item = Option<(u16, u16)>>) -> Self {
        let mut next = 0;
        let owners = held.map(|copy| match copy {
            None => Owner::new(-1, 0, 1),
            Some((copy, copies)) => {
                next += 1;
                Owner::new(next - 1, copy, copies)
            }
        });
        Self { ranks, rank, owners: owners.collect() }
    }

    /// E: experts of a layer.
    pub fn experts(&self) -> usize {
        self.owners.len()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// By global id, `[E]`.
    pub fn owners(&self) -> &[Owner] {
        &self.owners
    }

    /// The local number of the expert `expert`; `None` when this rank does not hold it, or there is none.
    pub fn local(&self, expert: usize) -> Option<usize> {
        usize::try_from(self.owners.get(expert)?.local).ok()
    }

    /// The global ids of this rank's experts, by local number: `[E_l]`.
    pub fn owned(&self) -> Vec<usize> {
        (0..self.experts()).filter(|&expert| self.owners[expert].local >= 0).collect()
    }

    /// E_l: number of experts that this rank holds.
    pub fn n_owned(&self) -> usize {
        self.owners.iter().filter(|owner| owner.local >= 0).count()
    }

    /// The same rank without any expert.
    fn emptied(self) -> Self {
        Self { owners: vec![Owner::new(-1, 0, 1); self.owners.len()], ..self }
    }

    /// True when this rank alone holds every expert, so that global and local numbers are the same.
    pub fn is_identity(&self) -> bool {
        self.owners.iter().all(|owner| owner.local >= 0 && owner.copies() == 1)
    }
}

fn check(experts: usize, ranks: usize, rank: usize) -> Result<()> {
    let fail = |message: String| Err(Error::new(ErrorKind::Config, format!("placement: {message}")));
    if experts == 0 || i32::try_from(experts).is_err() {
        return fail(format!("expected 1 to {} experts, got {experts}", i32::MAX));
    }
    if ranks > usize::from(u16::MAX) {
        return fail(format!("expected {} ranks or fewer, got {ranks}", u16::MAX));
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
        let local = |p: Placement| p.owners().iter().map(|o| o.local).collect::<Vec<_>>();
        assert_eq!(local(Placement::linear(7, 3, 1).unwrap()), [-1, -1, -1, 0, 1, -1, -1]);
        assert_eq!(local(Placement::round_robin(7, 3, 1).unwrap()), [-1, 0, -1, -1, 1, -1, -1]);
    }

    #[test]
    fn a_table_may_hold_copies() {
        let owners = [vec![1], vec![0, 1], vec![0]];
        assert_eq!(Placement::table(&owners, 2, 0).unwrap().owned(), [1, 2]);
        let second = Placement::table(&owners, 2, 1).unwrap();
        assert_eq!(second.owners(), [Owner::new(0, 0, 1), Owner::new(1, 1, 2), Owner::new(-1, 0, 1)]);
        let all = Placement::table(&[vec![0, 1], vec![1, 0]], 2, 0).unwrap();
        assert!(!all.is_identity(), "copies take turns");
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
