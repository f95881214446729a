//! From files to a sink, chunk by chunk: several threads read, one takes. Memory is bounded by the buffers that go round.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::checkpoint::Block;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::matrix::Measured;

/// Bytes of a chunk at most, unless a single row is longer: large enough for a read to run at full speed, small enough for
/// many to be under way.
pub(super) const CHUNK_BYTES: usize = 4 << 20;
/// Memory for chunks on their way, where nobody says.
const STAGING_BYTES: u64 = 32 << 20;
/// Reader threads where nobody says: more than one core can copy from the page cache, less than would disturb a disk.
const READERS: usize = 4;

/// How to read.
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamOptions<'a> {
    /// Reader threads; 0: chosen.
    pub readers: usize,
    /// Bytes of host memory for what is on its way; 0: 32 MiB. Never less than one chunk of 4 MiB.
    pub staging_bytes: u64,
    /// Set it to true, from any thread, to end with [`ErrorKind::Cancelled`].
    pub cancel: Option<&'a AtomicBool>,
}

/// What went through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Streamed {
    /// Bytes read from files, counted where they were read.
    pub bytes_read: u64,
    /// Bytes given to the sink, padding included.
    pub bytes_written: u64,
    /// Most bytes of host memory that chunks took at a time.
    pub peak_staging_bytes: u64,
}

/// Consecutive bytes of a destination, and where they come from.
#[derive(Debug)]
pub(super) struct Chunk<'a> {
    /// Destination.
    pub buffer: usize,
    /// First byte in it.
    pub offset: u64,
    /// Length, with padding.
    pub n_bytes: usize,
    /// What is not covered by these is zero.
    pub runs: Vec<Run<'a>>,
}

/// Rows of a block within a chunk.
#[derive(Debug)]
pub(super) struct Run<'a> {
    pub block: Block<'a>,
    pub rows: Range<usize>,
    /// First byte in the chunk, and bytes from row to row.
    pub at: usize,
    pub stride: usize,
    /// Where the magnitude is wanted, and of which matrix these rows are.
    pub measured: Option<(Arc<Measured>, usize)>,
}

impl Chunk<'_> {
    /// Fills `to`, which becomes as long as the chunk. Returns the bytes read from files.
    fn fill(&self, to: &mut Vec<u8>) -> Result<u64> {
        let covered: usize = self.runs.iter().map(|r| r.rows.len() * r.block.cols() * r.block.dtype().size()).sum();
        if covered < self.n_bytes {
            to.clear();
        }
        // Exactly, so that the bound on staging memory holds.
        to.reserve_exact(self.n_bytes.saturating_sub(to.len()));
        to.resize(self.n_bytes, 0);
        let mut n_bytes = 0;
        for run in &self.runs {
            n_bytes += run.block.read(run.rows.clone(), &mut to[run.at..], run.stride)?;
            if let Some((measured, m)) = &run.measured {
                measured.add(*m, &to[run.at..run.at + run.rows.len() * run.stride]);
            }
        }
        Ok(n_bytes)
    }
}

/// The number of a chunk, and its bytes.
type Filled = (usize, Vec<u8>);

/// What readers and the taker share.
struct Shared {
    /// Buffers to fill.
    empty: Mutex<Vec<Vec<u8>>>,
    has_empty: Condvar,
    /// Filled chunks, or why there are no more.
    filled: Mutex<VecDeque<Result<Filled>>>,
    has_filled: Condvar,
    next: AtomicUsize,
    stop: AtomicBool,
    bytes_read: AtomicU64,
    /// Bytes of all buffers that exist.
    staged: AtomicU64,
}

/// A poisoned lock holds whole values: nobody panics between two writes.
macro_rules! lock {
    ($mutex:expr) => {
        $mutex.lock().unwrap_or_else(PoisonError::into_inner)
    };
}

/// Reads `chunks` and gives each to `sink`, in any order, with their number; on the calling thread.
///
/// Errors: the first of a reader or of `sink`; [`ErrorKind::Cancelled`].
pub(super) fn stream(
    chunks: &[Chunk<'_>],
    options: &StreamOptions<'_>,
    sink: &mut dyn FnMut(usize, &[u8]) -> Result<()>,
) -> Result<Streamed> {
    let largest = chunks.iter().map(|c| c.n_bytes).max().unwrap_or(0).max(1);
    let staging = if options.staging_bytes == 0 { STAGING_BYTES } else { options.staging_bytes };
    let buffers = ((staging / largest as u64) as usize).clamp(1, chunks.len().max(1));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let readers = if options.readers == 0 { READERS.min(cores) } else { options.readers }.min(buffers);
    let shared = Shared {
        empty: Mutex::new(vec![Vec::new(); buffers]),
        has_empty: Condvar::new(),
        filled: Mutex::new(VecDeque::new()),
        has_filled: Condvar::new(),
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        bytes_read: AtomicU64::new(0),
        staged: AtomicU64::new(0),
    };
    let mut written = 0;
    let result = std::thread::scope(|scope| {
        for _ in 0..readers {
            scope.spawn(|| read(&shared, chunks));
        }
        let mut take_all = || {
            for _ in 0..chunks.len() {
                if options.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
                    return Err(Error::new(ErrorKind::Cancelled, "loading was cancelled"));
                }
                let (number, bytes) = shared.take()?;
                written += bytes.len() as u64;
                sink(number, &bytes)?;
                lock!(shared.empty).push(bytes);
                shared.has_empty.notify_one();
            }
            Ok(())
        };
        let result = take_all();
        // Readers that wait for a buffer wake up and leave; they are joined at the end of the scope.
        shared.stop.store(true, Ordering::Release);
        drop(lock!(shared.empty));
        shared.has_empty.notify_all();
        result
    });
    result?;
    Ok(Streamed {
        bytes_read: shared.bytes_read.load(Ordering::Relaxed),
        bytes_written: written,
        peak_staging_bytes: shared.staged.load(Ordering::Relaxed),
    })
}

impl Shared {
    /// The next filled chunk.
    fn take(&self) -> Result<(usize, Vec<u8>)> {
        let mut filled = lock!(self.filled);
        loop {
            if let Some(chunk) = filled.pop_front() {
                return chunk;
            }
            filled = self.has_filled.wait(filled).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A buffer to fill; `None` when there is nothing left to do.
    fn buffer(&self) -> Option<Vec<u8>> {
        let mut empty = lock!(self.empty);
        loop {
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            if let Some(buffer) = empty.pop() {
                return Some(buffer);
            }
            empty = self.has_empty.wait(empty).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A reader: takes a buffer, fills it with the next chunk, hands it over.
fn read(shared: &Shared, chunks: &[Chunk<'_>]) {
    while let Some(mut buffer) = shared.buffer() {
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let Some(chunk) = chunks.get(number) else { return };
        let before = buffer.capacity();
        let filled = chunk.fill(&mut buffer);
        shared.staged.fetch_add((buffer.capacity() - before) as u64, Ordering::Relaxed);
        let failed = filled.is_err();
        let filled = filled.map(|n_bytes| {
            shared.bytes_read.fetch_add(n_bytes, Ordering::Relaxed);
            (number, buffer)
        });
        lock!(shared.filled).push_back(filled);
        shared.has_filled.notify_one();
        if failed {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// `n` chunks of one row of 8 bytes each, with 4 bytes of padding.
    fn chunks(bytes: &[u8]) -> Vec<Chunk<'_>> {
        let block = Block::borrowed(DType::Bf16, [bytes.len() / 8, 4], bytes).unwrap();
        let chunk = |row: usize| {
            let run = Run { block: block.clone(), rows: row..row + 1, at: 0, stride: 12, measured: None };
            Chunk { buffer: 0, offset: row as u64 * 12, n_bytes: 12, runs: vec![run] }
        };
        (0..bytes.len() / 8).map(chunk).collect()
    }

    #[test]
    fn every_chunk_arrives_once_with_zeros_around_it() {
        let bytes: Vec<u8> = (0..800u32).map(|i| (i % 251) as u8 + 1).collect();
        for (readers, staging_bytes) in [(0, 0), (1, 1), (3, 40), (8, 1 << 20)] {
            let options = StreamOptions { readers, staging_bytes, cancel: None };
            let mut got = vec![None; 100];
            let streamed = stream(&chunks(&bytes), &options, &mut |number, bytes| {
                assert!(got[number].replace(bytes.to_vec()).is_none());
                Ok(())
            });
            assert_eq!(streamed.unwrap().bytes_written, 1200);
            for (row, got) in got.into_iter().enumerate() {
                assert_eq!(got.unwrap(), [&bytes[row * 8..row * 8 + 8], &[0; 4]].concat());
            }
        }
    }

    #[test]
    fn an_error_of_the_sink_and_a_cancellation_end_it() {
        let bytes = vec![1; 800];
        let failing = stream(&chunks(&bytes), &StreamOptions::default(), &mut |number, _| match number {
            0..40 => Ok(()),
            _ => Err(Error::new(ErrorKind::Device, "gone")),
        });
        assert_eq!(failing.unwrap_err().kind(), ErrorKind::Device);
        let cancel = AtomicBool::new(false);
        let mut taken = 0;
        let options = StreamOptions { cancel: Some(&cancel), staging_bytes: 100, ..StreamOptions::default() };
        let cancelled = stream(&chunks(&bytes), &options, &mut |_, _| {
            taken += 1;
            cancel.store(taken == 7, Ordering::Relaxed);
            Ok(())
        });
        assert_eq!((cancelled.unwrap_err().kind(), taken), (ErrorKind::Cancelled, 7));
    }
}
