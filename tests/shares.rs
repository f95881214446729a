//! The arithmetic of ranks: for every world of up to 16 ranks, what each holds, and the shapes of its slices.

use wgmoe::placement::{ExpertShare, HeadShare, Heads, PlacementRule, Topology};

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

/// Shapes of this rank's q, k, v and o, and the first row of q and of k.
type Slices = ([[usize; 2]; 4], [usize; 2]);

fn slices(heads: Heads, tp: usize, rank: usize) -> Slices {
    let share = HeadShare::new(heads, Topology::new(Some(tp), None, rank).unwrap());
    let (q, kv) = (share.q_range(), share.kv_range());
    ([[q.len(), D], [kv.len(), D], [kv.len(), D], [D, q.len()]], [q.start, kv.start])
}

#[test]
fn attention_of_every_world_of_up_to_16_ranks_has_the_shapes_of_its_heads() {
    let mut failures = Vec::new();
    // Heads, key and value heads, and the worlds that share them out; in all others every rank has everything.
    let table: [(usize, usize, &[usize]); 8] = [
        (32, 4, &[1, 2, 4, 8, 16]),
        (32, 8, &[1, 2, 4, 8, 16]),
        (64, 4, &[1, 2, 4, 8, 16]),
        (16, 16, &[1, 2, 4, 8, 16]),
        (16, 2, &[1, 2, 4, 8, 16]),
        (12, 6, &[1, 2, 3, 6, 12]),
        (40, 10, &[1, 2, 5, 10]),
        (7, 1, &[1, 7]),
    ];
    for (heads, kv_heads, worlds) in table {
        for tp in 1..=16 {
            let n = if worlds.contains(&tp) { tp } else { 1 };
            let (q, kv) = (heads / n * 128, kv_heads.div_ceil(n) * 128);
            for rank in 0..tp {
                let place = if n == 1 { 0 } else { rank };
                let first = [place * q, place * kv_heads / n * 128];
                let want = ([[q, D], [kv, D], [kv, D], [D, q]], first);
                let all = Heads { heads, kv_heads, head_dim: 128, normed_together: false };
                let got = slices(all, tp, rank);
                if got != want {
                    failures
                        .push(format!("{heads} heads, {kv_heads} kv, tp {tp}, rank {rank}: {got:?}, want {want:?}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn attention_is_whole_without_tp() {
    let all = Heads { heads: 32, kv_heads: 4, head_dim: 128, normed_together: false };
    for ep in 1..=16 {
        for rank in 0..ep {
            let share = HeadShare::new(all, Topology::new(None, Some(ep), rank).unwrap());
            assert!(share.is_whole() && share.heads() == (0..32) && share.kv_heads() == (0..4), "{ep} {rank}");
        }
    }
}
