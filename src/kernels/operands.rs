//! What products multiply: resident weights, and which rows meet which of them.

use crate::dtype::DType;
use crate::kernels::View;
use crate::kernels::align::Aligned;
use crate::plan::matrix::Magnitude;
use crate::plan::pieces::Piece;

/// A stack of matrices `[count, out, in]` on the device, cut into bindings. Rows are padded with zeros to groups of 8.
#[derive(Debug, Clone)]
pub struct Weights {
    /// Storage type, as in the file.
    pub dtype: DType,
    /// Matrices.
    pub count: usize,
    /// Rows of a matrix.
    pub out_dim: usize,
    /// Columns of a matrix: a multiple of 8.
    pub in_dim: usize,
    /// The bindings.
    pub pieces: Vec<(Piece, View)>,
    /// How large the weights are, for the matrix tier: the power of two that brings them into the range of f16, or f32 arithmetic
    /// only; and the norms of their rows.
    pub magnitude: Magnitude,
}

impl Weights {
    /// Whether no matrix is cut.
    pub fn whole(&self) -> bool {
        self.pieces.iter().all(|(piece, _)| piece.rows == self.out_dim)
    }
}

/// Which rows of x meet which matrix.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// Every row meets matrix 0.
    Dense,
    /// Pair p meets matrix `ids[p]`; i32 `[P]`. For few pairs.
    Pairs(&'a View),
    /// Tiles of pairs of one matrix each.
    Tiles(&'a Aligned),
}

/// Names of selections, as the shaders know them.
pub(crate) const DENSE: &str = "dense";
pub(crate) const TILES: &str = "tiles";

impl Rows<'_> {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Dense => DENSE,
            Self::Pairs(_) => "pairs",
            Self::Tiles(_) => TILES,
        }
    }

    /// The buffer behind `ids`, and the words of its parts.
    pub(crate) fn ids<'b>(&'b self, unused: &'b View) -> (&'b View, u32, u32) {
        match self {
            Self::Dense => (unused, 0, 0),
            Self::Pairs(view) => (view, 0, 0),
            Self::Tiles(aligned) => (&aligned.view, aligned.expert_base, aligned.sorted_base),
        }
    }
}
