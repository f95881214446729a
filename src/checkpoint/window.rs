//! Where a matrix lies within a stored tensor, whatever the order of the tensor's dimensions.

use std::ops::Range;

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

    /// Elements that the tensor must have at least; `None` when they cannot be counted.
    pub(crate) fn extent(self) -> Option<usize> {
        if self.rows == 0 || self.cols == 0 {
            return Some(0);
        }
        let rows = (self.rows - 1).checked_mul(self.row_step)?;
        let cols = (self.cols - 1).checked_mul(self.col_step)?;
        rows.checked_add(cols)?.checked_add(self.begin)?.checked_add(1)
    }
}
