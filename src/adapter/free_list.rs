//! First-fit allocation of ranges inside one buffer.

/// Free ranges of a buffer, in units of the caller's choice, sorted and without neighbours that touch.
#[derive(Debug, Clone, Default)]
pub struct FreeList {
    free: Vec<(u64, u64)>,
}

impl FreeList {
    /// Adds `size` units at `begin`: new space, or a range given back.
    pub fn give(&mut self, begin: u64, size: u64) {
        if size == 0 {
            return;
        }
        let at = self.free.partition_point(|(b, _)| *b < begin);
        self.free.insert(at, (begin, size));
        if at + 1 < self.free.len() && begin + size == self.free[at + 1].0 {
            self.free[at].1 += self.free.remove(at + 1).1;
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == begin {
            self.free[at - 1].1 += self.free.remove(at).1;
        }
    }

    /// Takes `size` units; `None` when no range is long enough. Nothing is taken for a size of 0.
    pub fn take(&mut self, size: u64) -> Option<u64> {
        if size == 0 {
            return Some(0);
        }
        let at = self.free.iter().position(|(_, s)| *s >= size)?;
        let begin = self.free[at].0;
        self.free[at].0 += size;
        self.free[at].1 -= size;
        if self.free[at].1 == 0 {
            self.free.remove(at);
        }
        Some(begin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_never_overlap_and_come_back_whole(ops in proptest::collection::vec((0u64..40, any::<bool>()), 1..200)) {
            const CAPACITY: u64 = 150;
            let mut list = FreeList::default();
            list.give(0, CAPACITY);
            let mut owner = [false; CAPACITY as usize];
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (n, give) in ops {
                if give && !taken.is_empty() {
                    let (begin, size) = taken.swap_remove(n as usize % taken.len());
                    owner[begin as usize..(begin + size) as usize].fill(false);
                    list.give(begin, size);
                } else {
                    // The first place where it fits, or none.
                    let fits = |at: usize| owner.get(at..at + n as usize).is_some_and(|r| r.iter().all(|o| !o));
                    let expected = if n == 0 { Some(0) } else { (0..CAPACITY as usize).find(|at| fits(*at)) };
                    let begin = list.take(n);
                    prop_assert_eq!(begin, expected.map(|at| at as u64));
                    if let Some(begin) = begin {
                        owner[begin as usize..(begin + n) as usize].fill(true);
                        taken.push((begin, n));
                    }
                }
            }
            taken.drain(..).for_each(|(begin, size)| list.give(begin, size));
            prop_assert_eq!(list.free, vec![(0, CAPACITY)]);
        }
    }

    #[test]
    fn ranges_given_back_join_their_neighbours() {
        let mut list = FreeList::default();
        list.give(0, 100);
        let (a, b, c) = (list.take(30).unwrap(), list.take(30).unwrap(), list.take(40).unwrap());
        assert_eq!((a, b, c), (0, 30, 60));
        assert_eq!(list.take(1), None);
        list.give(a, 30);
        list.give(c, 40);
        assert_eq!(list.take(50), None);
        list.give(b, 30);
        assert_eq!(list.take(100), Some(0));
        assert_eq!(list.take(0), Some(0));
    }
}
