//! From the flat pair of a fused parameter to one `[R, in]` and one `[out, R]` matrix an expert.
//!
//! PEFT saves a pair for all E experts as two linear weights: A `[R·E, X]`, one block of R rows an expert, and
//! B `[Y, R·E]`, whose column j·E + e is column j of expert e. The product of an expert's blocks is `[Y, X]`. Releases
//! differ in whether that is the change of the weight or its transpose: `LoraParameter`/`ParamWrapper` in
//! `peft/tuners/lora/layer.py`.

use super::config::{ExpertColumns, Version};
use crate::checkpoint::Window;
use crate::family::table::Stored;

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

/// The flat pair of a parameter: A `[R·E, X]` and B `[Y, R·E]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flat {
    pub(crate) n_experts: usize,
    pub(crate) rank: usize,
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) orientation: Orientation,
    pub(crate) columns: ExpertColumns,
}

impl Flat {
    /// Where A `[R, in]` and B `[out, R]` of an expert are: in A and B of the file, or, transposed, in its B and its A.
    pub(crate) fn windows(&self, expert: usize) -> (Window, Window) {
        let Self { n_experts, rank, x, y, .. } = *self;
        let a = Window::dense([rank, x], expert * rank * x);
        let (begin, col_step) = match self.columns {
            ExpertColumns::RankMajor => (expert, n_experts),
            ExpertColumns::GroupedByExpert => (expert * rank, 1),
        };
        let b = Window { rows: y, cols: rank, begin, row_step: rank * n_experts, col_step };
        match self.orientation {
            Orientation::Canonical => (a, b),
            // (B·A)ᵀ = Aᵀ·Bᵀ
            Orientation::Transposed => (b.transposed(), a.transposed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_one_expert() {
        // E 3, R 2, X 2, Y 1.
        let flat = |orientation, columns| Flat { n_experts: 3, rank: 2, x: 2, y: 1, orientation, columns };
        let elements = |w: Window| -> Vec<usize> {
            let at = |(r, c): (usize, usize)| w.begin + r * w.row_step + c * w.col_step;
            (0..w.rows).flat_map(|r| (0..w.cols).map(move |c| (r, c))).map(at).collect()
        };
        let (a, b) = flat(Orientation::Canonical, ExpertColumns::RankMajor).windows(1);
        assert_eq!((elements(a), elements(b)), (vec![4, 5, 6, 7], vec![1, 4]));
        let (_, b) = flat(Orientation::Canonical, ExpertColumns::GroupedByExpert).windows(1);
        assert_eq!(elements(b), [2, 3]);
        let (a, b) = flat(Orientation::Transposed, ExpertColumns::RankMajor).windows(1);
        assert_eq!(([a.rows, a.cols], [b.rows, b.cols]), ([2, 1], [2, 2]));
        assert_eq!((elements(a), elements(b)), (vec![1, 4], vec![4, 6, 5, 7]));
        assert_eq!(elements(b.rows(1, 1, 1)), [5, 7]);
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
