//! A matrix within a stored tensor, whatever the order of the tensor's dimensions. Only its own elements are read.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::Matrix;
use crate::checkpoint::TensorView;
use crate::error::Result;

/// Where the elements of a matrix are: (row, col) is element `begin + row · row_step + col · col_step` of the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Window {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) begin: usize,
    pub(crate) row_step: usize,
    pub(crate) col_step: usize,
}

impl Window {
    /// `[rows, cols]`, row-major, from element `begin` on.
    pub(crate) fn dense([rows, cols]: [usize; 2], begin: usize) -> Self {
        Self { rows, cols, begin, row_step: cols, col_step: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        let Self { rows, cols, begin, row_step, col_step } = self;
        Self { rows: cols, cols: rows, begin, row_step: col_step, col_step: row_step }
    }

    /// `n` rows: `first`, `first + every`, and so on.
    pub(crate) fn rows(self, first: usize, n: usize, every: usize) -> Self {
        Self { rows: n, begin: self.begin + first * self.row_step, row_step: self.row_step * every, ..self }
    }

    /// The columns `range`.
    pub(crate) fn cols(self, range: Range<usize>) -> Self {
        Self { cols: range.len(), begin: self.begin + range.start * self.col_step, ..self }
    }
}

/// A tensor that matrices are cut from. The same window is read once and shared.
pub(crate) struct Windows<'a> {
    view: TensorView<'a>,
    /// The whole tensor, where all of it is going to be used.
    all: Option<&'a [u8]>,
    made: HashMap<Window, Arc<Matrix>>,
}

impl<'a> Windows<'a> {
    /// Of `view`; with `all`, the caller promises to cut out every element, which is faster than one by one.
    pub(crate) fn new(view: TensorView<'a>, all: bool) -> Self {
        Self { all: all.then(|| view.all()), view, made: HashMap::new() }
    }

    /// The matrix at `window`.
    ///
    /// Errors: `Tensor` when it leaves the tensor.
    pub(crate) fn matrix(&mut self, window: Window) -> Result<Arc<Matrix>> {
        if let Some(made) = self.made.get(&window) {
            return Ok(made.clone());
        }
        let Window { rows, cols, begin, row_step, col_step } = window;
        let dtype = self.view.dtype;
        let mut bytes = Vec::with_capacity(rows * cols * dtype.size());
        if col_step == 1 && row_step == cols {
            bytes.extend_from_slice(self.run(begin, rows * cols)?);
        } else {
            for start in (0..rows).map(|row| begin + row * row_step) {
                if col_step == 1 {
                    bytes.extend_from_slice(self.run(start, cols)?);
                    continue;
                }
                for col in 0..cols {
                    bytes.extend_from_slice(self.run(start + col * col_step, 1)?);
                }
            }
        }
        let matrix = Arc::new(Matrix { dtype, rows, cols, bytes });
        self.made.insert(window, matrix.clone());
        Ok(matrix)
    }

    /// `n` elements from `begin` on.
    fn run(&self, begin: usize, n: usize) -> Result<&'a [u8]> {
        let size = self.view.dtype.size();
        let range = begin * size..(begin + n) * size;
        match self.all.and_then(|all| all.get(range.clone())) {
            Some(bytes) => Ok(bytes),
            None => self.view.bytes(range),
        }
    }
}
