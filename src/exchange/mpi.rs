//! Ranks that are processes, on one machine or many, through the MPI library of the machine (feature `mpi`).

use mpi::Threading;
use mpi::datatype::{Partition, PartitionMut};
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Root};

use super::Exchange;
use crate::error::{Error, ErrorKind, Result};

/// What a rank that failed gives instead of a length.
const FAILED: i32 = -1;

/// The line of this process to all others that `mpirun` started. Dropping it before [`Exchange::end`] counts as a failure; in a panic
/// it aborts the whole job, so that nobody waits for this process.
pub struct Mpi {
    world: SimpleCommunicator,
    /// Finalises MPI when dropped, after `world`.
    _universe: Universe,
    failed: bool,
    ended: bool,
    local_rank: usize,
}

impl Mpi {
    /// Joins the job. A program started without `mpirun` is a job of one rank.
    ///
    /// # Errors
    /// [`ErrorKind::Rank`] when MPI was initialised before, or allows no threads.
    pub fn join() -> Result<Self> {
        // Only one thread talks, but the reader threads of a load exist beside it.
        let fail = |message: &str| Error::new(ErrorKind::Rank, format!("MPI: {message}"));
        let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| fail("expected a process that has not initialised MPI yet"))?;
        if threading < Threading::Serialized {
            return Err(fail("expected a library that allows calls from any one thread at a time"));
        }
        let world = universe.world();
        // All ranks take part in this, so it is done here.
        let local_rank = world.split_shared(world.rank()).rank() as usize;
        Ok(Self { world, _universe: universe, failed: false, ended: false, local_rank })
    }

    /// This rank's number among those of the same machine.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The lengths that all ranks give this one; `own` is what this one gives the others.
    fn lengths(&self, own: &[i32]) -> Vec<i32> {
        let mut lengths = vec![0; own.len()];
        self.world.all_to_all_into(own, &mut lengths[..]);
        lengths
    }

    /// The message of `rank`, which failed.
    fn message_of(&self, rank: usize, own: &str) -> String {
        let root = self.world.process_at_rank(rank as i32);
        let mut length = own.len() as u64;
        root.broadcast_into(&mut length);
        let mut bytes = own.as_bytes().to_vec();
        // Never empty, as in `all_to_all`.
        bytes.resize(length as usize + 1, 0);
        root.broadcast_into(&mut bytes[..]);
        String::from_utf8_lossy(&bytes[..length as usize]).into_owned()
    }

    /// Error of the first rank that gave no length.
    fn check(&mut self, lengths: &[i32]) -> Result<()> {
        let Some(rank) = lengths.iter().position(|n| *n == FAILED) else { return Ok(()) };
        self.failed = true;
        Err(Error::new(ErrorKind::Rank, format!("rank {rank}: {}", self.message_of(rank, ""))))
    }
}

impl Exchange for Mpi {
    fn rank(&self) -> usize {
        self.world.rank() as usize
    }

    fn ranks(&self) -> usize {
        self.world.size() as usize
    }

    fn all_to_all(&mut self, to: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        if self.failed {
            return Err(Error::new(ErrorKind::Rank, "the job has failed"));
        }
        // MPI counts in i32.
        let total: usize = to.iter().map(|bytes| bytes.len()).sum();
        if i32::try_from(total).is_err() {
            return Err(Error::new(ErrorKind::Limit, format!("{total} bytes in one exchange, MPI takes {}", i32::MAX)));
        }
        let own: Vec<i32> = to.iter().map(|bytes| bytes.len() as i32).collect();
        let lengths = self.lengths(&own);
        self.check(&lengths)?;
        // One byte more than is sent: an empty vector of bytes has the address 1, which Open MPI takes for `MPI_IN_PLACE`.
        let send = [to.concat(), vec![0]].concat();
        let mut received = vec![0u8; lengths.iter().map(|n| *n as usize).sum::<usize>() + 1];
        self.world.all_to_all_varcount_into(
            &Partition::new(&send[..], &own[..], &offsets(&own)[..]),
            &mut PartitionMut::new(&mut received[..], &lengths[..], &offsets(&lengths)[..]),
        );
        let mut rest = &received[..];
        Ok(lengths
            .iter()
            .map(|n| {
                let (part, after) = rest.split_at(*n as usize);
                rest = after;
                part.to_vec()
            })
            .collect())
    }

    fn fail(&mut self, message: &str) {
        if self.failed {
            return;
        }
        self.failed = true;
        let lengths = self.lengths(&vec![FAILED; self.ranks()]);
        // Several may fail at a time: all name the first.
        if let Some(first) = lengths.iter().position(|n| *n == FAILED) {
            self.message_of(first, message);
        }
    }

    // Finalising waits for the others.
    fn end(mut self: Box<Self>) {
        self.ended = true;
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.world.abort(1);
        }
        if !self.ended {
            self.fail("ended early");
        }
    }
}

/// Where each part begins.
fn offsets(lengths: &[i32]) -> Vec<i32> {
    let mut next = 0;
    lengths
        .iter()
        .map(|n| {
            let begin = next;
            next += n;
            begin
        })
        .collect()
}
