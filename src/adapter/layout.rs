//! From the flat pair of a fused parameter to one `[R, in]` and one `[out, R]` matrix an expert.
//!
//! PEFT saves a pair for all E experts as two linear weights: A `[R·E, X]`, one block of R rows an expert, and
//! B `[Y, R·E]`, whose column j·E + e is column j of expert e. The product of an expert's blocks is `[Y, X]`. Releases
//! differ in whether that is the change of the weight or its transpose: `LoraParameter`/`ParamWrapper` in
//! `peft/tuners/lora/layer.py`.

use super::Matrix;
use super::config::{ExpertColumns, Version};

/// The first PEFT release whose products are `[out, in]` for parameters stored as `[E, out, in]`.
const CANONICAL_SINCE: [u32; 3] = [0, 19, 1];

/// What the product of an expert's blocks is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orientation {
    /// The change of the weight, `[out, in]`.
    Canonical,
    /// Its transpose, `[in, out]`.
    Transposed,
}

/// The orientation of a pair with A `[_, x]` and B `[y, _]` for a parameter `[E, out, in]`.
///
/// Errors: `Ok(None)` when the shape fits neither way; `Err` when it fits both ways and the version does not decide.
pub(crate) fn orientation(
    [y, x]: [usize; 2],
    [out, inn]: [usize; 2],
    version: Option<Version>,
) -> Result<Option<Orientation>, &'static str> {
    if out == inn && [y, x] == [out, inn] {
        return match version.and_then(|v| v.is_since(CANONICAL_SINCE)) {
            Some(true) => Ok(Some(Orientation::Canonical)),
            Some(false) => Ok(Some(Orientation::Transposed)),
            None => Err("the parameter is square, and only a released `peft_version` tells which way round it is"),
        };
    }
    Ok(match [y, x] {
        shape if shape == [out, inn] => Some(Orientation::Canonical),
        shape if shape == [inn, out] => Some(Orientation::Transposed),
        _ => None,
    })
}

/// A `[R, in]` and B `[out, R]` of `expert`, from the flat `a: [R·E, X]` and `b: [Y, R·E]`.
pub(crate) fn expert_factors(
    a: &Matrix,
    b: &Matrix,
    expert: usize,
    rank: usize,
    orientation: Orientation,
    columns: ExpertColumns,
) -> (Matrix, Matrix) {
    let n_experts = a.rows / rank;
    let (first, step) = match columns {
        ExpertColumns::RankMajor => (expert, n_experts),
        ExpertColumns::GroupedByExpert => (expert * rank, 1),
    };
    let a = rows(a, expert * rank, rank);
    let b = strided_columns(b, first, step, rank);
    match orientation {
        Orientation::Canonical => (a, b),
        // (B·A)ᵀ = Aᵀ·Bᵀ
        Orientation::Transposed => (transposed(&b), transposed(&a)),
    }
}

/// `n` rows of `m` from `first` on.
pub(crate) fn rows(m: &Matrix, first: usize, n: usize) -> Matrix {
    let row_bytes = m.cols * m.dtype.size();
    Matrix {
        dtype: m.dtype,
        rows: n,
        cols: m.cols,
        bytes: m.bytes[first * row_bytes..(first + n) * row_bytes].to_vec(),
    }
}

/// Columns `first`, `first + step`, … of `m`, `n` of them.
fn strided_columns(m: &Matrix, first: usize, step: usize, n: usize) -> Matrix {
    gather(m, m.rows, n, |row, col| row * m.cols + first + col * step)
}

fn transposed(m: &Matrix) -> Matrix {
    gather(m, m.cols, m.rows, |row, col| col * m.cols + row)
}

/// A new matrix whose element (row, col) is element `source(row, col)` of `m`.
fn gather(m: &Matrix, rows: usize, cols: usize, source: impl Fn(usize, usize) -> usize) -> Matrix {
    let size = m.dtype.size();
    let mut bytes = Vec::with_capacity(rows * cols * size);
    for row in 0..rows {
        for col in 0..cols {
            let at = source(row, col) * size;
            bytes.extend_from_slice(&m.bytes[at..at + size]);
        }
    }
    Matrix { dtype: m.dtype, rows, cols, bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn matrix(rows: usize, cols: usize) -> Matrix {
        let values: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
        Matrix { dtype: DType::F32, rows, cols, bytes: DType::F32.encode(&values) }
    }

    fn values(m: &Matrix) -> Vec<f32> {
        m.dtype.decode(&m.bytes)
    }

    #[test]
    fn blocks_of_one_expert() {
        // E 3, R 2, X 2, Y 1.
        let (a, b) = (matrix(6, 2), matrix(1, 6));
        let (a1, b1) = expert_factors(&a, &b, 1, 2, Orientation::Canonical, ExpertColumns::RankMajor);
        assert_eq!((values(&a1), values(&b1)), (vec![4.0, 5.0, 6.0, 7.0], vec![1.0, 4.0]));
        let (_, b1) = expert_factors(&a, &b, 1, 2, Orientation::Canonical, ExpertColumns::GroupedByExpert);
        assert_eq!(values(&b1), [2.0, 3.0]);
        let (a1, b1) = expert_factors(&a, &b, 1, 2, Orientation::Transposed, ExpertColumns::RankMajor);
        assert_eq!((a1.rows, a1.cols, b1.rows, b1.cols), (2, 1, 2, 2));
        assert_eq!((values(&a1), values(&b1)), (vec![1.0, 4.0], vec![4.0, 6.0, 5.0, 7.0]));
    }

    #[test]
    fn square_parameters_need_a_version() {
        let version = |text| Version::parse(text);
        let cases = [
            ([8, 4], [8, 4], None, Ok(Some(Orientation::Canonical))),
            ([4, 8], [8, 4], None, Ok(Some(Orientation::Transposed))),
            ([4, 4], [8, 4], None, Ok(None)),
            ([4, 4], [4, 4], version("0.18.1"), Ok(Some(Orientation::Transposed))),
            ([4, 4], [4, 4], version("0.19.0"), Ok(Some(Orientation::Transposed))),
            ([4, 4], [4, 4], version("0.19.1"), Ok(Some(Orientation::Canonical))),
            ([4, 8], [4, 4], version("0.19.1"), Ok(None)),
        ];
        let wrong: Vec<_> =
            cases.iter().filter(|(got, want, v, expected)| orientation(*got, *want, *v) != *expected).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        assert!(orientation([4, 4], [4, 4], None).is_err());
        assert!(orientation([4, 4], [4, 4], version("0.19.1.dev0")).is_err());
    }
}
