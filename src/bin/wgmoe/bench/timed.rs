//! A line between ranks that notes how long it takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use wgmoe::Result;
use wgmoe::exchange::Exchange;

/// What a line has done so far, waiting for the other ranks included.
#[derive(Debug, Default)]
pub struct Spent {
    nanoseconds: AtomicU64,
    exchanges: AtomicU64,
    bytes: AtomicU64,
}

/// A reading of [`Spent`], or the difference of two.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reading {
    pub seconds: f64,
    pub exchanges: f64,
    /// Bytes sent by this rank to others.
    pub bytes: f64,
}

impl Spent {
    pub fn read(&self) -> Reading {
        let number = |n: &AtomicU64| n.load(Ordering::Relaxed) as f64;
        let (seconds, exchanges, bytes) =
            (number(&self.nanoseconds) / 1e9, number(&self.exchanges), number(&self.bytes));
        Reading { seconds, exchanges, bytes }
    }
}

impl std::ops::Sub for Reading {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            seconds: self.seconds - other.seconds,
            exchanges: self.exchanges - other.exchanges,
            bytes: self.bytes - other.bytes,
        }
    }
}

/// A line with a clock.
pub struct Timed {
    line: Box<dyn Exchange>,
    spent: Arc<Spent>,
}

impl Timed {
    pub fn new(line: Box<dyn Exchange>, spent: &Arc<Spent>) -> Self {
        Self { line, spent: spent.clone() }
    }
}

impl Exchange for Timed {
    fn rank(&self) -> usize {
        self.line.rank()
    }

    fn ranks(&self) -> usize {
        self.line.ranks()
    }

    fn all_to_all(&mut self, to: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        let begin = Instant::now();
        let got = self.line.all_to_all(to);
        let own = self.line.rank();
        let others = to.iter().enumerate().filter(|(rank, _)| *rank != own);
        let sent: usize = others.map(|(_, bytes)| bytes.len()).sum();
        self.spent.nanoseconds.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.spent.exchanges.fetch_add(1, Ordering::Relaxed);
        self.spent.bytes.fetch_add(sent as u64, Ordering::Relaxed);
        got
    }

    fn fail(&mut self, message: &str) {
        self.line.fail(message);
    }

    fn end(self: Box<Self>) {
        self.line.end();
    }
}
