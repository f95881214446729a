//! Places for sequences: rows of the block table and cache blocks. Where sequences are shared out over ranks, each home has rows
//! and a cache of its own.

use crate::engine::message::home;

/// What is free on all homes.
pub(crate) struct Places {
    homes: Vec<Home>,
}

#[derive(Default)]
struct Home {
    rows: Vec<u32>,
    blocks: Vec<u32>,
    running: usize,
}

impl Places {
    /// Rows for `sequences` sequences, and `blocks` blocks on each of `homes` homes.
    pub fn new(sequences: usize, blocks: usize, homes: usize) -> Self {
        let rows = |this: usize| (0..sequences as u32).rev().filter(|row| home(*row, homes) == this).collect();
        let new = |this| Home { rows: rows(this), blocks: (0..blocks as u32).rev().collect(), running: 0 };
        Self { homes: (0..homes).map(new).collect() }
    }

    /// No row is left.
    pub fn is_full(&self) -> bool {
        self.homes.iter().all(|home| home.rows.is_empty())
    }

    /// Takes a row and `n` blocks of the home that runs the fewest sequences among those with room; `None` when there is none.
    pub fn take(&mut self, n: usize) -> Option<(u32, Vec<u32>)> {
        let room = |home: &&mut Home| !home.rows.is_empty() && home.blocks.len() >= n;
        let home = self.homes.iter_mut().filter(room).min_by_key(|home| home.running)?;
        home.running += 1;
        let row = home.rows.pop()?;
        Some((row, home.blocks.split_off(home.blocks.len() - n)))
    }

    /// Gives a place back. Steps already submitted may still write to its blocks: a later owner's writes come after.
    pub fn give(&mut self, row: u32, blocks: Vec<u32>) {
        let n = self.homes.len();
        let home = &mut self.homes[home(row, n)];
        home.running -= 1;
        home.rows.push(row);
        home.blocks.extend(blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_shared_out_evenly_and_each_home_has_its_own_blocks() {
        let mut places = Places::new(7, 4, 3);
        let rows = |places: &mut Places, n: usize| (0..n).map(|_| places.take(2).unwrap().0).collect::<Vec<_>>();
        assert_eq!(rows(&mut places, 6), [0, 1, 2, 3, 4, 5]);
        // The last row is on a home without blocks.
        assert!(!places.is_full() && places.take(1).is_none());
        places.give(4, vec![0, 1]);
        places.give(1, vec![2, 3]);
        places.give(3, vec![2, 3]);
        // Two of home 1 have gone, one of home 0.
        let (row, blocks) = places.take(3).unwrap();
        assert_eq!((row, blocks.len()), (1, 3));
        assert_eq!(rows(&mut places, 1), [3]);
        assert!(places.take(5).is_none());
    }

    #[test]
    fn one_home_has_everything() {
        let mut places = Places::new(2, 3, 1);
        assert_eq!(places.take(2), Some((0, vec![1, 0])));
        assert_eq!(places.take(2), None);
        assert_eq!(places.take(1), Some((1, vec![2])));
        assert!(places.is_full());
    }
}
