//! A table of owners from recorded counts: which experts get copies, and which rank holds which expert.
//!
//! One table serves all layers, and the slowest rank of each layer sets its pace. So the cost of a table is the sum over
//! layers of the load of the rank with the most, a load being pairs of a token and an expert.

use super::{Placement, RoutingCounts};
use crate::error::{Error, ErrorKind, Result};

/// Rounds of exchanges after the experts have been shared out; the first few find nearly all there is.
const ROUNDS: usize = 8;

/// Loads of the ranks that `owners` (by expert) give, as if all that `counts` holds were one step: `[layers][ranks]`, empty for a
/// layer without experts. Copies of an expert share its pairs as they do when a model runs.
///
/// Errors: `Config` when a layer has counts of another number of experts; those of [`Placement::table`].
pub fn loads(counts: &RoutingCounts, owners: &[Vec<usize>], ranks: usize) -> Result<Vec<Vec<u64>>> {
    check(counts)?;
    let placement = Placement::table(owners, ranks, 0)?;
    let of_layer = |layer: &Vec<u64>| {
        if layer.is_empty() {
            return Vec::new();
        }
        let mut loads = vec![0; ranks];
        let share = |e: usize, i: usize| {
            let copies = placement.holders(e).len() as u64;
            layer[e] / copies + u64::from((i as u64) < layer[e] % copies)
        };
        for e in 0..layer.len() {
            placement.holders(e).iter().enumerate().for_each(|(i, holder)| loads[*holder] += share(e, i));
        }
        for e in placement.copied() {
            placement.holders(e).iter().enumerate().for_each(|(i, holder)| loads[*holder] -= share(e, i));
            fill(layer[e], placement.holders(e), &mut loads);
        }
        loads
    };
    Ok(counts.layers.iter().map(of_layer).collect())
}

/// Load of the slowest rank over the mean of all, over these layers together: the sum of the ones by the sum of the
/// others. 1 is even, and where there is no load.
pub fn imbalance(loads: &[Vec<u64>]) -> f64 {
    let mean: f64 = loads.iter().filter(|l| !l.is_empty()).map(|l| l.iter().sum::<u64>() as f64 / l.len() as f64).sum();
    if mean == 0.0 { 1.0 } else { slowest(loads) as f64 / mean }
}

/// Proposes owners of every expert for `ranks` ranks, with up to `copies` copies beyond the first of each. No rank holds more than
/// (E + `copies`) / `ranks` experts, rounded up, nor two copies of one. The same counts give the same table, and it is never worse
/// than [`Placement::linear`] or [`Placement::round_robin`] for them.
///
/// The expert with the most pairs a copy gets the next copy. Then experts go to ranks, those with the most pairs a copy first,
/// each where it adds least to the cost; then pairs of experts change places while that lowers it.
///
/// Errors: `Config` when there are no experts or ranks, more copies than E · (`ranks` - 1), or a layer with counts of another
/// number of experts; those of [`Placement::table`].
pub fn propose(counts: &RoutingCounts, ranks: usize, copies: usize) -> Result<Vec<Vec<usize>>> {
    check(counts)?;
    let experts = counts.experts;
    let even = |make: fn(usize, usize, usize) -> Result<Placement>| -> Result<Vec<Vec<usize>>> {
        let placement = make(experts, ranks, 0)?;
        Ok((0..experts).map(|e| placement.holders(e).to_vec()).collect())
    };
    let plain = [even(Placement::linear)?, even(Placement::round_robin)?];
    let most = experts * (ranks - 1);
    if copies > most {
        let message = format!("placement: {experts} experts on {ranks} ranks have at most {most} copies, got {copies}");
        return Err(Error::new(ErrorKind::Config, message));
    }
    let mut shared = Shared::new(counts, ranks, copies);
    shared.place();
    shared.exchange();
    let mut best = shared.owners();
    let mut cost = slowest(&loads(counts, &best, ranks)?);
    for owners in plain {
        let other = slowest(&loads(counts, &owners, ranks)?);
        if other < cost {
            (best, cost) = (owners, other);
        }
    }
    Ok(best)
}

fn check(counts: &RoutingCounts) -> Result<()> {
    match counts.layers.iter().position(|layer| !layer.is_empty() && layer.len() != counts.experts) {
        None => Ok(()),
        Some(at) => {
            let (experts, got) = (counts.experts, counts.layers[at].len());
            let message = format!("placement: layer {at}: expected counts of {experts} experts, got {got}");
            Err(Error::new(ErrorKind::Config, message))
        }
    }
}

/// The sum over layers of the largest load.
fn slowest(loads: &[Vec<u64>]) -> u64 {
    loads.iter().filter_map(|layer| layer.iter().max()).sum()
}

/// Adds `pairs` to the least loaded of `holders`, as if one by one, the first where they are level.
fn fill(pairs: u64, holders: &[usize], loads: &mut [u64]) {
    let mut below = holders.to_vec();
    // Who is above the level takes none, so the level of the others is lower.
    let (level, mut rest) = loop {
        let n = below.len() as u64;
        if n == 0 {
            return;
        }
        let sum = pairs + below.iter().map(|h| loads[*h]).sum::<u64>();
        let level = sum / n;
        below.retain(|h| loads[*h] <= level);
        if below.len() as u64 == n {
            break (level, sum % n);
        }
    };
    for holder in below {
        loads[holder] = level + u64::from(rest > 0);
        rest = rest.saturating_sub(1);
    }
}

/// Experts on their way to ranks.
struct Shared {
    /// Pairs of one copy, by expert and layer.
    weights: Vec<Vec<f64>>,
    /// Copies of each expert, the first counted.
    copies: Vec<usize>,
    /// Most experts of a rank.
    room: usize,
    /// By rank: its experts, and their load by layer.
    held: Vec<Vec<usize>>,
    loads: Vec<Vec<f64>>,
}

impl Shared {
    fn new(counts: &RoutingCounts, ranks: usize, extra: usize) -> Self {
        let experts = counts.experts;
        let layers: Vec<&Vec<u64>> = counts.layers.iter().filter(|layer| !layer.is_empty()).collect();
        let total: Vec<u128> = (0..experts).map(|e| layers.iter().map(|l| u128::from(l[e])).sum()).collect();
        let mut copies = vec![1; experts];
        for _ in 0..extra {
            // `max_by` keeps the last of equals, and the lowest id is to be kept.
            let next = (0..experts).rev().filter(|e| copies[*e] < ranks && total[*e] > 0);
            let next = next.max_by(|a, b| (total[*a] * copies[*b] as u128).cmp(&(total[*b] * copies[*a] as u128)));
            let Some(next) = next else { break };
            copies[next] += 1;
        }
        let weight = |e: usize| layers.iter().map(|l| l[e] as f64 / copies[e] as f64).collect();
        Self {
            weights: (0..experts).map(weight).collect(),
            room: (experts + extra).div_ceil(ranks),
            held: vec![Vec::new(); ranks],
            loads: vec![vec![0.0; layers.len()]; ranks],
            copies,
        }
    }

    /// Gives every copy a rank, the heaviest first.
    fn place(&mut self) {
        let sums: Vec<f64> = self.weights.iter().map(|w| w.iter().sum()).collect();
        let mut order: Vec<usize> = (0..self.weights.len()).collect();
        order.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]));
        for expert in order {
            for _ in 0..self.copies[expert] {
                let rank = self.cheapest(expert).unwrap_or_else(|| self.make_room(expert));
                self.give(rank, expert);
            }
        }
    }

    /// Where a copy of `expert` adds least to the cost, then to the load; `None` when every rank is full or has one.
    fn cheapest(&self, expert: usize) -> Option<usize> {
        let weights = &self.weights[expert];
        let most: Vec<f64> =
            (0..weights.len()).map(|l| self.loads.iter().map(|loads| loads[l]).fold(0.0, f64::max)).collect();
        let cost = |rank: usize| {
            let loads = &self.loads[rank];
            let slowest: f64 = (0..weights.len()).map(|l| most[l].max(loads[l] + weights[l])).sum();
            (slowest, loads.iter().sum::<f64>())
        };
        let free = (0..self.held.len()).filter(|r| self.held[*r].len() < self.room && !self.held[*r].contains(&expert));
        let by_cost = |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1));
        free.map(|rank| (rank, cost(rank))).min_by(|a, b| by_cost(&a.1, &b.1)).map(|(rank, _)| rank)
    }

    /// Frees a place for `expert` where only ranks that hold it have room: one of those takes an expert from a full rank. The
    /// full rank has more experts than the other, so there is one that it lacks.
    fn make_room(&mut self, expert: usize) -> usize {
        let (open, full) = (0..self.held.len()).fold((0, 0), |(open, full), rank| {
            let has = self.held[rank].contains(&expert);
            (if has && self.held[rank].len() < self.room { rank } else { open }, if has { full } else { rank })
        });
        let sum = |e: &usize| self.weights[*e].iter().sum::<f64>();
        let movable = self.held[full].iter().copied().filter(|e| !self.held[open].contains(e));
        if let Some(moved) = movable.min_by(|a, b| sum(a).total_cmp(&sum(b))) {
            self.take(full, moved);
            self.give(open, moved);
        }
        full
    }

    fn give(&mut self, rank: usize, expert: usize) {
        self.held[rank].push(expert);
        self.loads[rank].iter_mut().zip(&self.weights[expert]).for_each(|(load, w)| *load += w);
    }

    fn take(&mut self, rank: usize, expert: usize) {
        self.held[rank].retain(|e| *e != expert);
        self.loads[rank].iter_mut().zip(&self.weights[expert]).for_each(|(load, w)| *load -= w);
    }

    /// Lets experts of two ranks change places, or one move to a free place, while that lowers the cost.
    fn exchange(&mut self) {
        for _ in 0..ROUNDS {
            let mut better = false;
            for (a, b) in (0..self.held.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                better |= self.exchange_between(a, b);
            }
            if !better {
                return;
            }
        }
    }

    fn exchange_between(&mut self, a: usize, b: usize) -> bool {
        let layers = self.loads[a].len();
        // What the other ranks let no exchange go below.
        let others: Vec<f64> = (0..layers)
            .map(|l| (0..self.held.len()).filter(|r| ![a, b].contains(r)).map(|r| self.loads[r][l]).fold(0.0, f64::max))
            .collect();
        let mut better = false;
        for give in self.held[a].clone() {
            let now: f64 = (0..layers).map(|l| others[l].max(self.loads[a][l]).max(self.loads[b][l])).sum();
            if self.held[b].contains(&give) {
                continue;
            }
            let mut found: Option<(f64, Option<usize>)> = None;
            let free = (self.held[b].len() < self.room).then_some(None);
            let swaps = self.held[b].iter().filter(|e| !self.held[a].contains(e)).map(|e| Some(*e));
            for back in swaps.chain(free) {
                let weight = |l: usize| self.weights[give][l] - back.map_or(0.0, |e: usize| self.weights[e][l]);
                let load = |l: usize| others[l].max(self.loads[a][l] - weight(l)).max(self.loads[b][l] + weight(l));
                let then: f64 = (0..layers).map(load).sum();
                // By more than sums in another order differ.
                if then < now * (1.0 - 1e-9) && found.is_none_or(|(least, _)| then < least) {
                    found = Some((then, back));
                }
            }
            if let Some((_, back)) = found {
                self.take(a, give);
                if let Some(back) = back {
                    self.take(b, back);
                    self.give(a, back);
                }
                self.give(b, give);
                better = true;
            }
        }
        better
    }

    /// The ranks of each expert, ascending.
    fn owners(&self) -> Vec<Vec<usize>> {
        let ranks = |e: usize| (0..self.held.len()).filter(|rank| self.held[*rank].contains(&e)).collect();
        (0..self.weights.len()).map(ranks).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counts(layers: &[&[u64]]) -> RoutingCounts {
        RoutingCounts {
            model_type: "qwen3_moe".to_owned(),
            experts: layers[0].len(),
            top_k: 1,
            tokens: 0,
            layers: layers.iter().map(|layer| layer.to_vec()).collect(),
        }
    }

    #[test]
    fn small_cases_are_shared_out_as_by_hand() {
        let of = |layers: &[&[u64]], ranks, copies| propose(&counts(layers), ranks, copies).unwrap();
        assert_eq!(of(&[&[8, 8, 1, 1]], 2, 0), [[0], [1], [0], [1]]);
        assert_eq!(of(&[&[5, 3, 2, 4]], 1, 0), [[0], [0], [0], [0]]);
        // Each layer has its own two experts: they must not meet.
        assert_eq!(of(&[&[4, 4, 0, 0], &[], &[0, 0, 4, 4]], 2, 0), [[0], [1], [0], [1]]);
        // The first copy for expert 0; then it is everywhere, and expert 1 is the next.
        assert_eq!(of(&[&[10, 2, 2, 2]], 2, 2), [vec![0, 1], vec![0, 1], vec![0], vec![1]]);
        // No copy for what nobody asked for.
        assert_eq!(of(&[&[1, 0]], 2, 2), [vec![0, 1], vec![0]]);
        for (experts, ranks, copies) in [(2, 2, 3), (0, 2, 0), (2, 0, 0), (3, 2, 0)] {
            let wrong = RoutingCounts { experts, ..counts(&[&[1, 2]]) };
            assert_eq!(propose(&wrong, ranks, copies).unwrap_err().kind(), ErrorKind::Config, "{experts} {ranks}");
        }
    }

    #[test]
    fn the_balance_is_the_slowest_rank_over_the_mean() {
        let counts = counts(&[&[6, 2, 0, 0], &[], &[1, 1, 1, 1]]);
        let linear = loads(&counts, &[vec![0], vec![0], vec![1], vec![1]], 2).unwrap();
        assert_eq!(linear, [vec![8, 0], vec![], vec![2, 2]]);
        assert_eq!((imbalance(&linear[..1]), imbalance(&linear[1..]), imbalance(&linear)), (2.0, 1.0, 10.0 / 6.0));
        let copied = loads(&counts, &[vec![0, 1], vec![0], vec![1], vec![1]], 2).unwrap();
        assert_eq!(copied, [vec![4, 4], vec![], vec![2, 2]]);
        assert_eq!(imbalance(&[]), 1.0);
    }

    #[test]
    fn pairs_fill_the_least_loaded_as_one_by_one() {
        proptest!(|(start in prop::collection::vec(0..40u64, 1..6), pairs in 0..90u64)| {
            let holders: Vec<usize> = (0..start.len()).collect();
            let (mut filled, mut one_by_one) = (start.clone(), start.clone());
            fill(pairs, &holders, &mut filled);
            for _ in 0..pairs {
                let least = holders.iter().copied().min_by_key(|h| one_by_one[*h]).unwrap();
                one_by_one[least] += 1;
            }
            prop_assert_eq!(filled, one_by_one);
        });
    }

    #[test]
    fn any_counts_give_a_table_within_bounds_that_is_never_worse() {
        let layers =
            |experts| prop::collection::vec(prop::collection::vec(prop_oneof![0..9u64, 0..5000u64], experts), 1..5);
        let strategy = (1..20usize, 1..7usize)
            .prop_flat_map(move |(experts, ranks)| (layers(experts), Just(ranks), 0..=experts * (ranks - 1)));
        proptest!(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() },
        |((layers, ranks, copies) in strategy)| {
            let experts = layers[0].len();
            let layers: Vec<&[u64]> = layers.iter().map(Vec::as_slice).collect();
            let counts = counts(&layers);
            let owners = propose(&counts, ranks, copies).unwrap();
            prop_assert_eq!(&owners, &propose(&counts, ranks, copies).unwrap());
            // `table` refuses an expert without an owner and two copies on one rank.
            let of_rank = |rank| Placement::table(&owners, ranks, rank).unwrap();
            prop_assert_eq!(owners.len(), experts);
            prop_assert!((0..ranks).all(|rank| of_rank(rank).n_owned() <= (experts + copies).div_ceil(ranks)));
            prop_assert!(owners.iter().map(|list| list.len() - 1).sum::<usize>() <= copies);
            let cost = |owners: &[Vec<usize>]| slowest(&loads(&counts, owners, ranks).unwrap());
            let linear = Placement::linear(experts, ranks, 0).unwrap();
            let linear: Vec<_> = (0..experts).map(|e| linear.holders(e).to_vec()).collect();
            prop_assert!(cost(&owners) <= cost(&linear));
        });
    }

    #[test]
    fn a_skewed_layer_becomes_nearly_even() {
        // Weights 1/(e + 1), as real routers' tails are.
        let zipf: Vec<u64> = (1..=128).map(|e| 100_000 / e).collect();
        let counts = counts(&[&zipf]);
        let before = loads(&counts, &propose(&counts, 8, 0).unwrap(), 8).unwrap();
        let after = loads(&counts, &propose(&counts, 8, 8).unwrap(), 8).unwrap();
        assert!(imbalance(&before) > 1.4 && imbalance(&after) < 1.01, "{} {}", imbalance(&before), imbalance(&after));
    }
}
