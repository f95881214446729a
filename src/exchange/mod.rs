//! What ranks tell each other: one primitive, and sums, dispatched tokens, broadcasts and comparisons made of it.
//!
//! Every rank calls the same operations in the same order. Sums are added in rank order, so that every rank gets the same
//! bits. A rank that fails says so with [`Exchange::fail`]; every other rank then gets its message as the error of the
//! operation it is in, or of its next one.

mod device;
mod dispatch;
mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
mod staging;

pub use device::Ranks;
pub(crate) use dispatch::{Dispatch, Received};
pub use local::Local;
pub(crate) use staging::Download;

use crate::error::{Error, ErrorKind, Result};

/// One rank's line to all others.
pub trait Exchange {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Gives `to[r]` to rank r and returns what every rank gave this one, by rank. Blocks until all have come.
    ///
    /// # Errors
    /// [`ErrorKind::Rank`] with the message of a rank that failed.
    fn all_to_all(&mut self, to: &[&[u8]]) -> Result<Vec<Vec<u8>>>;

    /// Tells all other ranks that this one ends, and why. Nothing can be exchanged after it.
    fn fail(&mut self, message: &str);

    /// This rank has nothing more to say.
    fn end(self: Box<Self>);
}

/// Adds up `values` over all ranks, in rank order; every rank gets the sum. All must give the same number of values.
///
/// Each rank adds one part and hands the result round, so a rank sends 2·(n-1)/n times the size of `values`.
///
/// # Errors
/// Those of [`Exchange::all_to_all`], and [`ErrorKind::Rank`] when a rank gave another number of values.
pub fn sum(line: &mut dyn Exchange, values: &mut [f32]) -> Result<()> {
    let (rank, ranks) = (line.rank(), line.ranks());
    if ranks == 1 {
        return Ok(());
    }
    let n = values.len();
    let each = n.div_ceil(ranks);
    let part = |r: usize| (r * each).min(n)..((r + 1) * each).min(n);
    let own = part(rank);
    let parts: Vec<&[u8]> = (0..ranks).map(|r| bytemuck::cast_slice(&values[part(r)])).collect();
    let got = line.all_to_all(&parts)?;
    let mut total = vec![0.0f32; own.len()];
    for (r, bytes) in got.iter().enumerate() {
        check_length(r, bytes.len(), own.len() * 4)?;
        for (total, bytes) in total.iter_mut().zip(bytes.chunks_exact(4)) {
            *total += f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
    }
    for (r, bytes) in gather(line, bytemuck::cast_slice(&total))?.iter().enumerate() {
        check_length(r, bytes.len(), part(r).len() * 4)?;
        bytemuck::cast_slice_mut(&mut values[part(r)]).copy_from_slice(bytes);
    }
    Ok(())
}

/// Gives every rank the `bytes` of every other, by rank.
///
/// # Errors
/// Those of [`Exchange::all_to_all`].
pub fn gather(line: &mut dyn Exchange, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    line.all_to_all(&vec![bytes; line.ranks()])
}

/// Gives every rank the `bytes` of rank 0.
///
/// # Errors
/// Those of [`Exchange::all_to_all`].
pub fn broadcast(line: &mut dyn Exchange, bytes: &[u8]) -> Result<Vec<u8>> {
    let bytes = if line.rank() == 0 { bytes } else { &[] };
    Ok(std::mem::take(&mut gather(line, bytes)?[0]))
}

/// Gives rank 0 the `bytes` of every rank, by rank; the others get nothing.
///
/// # Errors
/// Those of [`Exchange::all_to_all`].
pub fn collect(line: &mut dyn Exchange, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let to: Vec<&[u8]> = (0..line.ranks()).map(|rank| if rank == 0 { bytes } else { &[] }).collect();
    line.all_to_all(&to)
}

/// Checks that all ranks were given the same `facts`: what a rank computes depends on them.
///
/// # Errors
/// Those of [`Exchange::all_to_all`]; [`ErrorKind::Rank`] naming the first rank and the first line that differ.
pub fn agree(line: &mut dyn Exchange, facts: &str) -> Result<()> {
    let all = gather(line, facts.as_bytes())?;
    for (rank, other) in all.iter().enumerate() {
        if *other != all[0] {
            let other = String::from_utf8_lossy(other);
            let first = String::from_utf8_lossy(&all[0]);
            let pair = first.lines().zip(other.lines()).find(|(a, b)| a != b);
            let (zero, this) = pair.unwrap_or(("more facts", "fewer facts"));
            let message = format!("ranks differ: rank 0 has `{zero}`, rank {rank} has `{this}`");
            return Err(Error::new(ErrorKind::Rank, message));
        }
    }
    Ok(())
}

fn check_length(rank: usize, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Rank, format!("rank {rank} gave {got} bytes of an output, expected {expected}")))
}
