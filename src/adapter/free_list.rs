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
