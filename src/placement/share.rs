//! What one rank holds of a layer: which experts, which columns of their width, and which heads.

use std::ops::Range;

use super::{HeadShare, Heads, Placement, PlacementRule, Topology};
use crate::checkpoint::ModelConfig;
use crate::error::Result;

/// Columns come in groups of this many on the device: kernels read rows in steps of eight elements, and eight elements
/// of the narrowest float type are the 16 bytes that a load takes.
const GROUP: usize = 8;

/// One rank's part of the experts of a layer. Base weights, adapters and routing all ask this type, so they cannot
/// disagree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertShare {
    placement: Placement,
    width: Range<usize>,
    full_width: usize,
}

impl ExpertShare {
    /// The share that `rule` gives the rank at `topology` of `experts` experts (E) of width `width` (F). A rank without
    /// columns, where there are more ranks than columns, holds no expert.
    ///
    /// Errors: those of [`PlacementRule::place`].
    pub fn new(rule: &PlacementRule, topology: Topology, experts: usize, width: usize) -> Result<Self> {
        let columns = topology.width_range(width);
        let mut placement = rule.place(experts, topology)?;
        if columns.is_empty() {
            placement = placement.emptied();
        }
        Ok(Self { placement, width: columns, full_width: width })
    }

    /// The experts of `placement` in their whole width.
    pub fn of(placement: Placement, width: usize) -> Self {
        Self { placement, width: 0..width, full_width: width }
    }

    /// All of `experts` experts of width `width`.
    ///
    /// Errors: `Config` when there is no expert.
    pub fn whole(experts: usize, width: usize) -> Result<Self> {
        Self::new(&PlacementRule::Linear, Topology::default(), experts, width)
    }

    /// Which experts, and their local numbers.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// E_l: number of experts that this rank holds a part of.
    pub fn experts(&self) -> usize {
        self.placement.n_owned()
    }

    /// The columns, out of 0..F.
    pub fn width(&self) -> Range<usize> {
        self.width.clone()
    }

    /// F of the whole expert.
    pub fn full_width(&self) -> usize {
        self.full_width
    }

    /// F_l: columns on the device. Those past [`width`](Self::width) are zero in every matrix, so they add nothing.
    pub fn padded_width(&self) -> usize {
        self.width.len().next_multiple_of(GROUP)
    }

    /// True when the rank holds every expert in its whole width.
    pub fn is_whole(&self) -> bool {
        self.placement.is_identity() && self.width.len() == self.full_width
    }
}

/// One rank's part of a model's layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankShare {
    /// Of attention.
    pub heads: HeadShare,
    /// Of the experts, in layers that have them.
    pub experts: ExpertShare,
}

impl RankShare {
    /// The share that `rule` and `topology` give a rank of the model `config`.
    ///
    /// Errors: those of [`ExpertShare::new`].
    pub fn new(config: &ModelConfig, rule: &PlacementRule, topology: Topology) -> Result<Self> {
        let experts = ExpertShare::new(rule, topology, config.moe.experts, config.moe.expert_width)?;
        Ok(Self { heads: HeadShare::new(Heads::of(config), topology), experts })
    }

    /// `experts` beside all heads of the model `config`.
    pub fn of_experts(config: &ModelConfig, experts: ExpertShare) -> Self {
        Self { heads: HeadShare::whole(Heads::of(config)), experts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_padded_and_a_rank_without_columns_holds_nothing() {
        let share = |tp, rank, width| {
            let topology = Topology::new(Some(tp), Some(1), rank).unwrap();
            ExpertShare::new(&PlacementRule::Linear, topology, 3, width).unwrap()
        };
        let last = share(3, 2, 40);
        assert_eq!((last.width(), last.padded_width(), last.experts(), last.is_whole()), (27..40, 16, 3, false));
        let none = share(3, 2, 2);
        assert_eq!((none.width().len(), none.padded_width(), none.experts()), (0, 0, 0));
        assert!((0..3).all(|expert| none.placement().local(expert).is_none()));
        assert!(ExpertShare::whole(3, 40).unwrap().is_whole());
    }
}
