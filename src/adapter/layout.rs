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

/// How a model keeps the parameter that PEFT wrapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "no family keeps them the other way round yet"))]
pub(crate) enum Stored {
    /// `[E, out, in]`.
    OutIn,
    /// `[E, in, out]`, with the flag `is_transposed` on its class (GPT-OSS).
    InOutFlagged,
    /// `[E, in, out]` without the flag (Llama 4).
    InOut,
}

impl Stored {
    /// The orientation that the PEFT release `version` gives; `None` when the version does not tell.
    fn orientation(self, version: Version) -> Option<Orientation> {
        let since = |release| version.is_since(release);
        let canonical = match self {
            Self::OutIn => since(CANONICAL_SINCE)?,
            Self::InOut => !since(CANONICAL_SINCE)?,
            // 0.19.0 alone did not look at the flag the way the releases around it did.
            Self::InOutFlagged => since(CANONICAL_SINCE)? || !since([0, 19, 0])?,
        };
        Some(if canonical { Orientation::Canonical } else { Orientation::Transposed })
    }
}

/// The orientation of a pair with A `[_, x]` and B `[y, _]` for a parameter `[E, out, in]`.
///
/// Errors: `Ok(None)` when the shape fits neither way; `Err` when it fits both ways and the version does not decide.
pub(crate) fn orientation(
    [y, x]: [usize; 2],
    [out, inn]: [usize; 2],
    stored: Stored,
    version: Option<Version>,
) -> Result<Option<Orientation>, &'static str> {
    if out == inn && [y, x] == [out, inn] {
        let decided = version.and_then(|v| stored.orientation(v));
        return decided
            .map(Some)
            .ok_or("the parameter is square, and only a released `peft_version` tells which way round it is");
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
    use crate::checkpoint::SafetensorsFile;
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
        let wrong: Vec<_> = cases
            .iter()
            .filter(|(got, want, v, expected)| orientation(*got, *want, Stored::OutIn, *v) != *expected)
            .collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        assert!(orientation([4, 4], [4, 4], Stored::OutIn, None).is_err());
        assert!(orientation([4, 4], [4, 4], Stored::OutIn, version("0.19.1.dev0")).is_err());
    }

    #[test]
    fn parameters_stored_in_out_decode_to_what_peft_computed() {
        let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/peft");
        let (n_experts, rank) = (6, 3);
        for (case, version) in [("peft0181", "0.18.1"), ("peft0212", "0.21.2")] {
            let dir = data.join(format!("gpt_oss__params__{case}_tf524"));
            let adapter = SafetensorsFile::open(&dir.join("adapter/adapter_model.safetensors")).unwrap();
            let expected = SafetensorsFile::open(&dir.join("expected.safetensors")).unwrap();
            for (layer, wrapper, parameter) in
                [0, 1].into_iter().flat_map(|l| [(l, ".base_layer", "gate_up_proj"), (l, "", "down_proj")])
            {
                let module = format!("model.layers.{layer}.mlp.experts");
                let want = expected.tensor(&format!("delta_out_in.{module}.{parameter}")).unwrap();
                let [out, inn] = [want.shape[1], want.shape[2]];
                let load = |side: &str| {
                    let view =
                        adapter.tensor(&format!("base_model.model.{module}{wrapper}.lora_{side}.weight")).unwrap();
                    let (rows, cols) = (view.shape[0], view.shape[1]);
                    Matrix { dtype: view.dtype, rows, cols, bytes: view.all().to_vec() }
                };
                let (a, b) = (load("A"), load("B"));
                let version = Version::parse(version);
                let side = orientation([b.rows, a.cols], [out, inn], Stored::InOutFlagged, version).unwrap().unwrap();
                let want = want.to_f32();
                // The scale is the same everywhere: alpha / r = 9 / 3.
                let mut worst = 0f32;
                for expert in 0..n_experts {
                    let (a, b) = expert_factors(&a, &b, expert, rank, side, ExpertColumns::RankMajor);
                    let (a, b) = (values(&a), values(&b));
                    for (o, i) in (0..out).flat_map(|o| (0..inn).map(move |i| (o, i))) {
                        let got: f32 = (0..rank).map(|r| 3.0 * b[o * rank + r] * a[r * inn + i]).sum();
                        worst = worst.max((got - want[(expert * out + o) * inn + i]).abs());
                    }
                }
                assert!(worst < 1e-5, "{case} {module}.{parameter}: {worst}");
            }
        }
    }

    #[test]
    fn releases_turn_square_parameters_by_how_the_model_keeps_them() {
        use Orientation::{Canonical, Transposed};
        let cases = [
            (Stored::OutIn, [Transposed, Transposed, Canonical]),
            (Stored::InOutFlagged, [Canonical, Transposed, Canonical]),
            (Stored::InOut, [Canonical, Canonical, Transposed]),
        ];
        for (stored, expected) in cases {
            let got = ["0.18.1", "0.19.0", "0.19.1"].map(|v| stored.orientation(Version::parse(v).unwrap()).unwrap());
            assert_eq!(got, expected, "{stored:?}");
        }
    }
}
