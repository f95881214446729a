//! The integer stages of the oracle against their contracts.
#![expect(clippy::needless_range_loop, reason = "pairs index several slices at once")]

mod common;

use common::{AdapterMix, Rng, Routing, UNWRITTEN_F32, each_case, rel_err};
use proptest::prelude::*;
use wgmoe::placement::Placement;
use wgmoe::reference::{Aligned, align, expert_gemm, localise, remap};
use wgmoe::router::{NoAdapter, STATUS_ID, STATUS_SLOT};
use wgmoe::shape::align_capacity;

/// Every clause of the align contract, checked without the code of align.
fn check_aligned(ids: &[i32], buckets: usize, tile: usize, aligned: &Aligned) -> Result<(), String> {
    let pairs = ids.len();
    let bucket = |p: usize| match usize::try_from(ids[p]) {
        Ok(n) if n < buckets => n,
        _ => buckets,
    };
    let sorted = &aligned.sorted_token_ids;
    let count = aligned.num_tokens_post_padded as usize;
    let capacity = align_capacity(pairs, buckets, tile);
    if sorted.len() != capacity || aligned.expert_ids.len() * tile != capacity {
        return Err(format!("expected capacity {capacity}, got {}", sorted.len()));
    }
    if count > capacity || !count.is_multiple_of(tile) {
        return Err(format!("count {count} in capacity {capacity}"));
    }

    let mut counts = vec![0usize; buckets + 1];
    for p in 0..pairs {
        counts[bucket(p)] += 1;
    }
    let expected: usize = counts.iter().map(|c| c.next_multiple_of(tile)).sum();
    if count != expected {
        return Err(format!("expected count {expected}, got {count}"));
    }

    let mut seen = vec![false; pairs];
    let mut previous = None;
    let mut real_tiles = 0;
    for (i, label) in aligned.expert_ids.iter().enumerate() {
        let slots = &sorted[i * tile..(i + 1) * tile];
        if i * tile >= count {
            if *label != -1 || slots.iter().any(|s| *s as usize != pairs) {
                return Err(format!("tile {i} past the count is used"));
            }
            continue;
        }
        let tile_bucket = match usize::try_from(*label) {
            Ok(n) if n < buckets => n,
            Ok(n) => return Err(format!("label {n}")),
            Err(_) if *label == -1 => buckets,
            Err(_) => return Err(format!("label {label}")),
        };
        real_tiles += u64::from(tile_bucket < buckets);
        if slots[0] as usize == pairs {
            return Err(format!("tile {i} holds padding only"));
        }
        let mut padded = false;
        for slot in slots {
            let p = usize::try_from(*slot).map_err(|_| format!("slot {slot}"))?;
            if p == pairs {
                padded = true;
                continue;
            }
            if padded || p > pairs || seen[p] {
                return Err(format!("pair {p} after padding, out of range or twice"));
            }
            if bucket(p) != tile_bucket {
                return Err(format!("pair {p} lies under label {label}"));
            }
            if previous.is_some_and(|last| last >= (tile_bucket, p)) {
                return Err(format!("pair {p} is out of order"));
            }
            previous = Some((tile_bucket, p));
            seen[p] = true;
        }
    }
    if seen.contains(&false) {
        return Err("a pair is missing".into());
    }
    for [_, y, z] in &aligned.dispatch {
        let folded = u64::from(*y) * u64::from(*z);
        let most = real_tiles.next_multiple_of(65_535).max(real_tiles);
        if *y > 65_535 || *z == 0 || folded < real_tiles || folded > most {
            return Err(format!("{y}·{z} workgroups for {real_tiles} tiles"));
        }
    }
    Ok(())
}

fn aligned(ids: &[i32], buckets: usize, tile: usize) -> Aligned {
    let aligned = align(ids, buckets, tile, &[1, 7]);
    check_aligned(ids, buckets, tile, &aligned).unwrap();
    assert_eq!((aligned.dispatch[0][0], aligned.dispatch[1][0]), (1, 7));
    aligned
}

/// Labels of the tiles before the sentinel bucket.
fn labels(aligned: &Aligned) -> Vec<i32> {
    aligned.expert_ids.iter().copied().filter(|e| *e != -1).collect()
}

// remap

#[test]
fn every_negative_id_keeps_its_bits() {
    let ids = [0, -1, 3, 15, -1, -1, -2, 7, 1, 2, i32::MIN, 4, 5, -1, 9, 8];
    let slots = [0, 1, 2, -1, 3, -1, 0, 1];
    for mode in [NoAdapter::Skip, NoAdapter::Unshifted] {
        let remapped = remap(&ids, &slots, 2, 16, 4, mode);
        for p in 0..ids.len() {
            if ids[p] < 0 {
                assert_eq!(remapped.virtual_topk_ids[p], ids[p]);
            }
        }
        assert_eq!(remapped.lora_mask, [1, 1, 1, 0, 1, 0, 1, 1]);
        assert_eq!(remapped.status, 0);
    }
}

#[test]
fn valid_ids_move_to_the_range_of_their_slot() {
    let remapped = remap(&[0, 5, 15, 2, 1, 15], &[0, 1, 2], 2, 16, 4, NoAdapter::Skip);
    assert_eq!(remapped.virtual_topk_ids, [0, 5, 31, 18, 33, 47]);
}

#[test]
fn a_token_without_adapter_is_skipped_or_unshifted_and_never_masked_in() {
    let skipped = remap(&[3, 5], &[-1], 2, 16, 4, NoAdapter::Skip);
    assert_eq!((skipped.virtual_topk_ids, skipped.lora_mask), (vec![-1, -1], vec![0]));
    let kept = remap(&[3, 5], &[-1], 2, 16, 4, NoAdapter::Unshifted);
    assert_eq!((kept.virtual_topk_ids, kept.lora_mask), (vec![3, 5], vec![0]));
}

#[test]
fn a_slot_out_of_range_is_no_adapter_and_sets_the_status() {
    let remapped = remap(&[3, 5, 1, -4], &[3, 4], 2, 16, 4, NoAdapter::Unshifted);
    assert_eq!(remapped.virtual_topk_ids, [51, 53, 1, -4]);
    assert_eq!((remapped.lora_mask, remapped.status), (vec![1, 0], STATUS_SLOT));
    assert_eq!(remap(&[3], &[i32::MAX], 1, 16, 4, NoAdapter::Skip).virtual_topk_ids, [-1]);
}

#[test]
fn an_id_out_of_range_never_lands_in_the_next_slot() {
    for slot in [-1, 0, 2] {
        for mode in [NoAdapter::Skip, NoAdapter::Unshifted] {
            let remapped = remap(&[16, i32::MAX], &[slot], 2, 16, 4, mode);
            assert_eq!(remapped.virtual_topk_ids, [-1, -1]);
            assert_eq!(remapped.status, STATUS_ID);
        }
    }
}

// localise

#[test]
fn global_ids_become_local_and_padded_rows_are_masked_last() {
    let second = Placement::linear(4, 2, 1).unwrap();
    let ids = [2, 0, 3, -9, 4, 1, 2, -9];
    assert_eq!(localise(&ids, &second, 3, 2), [0, -1, 1, -9, -1, -1, -1, -1]);
    assert_eq!(localise(&ids, &second, 9, 2)[6..], [0, -9]);
    assert_eq!(localise(&ids, &second, 0, 2), [-1; 8]);
    assert_eq!(localise(&[], &second, 0, 2), [0i32; 0]);
}

#[test]
fn pairs_of_a_copied_expert_go_where_the_load_is_least() {
    // Rank 0 holds expert 0 and all three hold expert 1, as their local expert 1, 0 and 0.
    let on =
        |rank, ids: &[i32]| localise(ids, &Placement::table(&[vec![0], vec![2, 0, 1]], 3, rank).unwrap(), ids.len(), 1);
    // Two pairs of expert 0 are on rank 0: of five of expert 1 it takes the first, and the others two each.
    let ids = [1, 0, 1, 1, 0, -1, 1, 1];
    assert_eq!(on(0, &ids), [1, 0, -1, -1, 0, -1, -1, -1]);
    assert_eq!(on(1, &ids), [-1, -1, 0, 0, -1, -1, -1, -1]);
    assert_eq!(on(2, &ids), [-1, -1, -1, -1, -1, -1, 0, 0]);
    // One pair alone goes to the lowest rank without work.
    assert_eq!([0, 1, 2].map(|rank| on(rank, &[0, 1])), [[0, -1], [-1, 0], [-1, -1]]);
    assert_eq!([0, 1, 2].map(|rank| on(rank, &[1])), [[1], [-1], [-1]]);
}

#[test]
fn padded_rows_take_no_part_in_the_choice_among_copies() {
    let on = |rank, valid| {
        let both = Placement::table(&[vec![0, 1]], 2, rank).unwrap();
        localise(&[0, 0, 0, 0], &both, valid, 2)
    };
    assert_eq!((on(0, 1), on(1, 1)), (vec![0, -1, -1, -1], vec![-1, 0, -1, -1]));
    assert_eq!((on(0, 2), on(1, 2)), (vec![0, 0, -1, -1], vec![-1, -1, 0, 0]));
}

// align

#[test]
fn each_expert_once_gives_one_tile_each() {
    let got = aligned(&[7, 0, 1, 6, 2, 5, 3, 4], 8, 16);
    assert_eq!(labels(&got), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(got.num_tokens_post_padded, 8 * 16);
    assert_eq!(got.sorted_token_ids[0], 1);
    assert_eq!(got.sorted_token_ids[1..16], [8; 15]);
    assert_eq!(got.dispatch, [[1, 8, 1], [7, 8, 1]]);
}

#[test]
fn negative_ids_fill_the_sentinel_bucket_after_the_real_ones() {
    let got = aligned(&[0, -1, 1, -1, -5, 7, 0, -1], 8, 16);
    assert_eq!(labels(&got), [0, 1, 7]);
    assert_eq!(got.num_tokens_post_padded, 4 * 16);
    assert_eq!(got.sorted_token_ids[48..53], [1, 3, 4, 7, 8]);
    assert_eq!(got.dispatch[0], [1, 3, 1]);
}

#[test]
fn ids_beyond_the_buckets_fill_the_sentinel_bucket() {
    let got = aligned(&[0, 100, 1, 50, 200, 7, 8, i32::MAX], 8, 16);
    assert_eq!(labels(&got), [0, 1, 7]);
    assert_eq!(got.sorted_token_ids[48..54], [1, 3, 4, 6, 7, 8]);
}

#[test]
fn invalid_ids_of_both_kinds_mix_at_1500_buckets() {
    let got = aligned(&[0, -1, 100, 1507, 500, 3000, 1000, -1], 1500, 16);
    assert_eq!(labels(&got), [0, 100, 500, 1000]);
    assert_eq!(got.num_tokens_post_padded, 5 * 16);
}

#[test]
fn no_pairs_give_nothing() {
    let got = aligned(&[], 8, 16);
    assert_eq!(got.num_tokens_post_padded, 0);
    assert!(got.sorted_token_ids.is_empty() && got.expert_ids.is_empty());
    assert_eq!(got.dispatch, [[1, 0, 1], [7, 0, 1]]);
}

#[test]
fn sentinels_alone_are_counted_but_not_dispatched() {
    let got = aligned(&[-1; 17], 8, 16);
    assert_eq!(got.num_tokens_post_padded, 32);
    assert!(labels(&got).is_empty());
    assert_eq!(got.dispatch[0], [1, 0, 1]);
}

#[test]
fn pairs_of_a_bucket_keep_their_order() {
    let got = aligned(&[1, 0, 1, 0, 1, 0, 1], 2, 2);
    assert_eq!(got.sorted_token_ids[..8], [1, 3, 5, 7, 0, 2, 4, 6]);
    assert_eq!(got.expert_ids[..4], [0, 0, 1, 1]);
}

#[test]
fn more_tiles_than_one_dimension_holds_are_folded() {
    let one = aligned(&vec![0; 65_535], 1, 1);
    assert_eq!(one.dispatch[1], [7, 65_535, 1]);
    let two = aligned(&vec![0; 65_536], 1, 1);
    assert_eq!(two.dispatch[1], [7, 65_535, 2]);
}

#[test]
fn the_contract_holds_around_every_edge() {
    let mut cases = Vec::new();
    for buckets in [0, 1, 8, 1023, 1024, 1025, 8192] {
        for tile in [1, 16, 64] {
            for pairs in [0, 1, tile - 1, tile, tile + 1, 997] {
                cases.push((buckets, tile, pairs));
            }
        }
    }
    each_case(&cases, |&(buckets, tile, pairs)| {
        let mut rng = Rng::new((buckets * 1000 + pairs) as u64);
        // the last and the first bucket, both kinds of sentinel, and everything between
        let mut ids = Vec::new();
        for p in 0..pairs {
            let last = i32::try_from(buckets).unwrap() - 1;
            ids.push(match p % 7 {
                0 => last,
                1 => 0,
                2 => -1,
                3 => last + 1,
                _ => i32::try_from(rng.below(buckets + 1)).unwrap(),
            });
        }
        check_aligned(&ids, buckets, tile, &align(&ids, buckets, tile, &[3]))
    });
}

#[test]
fn the_contract_holds_for_every_routing_and_adapter_mix() {
    let (tokens, top_k, experts, slots) = (37, 2, 5, 3);
    let mut cases = Vec::new();
    for routing in Routing::ALL {
        for mix in AdapterMix::ALL {
            cases.push((routing, mix));
        }
    }
    each_case(&cases, |&(routing, mix)| {
        let mut rng = Rng::new(3);
        let ids = routing.ids(tokens, top_k, experts, &mut rng);
        let mapping = mix.mapping(tokens, slots, &mut rng);
        let virtual_ids = remap(&ids, &mapping, top_k, experts, slots, NoAdapter::Skip).virtual_topk_ids;
        let got = align(&virtual_ids, slots * experts, 16, &[1]);
        if mix == AdapterMix::None && got.dispatch[0] != [1, 0, 1] {
            return Err("tokens without adapter cost tiles".into());
        }
        check_aligned(&virtual_ids, slots * experts, 16, &got)
    });
}

proptest! {
    #[test]
    fn align_is_a_stable_partition(
        buckets in 1usize..40,
        tile in 1usize..20,
        ids in prop::collection::vec(-3i32..45, 0..200),
    ) {
        let got = align(&ids, buckets, tile, &[1]);
        prop_assert_eq!(check_aligned(&ids, buckets, tile, &got), Ok(()));
    }

    #[test]
    fn remapped_ids_divide_back_into_slot_and_expert(
        ids in prop::collection::vec(-2i32..8, 12),
        mapping in prop::collection::vec(-2i32..5, 6),
    ) {
        let remapped = remap(&ids, &mapping, 2, 6, 3, NoAdapter::Skip);
        for p in 0..12 {
            let (id, slot, got) = (ids[p], mapping[p / 2], remapped.virtual_topk_ids[p]);
            if id < 0 {
                prop_assert_eq!(got, id);
            } else if id < 6 && (0..3).contains(&slot) {
                prop_assert_eq!((got % 6, got / 6), (id, slot));
            } else {
                prop_assert_eq!(got, -1);
            }
        }
    }
}

#[test]
fn products_over_the_tiles_equal_products_over_the_pairs() {
    let (tokens, top_k, experts, out, inner, tile) = (13, 2, 5, 3, 4, 4);
    let mut rng = Rng::new(5);
    let mut ids = Routing::Zipf(1.5).ids(tokens, top_k, experts, &mut rng);
    ids[3] = -1;
    let x = rng.floats(tokens * inner);
    let w = rng.floats(experts * out * inner);
    let mut expected = vec![0.0; ids.len() * out];
    expert_gemm(&x, &w, &ids, top_k, out, inner, &mut expected);

    let got = aligned(&ids, experts, tile);
    let mut y = vec![UNWRITTEN_F32; ids.len() * out];
    y[3 * out..4 * out].fill(0.0);
    for i in 0..got.dispatch[0][1] as usize {
        for slot in &got.sorted_token_ids[i * tile..(i + 1) * tile] {
            let p = *slot as usize;
            if p == ids.len() {
                continue;
            }
            let row = &x[p / top_k * inner..][..inner];
            expert_gemm(row, &w, &[got.expert_ids[i]], 1, out, inner, &mut y[p * out..][..out]);
        }
    }
    assert_eq!(y, expected);
}

// the generators

#[test]
fn routings_keep_their_promises() {
    let mut rng = Rng::new(1);
    for routing in Routing::ALL {
        let ids = routing.ids(200, 3, 8, &mut rng);
        for token in ids.chunks(3) {
            assert!(token[0] != token[1] && token[1] != token[2] && token[0] != token[2], "{routing:?}");
            assert!(token.iter().all(|e| (0..8).contains(e)));
        }
        let firsts = ids.iter().step_by(3).filter(|e| **e == 0).count();
        match routing {
            Routing::EmptyExpert => assert!(!ids.contains(&4)),
            Routing::Skewed => assert!((160..=195).contains(&firsts), "{firsts}"),
            Routing::Identical => assert_eq!(firsts, 200),
            _ => {}
        }
    }
}

#[test]
fn relative_error_is_infinite_for_what_was_not_written() {
    assert_eq!(rel_err(&[1.0, UNWRITTEN_F32], &[1.0, 2.0]), f32::INFINITY);
    assert_eq!(rel_err(&[1.0], &[1.0, 2.0]), f32::INFINITY);
    assert_eq!(rel_err(&[1.0, 3.0], &[1.0, 2.0]), 0.5);
    assert_eq!(rel_err(&[], &[]), 0.0);
}
