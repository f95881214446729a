//! The arithmetic of ranks: for every world of up to 16 ranks, what each holds, and the shapes of its slices.

use wgmoe::placement::{ExpertShare, PlacementRule, Topology};

const D: usize = 64;

/// `[E_l, 2·F_l, D]` of gate and up on the device, and the range of columns that are not padding.
fn slice(share: &ExpertShare) -> ([usize; 3], std::ops::Range<usize>) {
    ([share.experts(), 2 * share.padded_width(), D], share.width())
}

#[test]
fn every_world_of_up_to_16_ranks_covers_every_expert_and_column_once() {
    let mut failures = Vec::new();
    for tp in 1..=16 {
        for ep in (1..=tp).filter(|ep| tp % ep == 0) {
            for (experts, width) in [(7, 40), (60, 9), (128, 768)] {
                for rule in [PlacementRule::Linear, PlacementRule::RoundRobin] {
                    let mut owners = vec![0; experts * width];
                    for rank in 0..tp {
                        let t = Topology::new(Some(tp), Some(ep), rank).unwrap();
                        let arithmetic = (t.moe_tp(), t.ep_rank(), t.moe_tp_rank());
                        if arithmetic != (tp / ep, rank / (tp / ep), rank % (tp / ep)) {
                            failures.push(format!("tp {tp}, ep {ep}, rank {rank}: {arithmetic:?}"));
                        }
                        let share = ExpertShare::new(&rule, t, experts, width).unwrap();
                        let ([n, rows, _], columns) = slice(&share);
                        // The first E mod ep groups hold one expert more, the first F mod moe_tp ranks one column more.
                        let even = |all: usize, parts: usize, i: usize| all / parts + usize::from(i < all % parts);
                        let f = even(width, t.moe_tp(), t.moe_tp_rank());
                        let e = if f == 0 { 0 } else { even(experts, ep, t.ep_rank()) };
                        if (n, columns.len(), rows) != (e, f, 2 * f.next_multiple_of(8)) {
                            failures.push(format!("tp {tp}, ep {ep}, rank {rank}, E {experts}, F {width}: {n} {rows}"));
                        }
                        for expert in share.placement().owned() {
                            columns.clone().for_each(|column| owners[expert * width + column] += 1);
                        }
                    }
                    if owners.iter().any(|n| *n != 1) {
                        failures.push(format!("tp {tp}, ep {ep}, E {experts}, F {width}, {rule:?}: not once each"));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn shapes_of_the_slices_of_qwen3_30b_a3b() {
    // (tp, ep, rank), slices of gate and up, columns.
    let table = [
        ((1, 1, 0), [128, 1536, D], 0..768),
        ((8, 8, 3), [16, 1536, D], 0..768),
        ((8, 2, 5), [64, 384, D], 192..384),
        ((8, 1, 7), [128, 192, D], 672..768),
        ((12, 4, 4), [32, 512, D], 256..512),
        ((5, 5, 0), [26, 1536, D], 0..768),
        ((5, 5, 3), [25, 1536, D], 0..768),
        ((7, 1, 0), [128, 224, D], 0..110),
        ((7, 1, 6), [128, 224, D], 659..768),
    ];
    for ((tp, ep, rank), shape, columns) in table {
        let t = Topology::new(Some(tp), Some(ep), rank).unwrap();
        let share = ExpertShare::new(&PlacementRule::Linear, t, 128, 768).unwrap();
        assert_eq!(slice(&share), (shape, columns), "tp {tp}, ep {ep}, rank {rank}");
    }
}
