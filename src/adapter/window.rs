//! A tensor that the matrices of factors are cut from.

use std::collections::HashMap;
use std::sync::Arc;

use super::Matrix;
use crate::checkpoint::{Block, TensorView, Window};
use crate::error::Result;

/// A tensor that matrices are cut from. The same window is read once and shared.
pub(crate) struct Windows<'a> {
    view: TensorView<'a>,
    made: HashMap<Window, Arc<Matrix>>,
}

impl<'a> Windows<'a> {
    /// Of `view`.
    pub(crate) fn new(view: TensorView<'a>) -> Self {
        Self { view, made: HashMap::new() }
    }

    /// The matrix at `window`.
    ///
    /// Errors: `Tensor` when it leaves the tensor, `Io` when the file cannot be read.
    pub(crate) fn matrix(&mut self, window: Window) -> Result<Arc<Matrix>> {
        if let Some(made) = self.made.get(&window) {
            return Ok(made.clone());
        }
        let Window { rows, cols, .. } = window;
        let bytes = Block::of(self.view, window)?.to_vec()?;
        let matrix = Arc::new(Matrix { dtype: self.view.dtype, rows, cols, bytes });
        self.made.insert(window, matrix.clone());
        Ok(matrix)
    }
}
