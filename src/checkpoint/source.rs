//! One file of weights, read two ways: mapped, for headers and short rows, and by position, for long runs. Both count.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::Mmap;

use crate::error::{Error, ErrorKind, Result};

/// An open file whose bytes are counted when they are handed out.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    file: File,
    map: Mmap,
    bytes_read: Arc<AtomicU64>,
}

impl Source {
    /// Opens the regular file `path`, which nobody may change while it is open; bytes handed out are added to `bytes_read`.
    ///
    /// Errors: `Io` when it cannot be read or is no regular file; `Format` when it is too short to be anything.
    pub(crate) fn open(path: &Path, bytes_read: Arc<AtomicU64>) -> Result<Self> {
        let io = |e: std::io::Error| Error::io(path, &e);
        // Before opening, because opening a pipe blocks.
        let meta = std::fs::metadata(path).map_err(io)?;
        if !meta.is_file() {
            return Err(Error::new(ErrorKind::Io, format!("`{}`: expected a regular file", path.display())));
        }
        if meta.len() < 10 {
            // An empty file cannot be mapped.
            let message = format!("`{}`: truncated: expected at least 10 bytes, got {}", path.display(), meta.len());
            return Err(Error::new(ErrorKind::Format, message));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is read-only and only ever seen as `&[u8]`. It is sound as long as nobody changes or truncates
        // the file while it is mapped; the documentation of `Checkpoint::open` and `Adapter::open` asks for that.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { path: path.to_owned(), file, map, bytes_read })
    }

    /// The path it was opened with.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file, not counted: for headers, and for views that count what they hand out.
    pub(crate) fn map(&self) -> &[u8] {
        &self.map
    }

    /// Adds to the counter.
    pub(crate) fn count(&self, n_bytes: usize) {
        self.bytes_read.fetch_add(n_bytes as u64, Ordering::Relaxed);
    }

    /// Bytes handed out so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Reads the bytes `range` of the file into `to`, which has their length, by position and not through the map: long
    /// runs come faster, and a file that shrank is an error instead of a fault.
    ///
    /// Errors: `Io`, with the file's name.
    pub(crate) fn read(&self, range: Range<usize>, to: &mut [u8]) -> Result<()> {
        self.count(range.len());
        read_exact_at(&self.file, to, range.start as u64).map_err(|e| Error::io(&self.path, &e))
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, to: &mut [u8], at: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, at)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut to: &mut [u8], mut at: u64) -> std::io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !to.is_empty() {
        match file.seek_read(to, at)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => {
                to = &mut to[n..];
                at += n as u64;
            }
        }
    }
    Ok(())
}
