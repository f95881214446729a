//! A matrix within stored bytes: any rows and columns of a tensor, in either orientation, every second row where gate and
//! up alternate. Only its own elements are read.

use std::ops::Range;
use std::sync::Arc;

use super::safetensors::TensorView;
use super::window::Window;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};

/// Runs of at least this many bytes are read by position: a system call is cheaper than the page faults it saves.
const LONG_RUN: usize = 32 << 10;

/// Where the bytes are.
#[derive(Debug, Clone)]
enum Bytes<'a> {
    Tensor(TensorView<'a>),
    Borrowed(&'a [u8]),
    Owned(Arc<[u8]>),
}

impl Bytes<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Tensor(view) => view.n_bytes(),
            Self::Borrowed(bytes) => bytes.len(),
            Self::Owned(bytes) => bytes.len(),
        }
    }

    /// The bytes `range`, which lie within; of a file's, [`count`](Self::count) is told.
    fn get(&self, range: Range<usize>) -> &[u8] {
        match self {
            Self::Tensor(view) => view.uncounted(range),
            Self::Borrowed(bytes) => &bytes[range],
            Self::Owned(bytes) => &bytes[range],
        }
    }

    /// Counts `n_bytes` that [`get`](Self::get) gave from a file.
    fn count(&self, n_bytes: usize) {
        if let Self::Tensor(view) = self {
            view.count(n_bytes);
        }
    }

    fn read(&self, begin: usize, to: &mut [u8]) -> Result<()> {
        match self {
            Self::Tensor(view) if to.len() >= LONG_RUN => view.read(begin, to),
            _ => {
                to.copy_from_slice(self.get(begin..begin + to.len()));
                self.count(to.len());
                Ok(())
            }
        }
    }
}

/// A matrix `[rows, cols]` (outputs, inputs) within stored bytes.
#[derive(Debug, Clone)]
pub struct Block<'a> {
    bytes: Bytes<'a>,
    dtype: DType,
    window: Window,
    /// Rows that the block takes where it is put; those past `rows` are zero.
    height: usize,
}

impl<'a> Block<'a> {
    /// All of a row-major matrix in memory.
    ///
    /// Errors: `Tensor` when `bytes` is not `rows · cols` elements.
    pub fn borrowed(dtype: DType, [rows, cols]: [usize; 2], bytes: &'a [u8]) -> Result<Self> {
        let expected = rows * cols * dtype.size();
        if bytes.len() != expected {
            let message = format!("a matrix of [{rows}, {cols}]: expected {expected} bytes, got {}", bytes.len());
            return Err(Error::new(ErrorKind::Tensor, message));
        }
        Self::new(Bytes::Borrowed(bytes), dtype, Window::dense([rows, cols], 0))
    }

    /// A row of values.
    pub(crate) fn row(values: &[f32]) -> Self {
        let bytes = Bytes::Owned(bytemuck::cast_slice(values).into());
        Self { bytes, dtype: DType::F32, window: Window::dense([1, values.len()], 0), height: 1 }
    }

    /// The elements of `view` at `window`.
    ///
    /// Errors: `Tensor` when one of them lies outside the tensor.
    pub(crate) fn of(view: TensorView<'a>, window: Window) -> Result<Self> {
        Self::new(Bytes::Tensor(view), view.dtype, window)
    }

    fn new(bytes: Bytes<'a>, dtype: DType, window: Window) -> Result<Self> {
        let n_bytes = window.extent().and_then(|n| n.checked_mul(dtype.size()));
        if n_bytes.is_none_or(|n| n > bytes.len()) {
            let message = format!("{window:?} leaves its {} bytes", bytes.len());
            return Err(Error::new(ErrorKind::Tensor, message));
        }
        Ok(Self { bytes, dtype, window, height: window.rows })
    }

    /// The same with zero rows below, `height` rows in all.
    pub(crate) fn padded_to(self, height: usize) -> Self {
        Self { height: height.max(self.window.rows), ..self }
    }

    /// The rows `range` alone.
    ///
    /// Errors: `Tensor` when there are no such rows.
    pub(crate) fn take_rows(self, range: Range<usize>) -> Result<Self> {
        check_range("rows", &range, self.window.rows)?;
        let window = self.window.rows(range.start, range.len(), 1);
        Ok(Self { window, height: window.rows, ..self })
    }

    /// The columns `range` alone.
    ///
    /// Errors: `Tensor` when there are no such columns.
    pub(crate) fn take_cols(self, range: Range<usize>) -> Result<Self> {
        check_range("columns", &range, self.window.cols)?;
        Ok(Self { window: self.window.cols(range), ..self })
    }

    /// Storage type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows that hold elements.
    pub fn rows(&self) -> usize {
        self.window.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.window.cols
    }

    /// Rows with those of zeros.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Bytes of its elements.
    pub fn n_bytes(&self) -> usize {
        self.rows() * self.cols() * self.dtype.size()
    }

    /// Its elements, row by row, without padding.
    ///
    /// Errors: `Io` when the file cannot be read.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.n_bytes()];
        self.read(0..self.rows(), &mut bytes, self.cols() * self.dtype.size())?;
        Ok(bytes)
    }

    /// Writes the rows `rows` to `to`, one every `stride` bytes; the bytes between rows are left alone. Returns the bytes
    /// read from a file.
    ///
    /// Errors: `Io` when the file cannot be read.
    pub(crate) fn read(&self, rows: Range<usize>, to: &mut [u8], stride: usize) -> Result<u64> {
        let size = self.dtype.size();
        let Window { cols, begin, row_step, col_step, .. } = self.window;
        let row_bytes = cols * size;
        let n_bytes = rows.len() * row_bytes;
        if n_bytes == 0 {
            return Ok(0);
        }
        let at = |row: usize, col: usize| (begin + row * row_step + col * col_step) * size;
        if col_step == 1 && row_step == cols && stride == row_bytes {
            self.bytes.read(at(rows.start, 0), &mut to[..n_bytes])?;
        } else if col_step == 1 {
            for (i, row) in rows.enumerate() {
                self.bytes.read(at(row, 0), &mut to[i * stride..i * stride + row_bytes])?;
            }
        } else {
            // Along what lies together in the file: stored the other way round, a stored row is a column here.
            let mut copy = |i: usize, col: usize| {
                let from = at(rows.start + i, col);
                to[i * stride + col * size..][..size].copy_from_slice(self.bytes.get(from..from + size));
            };
            if row_step < col_step {
                (0..cols).for_each(|col| (0..rows.len()).for_each(|i| copy(i, col)));
            } else {
                (0..rows.len()).for_each(|i| (0..cols).for_each(|col| copy(i, col)));
            }
            self.bytes.count(n_bytes);
        }
        Ok(if matches!(self.bytes, Bytes::Tensor(_)) { n_bytes as u64 } else { 0 })
    }
}

fn check_range(what: &str, range: &Range<usize>, n: usize) -> Result<()> {
    if range.start <= range.end && range.end <= n {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Tensor, format!("expected {what} within 0..{n}, got {range:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements 0.. of a stored tensor.
    fn stored(n: u16) -> Vec<u8> {
        (0..n).flat_map(u16::to_le_bytes).collect()
    }

    fn rows(block: &Block<'_>, range: Range<usize>, stride: usize) -> Vec<u16> {
        let mut to = vec![0xff; (range.len() * stride).max(1)];
        block.read(range, &mut to, stride).unwrap();
        to.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    }

    #[test]
    fn rows_and_columns_are_found_in_every_layout() {
        let bytes = stored(24);
        let block = |shape, begin, row, col| {
            let [rows, cols] = shape;
            let window = Window { rows, cols, begin, row_step: row, col_step: col };
            Block::new(Bytes::Borrowed(&bytes), DType::Bf16, window).unwrap()
        };
        // Rows 1 and 2 of [4, 6], whole, then columns 2..4 with a wider row below.
        assert_eq!(rows(&block([2, 6], 6, 6, 1), 0..2, 12), (6..18).collect::<Vec<_>>());
        assert_eq!(rows(&block([2, 2], 8, 6, 1), 0..2, 6), [8, 9, 0xffff, 14, 15, 0xffff]);
        // Every second row (gate and up alternate), the last one alone.
        assert_eq!(rows(&block([2, 6], 6, 12, 1), 1..2, 12), (18..24).collect::<Vec<_>>());
        // Stored [in, out] = [4, 6]: rows 1..3 of the turned matrix, then every second row from 1.
        assert_eq!(rows(&block([2, 4], 1, 1, 6), 0..2, 8), [1, 7, 13, 19, 2, 8, 14, 20]);
        assert_eq!(rows(&block([3, 4], 1, 2, 6), 1..3, 8), [3, 9, 15, 21, 5, 11, 17, 23]);
        assert_eq!(rows(&block([0, 4], 1, 2, 6), 0..0, 8), [0u16; 0]);
    }

    #[test]
    fn rows_and_columns_of_a_block_are_a_block() {
        let bytes = stored(24);
        let block = || Block::borrowed(DType::Bf16, [4, 6], &bytes).unwrap();
        let part = block().take_rows(1..4).unwrap().take_cols(2..4).unwrap();
        assert_eq!((part.rows(), part.height(), part.cols()), (3, 3, 2));
        assert_eq!(rows(&part, 1..3, 4), [14, 15, 20, 21]);
        assert_eq!(block().take_rows(3..5).unwrap_err().kind(), ErrorKind::Tensor);
        assert_eq!(block().take_cols(3..7).unwrap_err().kind(), ErrorKind::Tensor);
    }

    #[test]
    fn a_block_outside_its_bytes_is_refused() {
        let bytes = stored(24);
        let cases = [([4, 6], 1, 6, 1), ([5, 6], 0, 6, 1), ([2, 2], 0, usize::MAX, 1), ([1, 2], 0, 1, usize::MAX)];
        for (shape, begin, row, col) in cases {
            let [rows, cols] = shape;
            let window = Window { rows, cols, begin, row_step: row, col_step: col };
            let got = Block::new(Bytes::Borrowed(&bytes), DType::Bf16, window);
            assert_eq!(got.unwrap_err().kind(), ErrorKind::Tensor, "{window:?}");
        }
        assert!(Block::borrowed(DType::Bf16, [4, 5], &bytes).is_err());
    }
}
