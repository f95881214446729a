//! Which of several copies of an expert computes a pair, where one rank decides for its own tokens: the least loaded.

use super::{PlacementRule, Topology};
use crate::error::Result;

/// Where every expert is, on all groups.
#[derive(Debug, Clone)]
pub struct Copies {
    /// The groups that hold each expert, ascending.
    groups: Vec<Vec<usize>>,
    /// Pairs of each group in the choice at hand.
    loads: Vec<usize>,
}

impl Copies {
    /// Those of `experts` experts under `rule`.
    ///
    /// Errors: those of [`PlacementRule::place`].
    pub fn new(rule: &PlacementRule, experts: usize, world: Topology) -> Result<Self> {
        let mut groups = vec![Vec::new(); experts];
        for group in 0..world.ep() {
            for expert in rule.place(experts, world.at(group * world.moe_tp())?)?.owned() {
                groups[expert].push(group);
            }
        }
        Ok(Self { groups, loads: vec![0; world.ep()] })
    }

    /// The group that computes each pair of `topk_ids` (`[T, A]`, global) for tokens that are on `home`; -1 for ids that are no
    /// expert. Replaces `chosen`.
    ///
    /// Pairs of experts without a copy are counted first. The others go, in order, to the group of the copy with the fewest
    /// pairs; on ties to the first from `home` on, in turns, so that not every home prefers the same group and a token stays at
    /// home where it can.
    pub fn choose(&mut self, topk_ids: &[i32], home: usize, chosen: &mut Vec<i32>) {
        let Self { groups, loads } = self;
        let n = loads.len();
        let holders = |id: &i32| usize::try_from(*id).ok().and_then(|id| groups.get(id)).map_or(&[][..], Vec::as_slice);
        loads.fill(0);
        chosen.clear();
        chosen.extend(topk_ids.iter().map(|id| match holders(id) {
            [only] => {
                loads[*only] += 1;
                *only as i32
            }
            _ => -1,
        }));
        for (id, chosen) in topk_ids.iter().zip(chosen) {
            let holders = holders(id);
            if holders.len() > 1
                && let Some(best) = holders.iter().min_by_key(|group| (loads[**group], (**group + n - home) % n))
            {
                loads[*best] += 1;
                *chosen = *best as i32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies(owners: &[&[usize]], groups: usize) -> Copies {
        let rule = PlacementRule::Table(owners.iter().map(|o| o.to_vec()).collect());
        Copies::new(&rule, owners.len(), Topology::new(None, Some(groups), 0).unwrap()).unwrap()
    }

    fn choose(copies: &mut Copies, ids: &[i32], home: usize) -> Vec<i32> {
        let mut chosen = vec![7; 3];
        copies.choose(ids, home, &mut chosen);
        chosen
    }

    #[test]
    fn an_expert_without_a_copy_has_one_place_and_no_expert_has_none() {
        let world = Topology::new(None, Some(3), 0).unwrap();
        let mut linear = Copies::new(&PlacementRule::Linear, 7, world).unwrap();
        assert_eq!(choose(&mut linear, &[0, 6, 3, -1, 7, i32::MIN], 1), [0, 2, 1, -1, -1, -1]);
        assert!(choose(&mut linear, &[], 1).is_empty());
    }

    #[test]
    fn the_least_loaded_copy_is_taken_and_ties_go_round_from_home() {
        // Expert 0 is everywhere, expert 1 on groups 0 and 2, expert 2 on group 1 alone.
        let mut all = copies(&[&[2, 0, 1], &[0, 2], &[1]], 3);
        assert_eq!(choose(&mut all, &[0, 0, 0, 0], 0), [0, 1, 2, 0]);
        assert_eq!(choose(&mut all, &[0, 0, 0, 0], 1), [1, 2, 0, 1]);
        assert_eq!(choose(&mut all, &[1, 0, 1], 1), [2, 1, 0]);
        // What has one place counts before, wherever it stands.
        assert_eq!(choose(&mut all, &[0, 2, 0, 2], 1), [2, 1, 0, 1]);
        // Nothing is left of an earlier choice.
        assert_eq!(choose(&mut all, &[0], 2), [2]);
    }

    #[test]
    fn copies_even_out_what_one_expert_takes() {
        let mut all = copies(&[&[0, 1, 2, 3], &[0], &[1], &[2]], 4);
        let ids: Vec<i32> = (0..400).map(|i| if i % 2 == 0 { 0 } else { 1 + i % 3 }).collect();
        for home in 0..4 {
            let chosen = choose(&mut all, &ids, home);
            let loads: Vec<usize> = (0..4).map(|g| chosen.iter().filter(|c| **c == g).count()).collect();
            assert_eq!(loads, [100; 4], "{home}");
        }
    }
}
