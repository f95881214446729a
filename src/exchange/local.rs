//! Ranks of one process: threads that hand each other bytes.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::Exchange;
use crate::error::{Error, ErrorKind, Result};

/// What all ranks share.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// What rank s gave rank r and r has not taken yet, oldest first: `[r][s]`.
    mail: Vec<Vec<VecDeque<Vec<u8>>>>,
    /// The first rank that failed, and why.
    failure: Option<(usize, String)>,
    /// Which ranks ended well.
    done: Vec<bool>,
}

/// The line of one rank to those of the same process. Dropping it before [`Exchange::end`] counts as a failure, so that a
/// thread that panics does not leave the others waiting.
pub struct Local {
    shared: Arc<Shared>,
    rank: usize,
    ended: bool,
}

impl Local {
    /// Lines between `n` ranks, one for each.
    pub fn lines(n: usize) -> Vec<Self> {
        let mail = (0..n).map(|_| vec![VecDeque::new(); n]).collect();
        let shared = Arc::new(Shared {
            state: Mutex::new(State { mail, failure: None, done: vec![false; n] }),
            changed: Condvar::new(),
        });
        (0..n).map(|rank| Self { shared: shared.clone(), rank, ended: false }).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nobody panics between two writes, so a poisoned lock holds whole values.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&mut self, message: &str) {
        self.ended = true;
        self.state().failure.get_or_insert_with(|| (self.rank, message.to_owned()));
        self.shared.changed.notify_all();
    }
}

impl Exchange for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.state().mail.len()
    }

    fn all_to_all(&mut self, to: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        let mut state = self.state();
        for (to, bytes) in state.mail.iter_mut().zip(to) {
            to[self.rank].push_back(bytes.to_vec());
        }
        self.shared.changed.notify_all();
        loop {
            // What has come counts even where a rank failed after it: all ranks then draw the same conclusion from it.
            let inbox = &mut state.mail[self.rank];
            if inbox.iter().all(|from| !from.is_empty()) {
                return Ok(inbox.iter_mut().filter_map(VecDeque::pop_front).collect());
            }
            if let Some((rank, message)) = &state.failure {
                return Err(Error::new(ErrorKind::Rank, format!("rank {rank}: {message}")));
            }
            let inbox = &state.mail[self.rank];
            let missing = inbox.iter().position(VecDeque::is_empty);
            if let Some(rank) = missing.filter(|from| state.done[*from]) {
                return Err(Error::new(ErrorKind::Rank, format!("rank {rank} has ended")));
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn fail(&mut self, message: &str) {
        self.failed(message);
    }

    fn end(mut self: Box<Self>) {
        self.ended = true;
        let rank = self.rank;
        self.state().done[rank] = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if !self.ended {
            self.failed("ended early");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::{agree, broadcast, sum};

    /// Runs `work` on every rank, in a thread of its own.
    fn on_ranks<T: Send>(n: usize, work: impl Fn(Local) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = Local::lines(n).into_iter().map(|line| scope.spawn(|| work(line))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn sums_are_the_same_bits_everywhere_and_added_in_rank_order() {
        for n in [1, 2, 3, 5, 8] {
            // Large and small values: the order shows in the bits.
            let values =
                |rank: usize| (0..7).map(|i| 1e7 / (1 + rank + i) as f32 + 1e-3 * i as f32).collect::<Vec<f32>>();
            let mut expected = vec![0.0f32; 7];
            for rank in 0..n {
                expected.iter_mut().zip(values(rank)).for_each(|(e, v)| *e += v);
            }
            let got = on_ranks(n, |mut line| {
                let mut own = values(line.rank());
                for _ in 0..3 {
                    own = values(line.rank());
                    sum(&mut line, &mut own).unwrap();
                }
                Box::new(line).end();
                own
            });
            assert!(got.iter().all(|g| n == 1 || *g == expected), "{n}: {got:?}");
        }
    }

    #[test]
    fn everybody_gets_what_rank_0_says_and_ranks_that_differ_are_found() {
        let got = on_ranks(3, |mut line| {
            let own = format!("from {}", line.rank());
            let said = broadcast(&mut line, own.as_bytes()).unwrap();
            let same = agree(&mut line, "layers 3\nexperts 8").is_ok();
            let facts = format!("layers 3\nexperts {}", if line.rank() == 2 { 7 } else { 8 });
            let differs = agree(&mut line, &facts).unwrap_err().to_string();
            Box::new(line).end();
            (String::from_utf8(said).unwrap(), same, differs)
        });
        for (said, same, differs) in got {
            assert_eq!((said.as_str(), same), ("from 0", true));
            assert_eq!(differs, "ranks differ: rank 0 has `experts 8`, rank 2 has `experts 7`");
        }
    }

    #[test]
    fn a_rank_that_fails_or_vanishes_ends_all() {
        for vanishes in [false, true] {
            let got = on_ranks(4, |mut line| {
                if line.rank() == 2 {
                    if !vanishes {
                        line.fail("no memory");
                    }
                    return String::new();
                }
                sum(&mut line, &mut [1.0; 8]).unwrap_err().to_string()
            });
            let expected = if vanishes { "rank 2: ended early" } else { "rank 2: no memory" };
            for rank in [0, 1, 3] {
                assert_eq!(got[rank], expected);
            }
        }
    }
}
