//! Cutting a stack of matrices into bindings: a binding stays under the device's limit, a row is never cut.

use crate::error::{Error, ErrorKind, Result};

/// One binding: rows `row_begin..row_begin + rows` of matrices `first..first + count`.
///
/// Either `count` whole matrices, or rows of a single one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First matrix (expert) of the piece.
    pub first: usize,
    /// Matrices in the piece.
    pub count: usize,
    /// First row of each matrix.
    pub row_begin: usize,
    /// Rows of each matrix.
    pub rows: usize,
}

/// Rows of pieces come in multiples of the edge of a cooperative matrix, where the limit leaves room for more than one.
const EDGE: usize = super::matrix::EDGE as usize;

/// Rows of a piece: at most so many that its column tiles, of 16 rows or more, fit one dimension of a dispatch.
const MAX_ROWS: usize = 65_535 * 16;

/// Cuts `matrices` matrices of `rows` rows of `row_bytes` each under `limit` bytes a binding.
///
/// # Errors
/// [`ErrorKind::Limit`] when a single row exceeds the limit.
pub fn cut(matrices: usize, rows: usize, row_bytes: u64, limit: u64) -> Result<Vec<Piece>> {
    if row_bytes > limit {
        return Err(Error::new(
            ErrorKind::Limit,
            format!("a row of {row_bytes} bytes exceeds the device's binding limit of {limit}"),
        ));
    }
    let matrix_bytes = row_bytes * rows as u64;
    let mut pieces = Vec::new();
    if matrix_bytes <= limit && rows <= MAX_ROWS {
        let each = (limit / matrix_bytes.max(1)).max(1).min(matrices.max(1) as u64) as usize;
        for first in (0..matrices).step_by(each) {
            pieces.push(Piece { first, count: each.min(matrices - first), row_begin: 0, rows });
        }
        return Ok(pieces);
    }
    let most = ((limit / row_bytes) as usize).min(MAX_ROWS);
    // Products on matrices write blocks of columns.
    let each = if most > EDGE { most / EDGE * EDGE } else { most };
    for first in 0..matrices {
        for row_begin in (0..rows).step_by(each) {
            pieces.push(Piece { first, count: 1, row_begin, rows: each.min(rows - row_begin) });
        }
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_row_once_and_stay_under_the_limit() {
        for (matrices, rows, row_bytes, limit) in [
            (1, 1, 16, 16),
            (8, 160, 256, 1 << 20),
            (7, 33, 100, 3300),
            (3, 10, 100, 250),
            (2, 5, 64, 64),
            (1, 2_000_000, 16, 1 << 30),
        ] {
            let pieces = cut(matrices, rows, row_bytes, limit).unwrap();
            let mut seen = vec![0; matrices * rows];
            for p in &pieces {
                assert!((p.count * p.rows) as u64 * row_bytes <= limit, "{p:?}");
                for m in p.first..p.first + p.count {
                    for r in p.row_begin..p.row_begin + p.rows {
                        seen[m * rows + r] += 1;
                    }
                }
            }
            assert!(seen.iter().all(|n| *n == 1), "{matrices} {rows} {row_bytes} {limit}");
        }
        assert_eq!(cut(1, 1, 17, 16).unwrap_err().kind(), ErrorKind::Limit);
    }
}
