//! What a rank holds of a projection that ranks share out: rows of B where they share its outputs, columns of A where they
//! share its inputs.

use std::ops::Range;

use super::Site;
use crate::placement::{ExpertShare, HeadShare};

/// A rank's part of one projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Inputs are shared out, and the products of the ranks are added up; otherwise outputs are.
    pub(crate) inputs: bool,
    /// This rank's inputs or outputs.
    pub(crate) range: Range<usize>,
    /// Those of all ranks.
    pub(crate) full: usize,
    /// Rows or columns on the device; those past `range` are zero.
    pub(crate) padded: usize,
}

impl Cut {
    /// The part of `site`; `None` for projections that every rank has whole, and those of experts where there are none.
    pub(crate) fn of(site: Site, heads: &HeadShare, experts: Option<&ExpertShare>) -> Option<Self> {
        let all = heads.all();
        let by_heads = |inputs, range: Range<usize>, n: usize| {
            let padded = range.len();
            Some(Self { inputs, range, full: n * all.head_dim, padded })
        };
        let by_width = |inputs| {
            let share = experts?;
            Some(Self { inputs, range: share.width(), full: share.full_width(), padded: share.padded_width() })
        };
        match site {
            Site::Q => by_heads(false, heads.q_range(), all.heads),
            Site::K | Site::V => by_heads(false, heads.kv_range(), all.kv_heads),
            Site::O => by_heads(true, heads.q_range(), all.heads),
            Site::ExpertGate | Site::ExpertUp => by_width(false),
            Site::ExpertDown => by_width(true),
            _ => None,
        }
    }

    /// Whether this rank adds what B adds (`lora_bias`): it follows its outputs, and where ranks add up their products, the
    /// one with the first inputs adds it.
    pub(crate) fn adds_bias(&self) -> bool {
        !self.inputs || self.range.start == 0
    }
}
