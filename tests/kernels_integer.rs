//! Count, localise, remap and align on the device, exact against the oracle on every tier.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use common::{AdapterMix, Rng, Routing, UNWRITTEN_I32};
use gpu_run::{Output, read, run, upload};
use proptest::prelude::*;
use wgmoe::Gpu;
use wgmoe::kernels::Recording;
use wgmoe::kernels::align::{Align, Aligned as Place, FEW};
use wgmoe::kernels::count::Count;
use wgmoe::kernels::localise::{Localise, Owners};
use wgmoe::kernels::remap::Remap;
use wgmoe::placement::Placement;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::reference::{self, Aligned, Remapped};
use wgmoe::router::NoAdapter;
use wgmoe::shape::align_capacity;

/// Column tiles of two consumers.
const COLUMNS: [u32; 2] = [3, 5];

fn remap_on(gpu: &Gpu, ids: &[i32], mapping: &[i32], [a, experts, slots]: [usize; 3], mode: NoAdapter) -> Remapped {
    let (topk_ids, token_lora_mapping) = (upload(gpu, ids), upload(gpu, mapping));
    let virtual_ids = Output::new(gpu, ids.len(), UNWRITTEN_I32);
    let mask = Output::new(gpu, mapping.len(), UNWRITTEN_I32 as u32);
    let status = Output::new(gpu, 1, 0u32);
    run(gpu, |rec, pass| {
        Remap {
            pairs: ids.len(),
            top_k: a,
            experts,
            slots,
            no_adapter: mode,
            topk_ids: &topk_ids,
            token_lora_mapping: &token_lora_mapping,
            virtual_topk_ids: &virtual_ids.view,
            lora_mask: &mask.view,
            status: &status.view,
        }
        .record(rec, pass)
    });
    Remapped { virtual_topk_ids: virtual_ids.read(gpu), lora_mask: mask.read(gpu), status: status.read(gpu)[0] }
}

fn align_on(gpu: &Gpu, ids: &[i32], buckets: usize, tile: usize, at_once: bool) -> Aligned {
    let capacity = align_capacity(ids.len(), buckets, tile);
    align_with(gpu, ids, buckets, tile, capacity, &|align, rec, pass| align.record_as(rec, pass, at_once))
}

/// How an alignment is recorded.
type Record<'a> = dyn Fn(&Align<'_>, &mut Recording, &mut wgpu::ComputePass<'_>) -> wgmoe::Result<Place> + 'a;

fn align_with(gpu: &Gpu, ids: &[i32], buckets: usize, tile: usize, capacity: usize, record: &Record<'_>) -> Aligned {
    let ids_view = upload(gpu, ids);
    let (place, out): (Place, _) = run(gpu, |rec, pass| {
        // Larger than needed, and full of words that are neither padding nor a label.
        let out = rec.scratch("tiles", (capacity * 3 + 1024) as u64 * 4)?;
        gpu.queue().write_buffer(&out.buffer, 0, bytemuck::cast_slice(&vec![UNWRITTEN_I32; capacity * 3 + 1024]));
        let align = Align { pairs: ids.len(), buckets, tile, label: "tiles", ids: &ids_view, columns: &COLUMNS };
        Ok((record(&align, rec, pass)?, out))
    });
    let words: Vec<i32> = read(gpu, &out, capacity * 3 + 1024);
    let at = |base: u32, n: usize| words[base as usize..base as usize + n].to_vec();
    assert_eq!(place.capacity, capacity);
    let places = at(place.places_base, ids.len());
    let sorted = at(place.sorted_base, capacity);
    let stands = |(p, place): (usize, &i32)| sorted[*place as usize] == p as i32;
    assert!(places.iter().enumerate().all(stands), "a pair does not stand in its place");
    let end = place.places_base as usize + ids.len();
    assert!(words[end..].iter().all(|w| *w == UNWRITTEN_I32), "written past the alignment");
    Aligned {
        sorted_token_ids: sorted,
        expert_ids: at(place.expert_base, capacity / tile),
        num_tokens_post_padded: words[Place::COUNT_WORD] as u32,
        dispatch: (0..COLUMNS.len()).map(|c| [0, 1, 2].map(|i| words[c * 4 + i] as u32)).collect(),
    }
}

/// The whole of an alignment against the oracle: contents, padding, labels, count, order and dispatch arguments; in steps, and
/// at once where there are few pairs.
fn check_align(gpu: &Gpu, ids: &[i32], buckets: usize, tile: usize) -> Aligned {
    let expected = reference::align(ids, buckets, tile, &COLUMNS);
    for at_once in [false, true].into_iter().filter(|at_once| !at_once || ids.len() <= FEW) {
        let got = align_on(gpu, ids, buckets, tile, at_once);
        let what = format!("{} P {} N {buckets} B {tile} at once: {at_once}", gpu.tier(), ids.len());
        assert_eq!(got.num_tokens_post_padded, expected.num_tokens_post_padded, "count: {what}");
        assert_eq!(got.expert_ids, expected.expert_ids, "labels: {what}");
        assert_eq!(got.dispatch, expected.dispatch, "dispatch: {what}");
        assert!(got.sorted_token_ids == expected.sorted_token_ids, "pairs: {what}");
    }
    expected
}

#[test]
fn only_slots_that_occur_take_room_in_an_alignment() {
    const EXPERTS: usize = 7;
    let used = [0, 5, 6, 100, 300];
    for gpu in device::every_tier() {
        for (pairs, tile) in [(0, 4), (1, 1), (300, 4), (900, 16), (2000, 1)] {
            let mut rng = Rng::new(19);
            let mut draw = |n: usize| (rng.floats(1)[0].abs() * 1e6) as usize % n;
            let ids: Vec<i32> = (0..pairs)
                .map(|_| match draw(9) {
                    0 => -1,
                    // Slots between those that occur, and past all that could: no bucket.
                    1 => ([1, 299, 512, 5000][draw(4)] * EXPERTS) as i32,
                    _ => (used[draw(used.len())] * EXPERTS + draw(EXPERTS)) as i32,
                })
                .collect();
            let known: Vec<i32> =
                ids.iter().map(|id| if used.contains(&(*id as usize / EXPERTS)) { *id } else { -1 }).collect();
            let buckets = 301 * EXPERTS;
            let expected = reference::align(&known, buckets, tile, &COLUMNS);
            let capacity = align_capacity(pairs, used.len() * EXPERTS, tile);
            let got = align_with(&gpu, &ids, buckets, tile, capacity, &|align, rec, pass| {
                align.record_used(rec, pass, &used, EXPERTS)
            });
            let what = format!("{} P {pairs} B {tile}", gpu.tier());
            assert_eq!(got.num_tokens_post_padded, expected.num_tokens_post_padded, "count: {what}");
            assert_eq!(got.expert_ids, expected.expert_ids[..capacity / tile], "labels: {what}");
            assert_eq!(got.dispatch, expected.dispatch, "dispatch: {what}");
            assert!(got.sorted_token_ids == expected.sorted_token_ids[..capacity], "pairs: {what}");
        }
        // Slots that there are no bits for: all are counted.
        let ids = [600 * EXPERTS as i32 + 2, -1, 599 * EXPERTS as i32];
        let (buckets, capacity) = (601 * EXPERTS, align_capacity(3, 601 * EXPERTS, 4));
        let got = align_with(&gpu, &ids, buckets, 4, capacity, &|align, rec, pass| {
            align.record_used(rec, pass, &[600], EXPERTS)
        });
        assert_eq!(got.expert_ids, reference::align(&ids, buckets, 4, &COLUMNS).expert_ids);
    }
}

/// The labels that occur, without -1.
fn labels(aligned: &Aligned) -> Vec<i32> {
    let mut all: Vec<i32> = aligned.expert_ids.iter().copied().filter(|l| *l != -1).collect();
    all.dedup();
    all
}

#[test]
fn negative_ids_come_back_from_remap_bit_for_bit() {
    for gpu in device::every_tier() {
        let ids = [0, -1, 5, 3, -1, -2, 15, 7, i32::MIN, 2, -1, 4, 8, 9, -77, 1];
        let mapping = [0, 1, -1, 2, 3, 0, -1, 1];
        for mode in [NoAdapter::Skip, NoAdapter::Unshifted] {
            let got = remap_on(&gpu, &ids, &mapping, [2, 16, 4], mode);
            assert_eq!(got, reference::remap(&ids, &mapping, 2, 16, 4, mode));
            assert!((0..16).all(|p| ids[p] >= 0 || got.virtual_topk_ids[p] == ids[p]));
        }
    }
}

#[test]
fn remap_shifts_an_id_by_its_slot() {
    for gpu in device::every_tier() {
        let got = remap_on(&gpu, &[0, 1, 2, 3, 15, 14], &[0, 1, 2], [2, 16, 4], NoAdapter::Skip);
        assert_eq!(got.virtual_topk_ids, [0, 1, 18, 19, 47, 46]);
        assert_eq!((got.lora_mask, got.status), (vec![1, 1, 1], 0));
    }
}

#[test]
fn a_token_without_adapter_is_masked_and_skipped_or_kept_as_asked() {
    for gpu in device::every_tier() {
        let kept = remap_on(&gpu, &[3, 5], &[-1], [2, 16, 4], NoAdapter::Unshifted);
        assert_eq!((kept.virtual_topk_ids, kept.lora_mask, kept.status), (vec![3, 5], vec![0], 0));
        let skipped = remap_on(&gpu, &[3, 5], &[-1], [2, 16, 4], NoAdapter::Skip);
        assert_eq!((skipped.virtual_topk_ids, skipped.lora_mask, skipped.status), (vec![-1, -1], vec![0], 0));
    }
}

#[test]
fn an_id_past_the_experts_never_lands_in_the_next_slot() {
    for gpu in device::every_tier() {
        for mode in [NoAdapter::Skip, NoAdapter::Unshifted] {
            let got = remap_on(&gpu, &[16, 17, 31, i32::MAX, 15, 0], &[0, 0, 0], [2, 16, 4], mode);
            assert_eq!(got.virtual_topk_ids, [-1, -1, -1, -1, 15, 0]);
            assert_eq!(got.status, wgmoe::router::STATUS_ID);
        }
    }
}

#[test]
fn a_slot_past_the_last_counts_as_none_and_sets_the_status() {
    for gpu in device::every_tier() {
        for mode in [NoAdapter::Skip, NoAdapter::Unshifted] {
            let mapping = [4, 3, i32::MAX, i32::MIN, -5];
            let got = remap_on(&gpu, &[1, 2, 3, 4, 5], &mapping, [1, 16, 4], mode);
            assert_eq!(got, reference::remap(&[1, 2, 3, 4, 5], &mapping, 1, 16, 4, mode));
            assert_eq!((got.lora_mask, got.status), (vec![0, 1, 0, 0, 0], wgmoe::router::STATUS_SLOT));
        }
    }
}

#[test]
fn remap_equals_the_oracle_for_every_routing_and_adapter_mix() {
    for gpu in device::every_tier() {
        let mut rng = Rng::new(1);
        for routing in Routing::ALL {
            for mix in AdapterMix::ALL {
                let ids = routing.ids(37, 3, 7, &mut rng);
                let mapping = mix.mapping(37, 5, &mut rng);
                let got = remap_on(&gpu, &ids, &mapping, [3, 7, 5], NoAdapter::Skip);
                assert_eq!(got, reference::remap(&ids, &mapping, 3, 7, 5, NoAdapter::Skip), "{routing:?} {mix:?}");
            }
        }
        let none = remap_on(&gpu, &[], &[], [3, 7, 5], NoAdapter::Skip);
        assert_eq!((none.virtual_topk_ids.len(), none.status), (0, 0));
    }
}

fn localise_on(gpu: &Gpu, ids: &[i32], placement: &Placement, valid_pairs: usize) -> Vec<i32> {
    let ids_view = upload(gpu, ids);
    let out = Output::new(gpu, ids.len(), UNWRITTEN_I32);
    let owners = Owners::upload(gpu, placement).unwrap().expect("a placement that needs a look-up");
    run(gpu, |rec, pass| {
        let quotas = rec.scratch("quotas", placement.experts() as u64 * 8)?;
        gpu.queue().write_buffer(&quotas.buffer, 0, &vec![0x7f; placement.experts() * 8]);
        let (pairs, topk_ids, local_ids) = (ids.len(), &ids_view, &out.view);
        Localise { pairs, valid_pairs, topk_ids, owners: &owners, local_ids }.record(rec, pass)
    });
    out.read(gpu)
}

#[test]
fn localise_masks_padding_after_the_look_up_and_keeps_negative_ids() {
    for gpu in device::every_tier() {
        // Expert 1 has another copy, expert 4 two others.
        let owners = [vec![1], vec![0, 2], vec![1], vec![0], vec![2, 1, 0], vec![2], vec![1], vec![0]];
        let ids: Vec<i32> = (0..134).map(|p| [0, 1, 7, -1, -2, 8, 100, i32::MIN, 4, i32::MAX][p % 10]).collect();
        for rank in 0..3 {
            let placement = Placement::table(&owners, 3, rank).unwrap();
            for valid in [0, 1, 31, 66, 67] {
                let got = localise_on(&gpu, &ids, &placement, valid * 2);
                assert_eq!(got, reference::localise(&ids, &placement, valid, 2), "{rank} {valid}");
            }
        }
    }
}

/// `experts` experts: the first on every rank, every third on one, others on one or more.
fn copied(experts: usize, ranks: usize, rng: &mut Rng) -> Vec<Vec<usize>> {
    let list = |e: usize, rng: &mut Rng| {
        let n = [ranks, 1 + rng.below(ranks), 1][if e == 0 { 0 } else { 1 + e % 3 / 2 }];
        let first = rng.below(ranks);
        (0..n).map(|i| (first + i) % ranks).collect()
    };
    (0..experts).map(|e| list(e, rng)).collect()
}

#[test]
fn copies_are_chosen_as_the_oracle_chooses_them_and_each_pair_once() {
    for gpu in device::every_tier() {
        let mut rng = Rng::new(5);
        for (experts, ranks, top_k) in [(1, 2, 1), (1, 4, 1), (7, 2, 2), (7, 4, 3), (128, 3, 8), (128, 4, 8)] {
            for routing in [Routing::Identical, Routing::Uniform, Routing::Zipf(1.5), Routing::Skewed] {
                let (owners, tokens) = (copied(experts, ranks, &mut rng), [1, 37, 150][rng.below(3)]);
                let mut ids = routing.ids(tokens, top_k, experts, &mut rng);
                ids.iter_mut().step_by(11).for_each(|id| *id = -1);
                let valid = tokens - rng.below(2);
                let mut taken = vec![0; ids.len()];
                for rank in 0..ranks {
                    let placement = Placement::table(&owners, ranks, rank).unwrap();
                    let what = format!("{} E {experts} {ranks} {routing:?} {tokens} rank {rank}", gpu.tier());
                    let expected = reference::localise(&ids, &placement, valid, top_k);
                    assert_eq!(localise_on(&gpu, &ids, &placement, valid * top_k), expected, "{what}");
                    expected.iter().zip(&mut taken).for_each(|(id, n)| *n += usize::from(*id >= 0));
                }
                let owed = |p: usize| usize::from(ids[p] >= 0 && p < valid * top_k);
                assert!((0..ids.len()).all(|p| taken[p] == owed(p)), "{owners:?} {ids:?}");
            }
        }
    }
}

#[test]
fn an_expert_that_is_everywhere_fills_what_the_others_left() {
    let mut rng = Rng::new(6);
    for ranks in [2, 3, 4] {
        // The last to be shared out, with more pairs than the others together.
        let mut owners = copied(8, ranks, &mut rng);
        owners[7] = (0..ranks).collect();
        let mut ids = Routing::Zipf(1.5).ids(60, 3, 8, &mut rng);
        ids.extend([7; 300]);
        let placed = |rank| {
            let placement = Placement::table(&owners, ranks, rank).unwrap();
            reference::localise(&ids, &placement, ids.len(), 1).iter().filter(|id| **id >= 0).count()
        };
        let loads: Vec<usize> = (0..ranks).map(placed).collect();
        let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
        assert!(most - least <= 1, "{loads:?}");
    }
}

#[test]
fn the_most_loaded_rank_has_no_more_than_with_equal_shares_and_mostly_less() {
    let (mut rng, ranks, mut lower) = (Rng::new(9), 4, 0);
    for round in 0..40 {
        let owners = copied(16, ranks, &mut rng);
        let ids = [Routing::Uniform, Routing::Zipf(1.5), Routing::Skewed][round % 3].ids(40, 4, 16, &mut rng);
        let mut equal = vec![0; ranks];
        for (e, list) in owners.iter().enumerate() {
            let n = ids.iter().filter(|id| **id == e as i32).count();
            let mut list = list.clone();
            list.sort_unstable();
            (0..n).for_each(|pair| equal[list[pair % list.len()]] += 1);
        }
        let placed = |rank| {
            let placement = Placement::table(&owners, ranks, rank).unwrap();
            reference::localise(&ids, &placement, 40, 4).iter().filter(|id| **id >= 0).count()
        };
        let (most, before) = ((0..ranks).map(placed).max(), equal.into_iter().max());
        assert!(most <= before, "{most:?} {before:?} {owners:?}");
        lower += usize::from(most < before);
    }
    assert!(lower > 20, "{lower} of 40");
}

#[test]
fn copies_are_chosen_among_many_experts_ranks_and_pairs() {
    for gpu in device::every_tier().iter().rev().take(1) {
        let mut rng = Rng::new(7);
        // More copies than the shader keeps in workgroup memory, and pairs of which every lane has several.
        let owners: Vec<Vec<usize>> = (0..512).map(|e| (0..4).map(|i| (e + i * 17) % 64).collect()).collect();
        let ids = Routing::Zipf(1.1).ids(400, 8, 512, &mut rng);
        for rank in [0, 40] {
            let placement = Placement::table(&owners, 64, rank).unwrap();
            let expected = reference::localise(&ids, &placement, 400, 8);
            assert_eq!(localise_on(gpu, &ids, &placement, ids.len()), expected);
        }
    }
}

#[test]
fn counts_add_up_over_steps_and_stay_in_their_layer() {
    for gpu in device::every_tier() {
        let mut rng = Rng::new(8);
        for experts in [1, 7, 128] {
            let counts = Output::new(&gpu, 3 * experts, 0u32);
            let mut expected = vec![0; 3 * experts];
            for (layer, tokens, valid) in [(0, 1, 1), (2, 70, 70), (0, 33, 32), (2, 5, 0)] {
                let mut ids = Routing::Skewed.ids(tokens, 1, experts, &mut rng);
                ids.iter_mut().step_by(5).for_each(|id| *id = [-1, i32::MIN, experts as i32, i32::MAX][rng.below(4)]);
                let topk_ids = upload(&gpu, &ids);
                run(&gpu, |rec, pass| {
                    let (topk_ids, counts) = (&topk_ids, &counts.view);
                    Count { valid_pairs: valid, experts, layer, topk_ids, counts }.record(rec, pass)
                });
                reference::count(&ids, valid, &mut expected[layer * experts..(layer + 1) * experts]);
            }
            assert_eq!(counts.read(&gpu), expected, "{} {experts}", gpu.tier());
        }
    }
}

#[test]
fn every_bucket_with_one_pair_gets_one_labelled_tile() {
    for gpu in device::every_tier() {
        let got = check_align(&gpu, &[3, 1, 0, 7, 5, 2, 6, 4], 8, 16);
        assert_eq!(got.expert_ids, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(got.num_tokens_post_padded, 128);
        assert_eq!(got.dispatch, [[3, 8, 1], [5, 8, 1]]);
    }
}

#[test]
fn ids_that_are_no_bucket_go_last_and_get_no_label() {
    for gpu in device::every_tier() {
        let negative = check_align(&gpu, &[0, -1, 1, -1, -7, 7, -1, i32::MIN], 8, 16);
        assert_eq!((labels(&negative), negative.num_tokens_post_padded), (vec![0, 1, 7], 64));
        assert_eq!(negative.sorted_token_ids[48..54], [1, 3, 4, 6, 7, 8]);
        let beyond = check_align(&gpu, &[0, 100, 1, 50, 200, 7, 8, i32::MAX], 8, 16);
        assert_eq!((labels(&beyond), beyond.dispatch[0]), (vec![0, 1, 7], [3, 3, 1]));
        let mixed: Vec<i32> = (0..64).map(|p| [0, -1, 100, 1507, 500, 3000, 1000, -2][p % 8]).collect();
        assert_eq!(labels(&check_align(&gpu, &mixed, 1500, 16)), [0, 100, 500, 1000]);
    }
}

#[test]
fn no_pairs_give_count_zero_and_empty_dispatches() {
    for gpu in device::every_tier() {
        for buckets in [1, 8, 1500] {
            let got = check_align(&gpu, &[], buckets, 16);
            assert_eq!((got.num_tokens_post_padded, got.dispatch), (0, vec![[3, 0, 1], [5, 0, 1]]));
        }
    }
}

#[test]
fn alignment_is_exact_at_every_edge_shape() {
    for gpu in device::every_tier() {
        let mut rng = Rng::new(2);
        for tile in [1, 4, 8] {
            for pairs in [1, tile - 1, tile, tile + 1, 63, 64, 65, 127, 257, 331, 511, 512] {
                let ids: Vec<i32> = (0..pairs).map(|_| rng.below(9) as i32 - 1).collect();
                check_align(&gpu, &ids, 7, tile);
            }
        }
        for routing in Routing::ALL {
            let ids = routing.ids(50, 4, 16, &mut rng);
            check_align(&gpu, &ids, 16, 8);
        }
    }
}

#[test]
fn alignment_is_exact_where_many_slots_make_many_buckets() {
    for gpu in device::every_tier() {
        let mut rng = Rng::new(3);
        for buckets in [63, 64, 1023, 1024, 1025, 8192] {
            let any: Vec<i32> = (0..300).map(|_| rng.below(buckets + 2) as i32 - 1).collect();
            check_align(&gpu, &any, buckets, 8);
            // The first and last bucket, the sentinel, and nothing between.
            let ends: Vec<i32> = (0..70).map(|p| [0, buckets as i32 - 1, -1, buckets as i32][p % 4]).collect();
            check_align(&gpu, &ends, buckets, 4);
        }
    }
}

#[test]
fn long_inputs_with_many_buckets_count_in_large_chunks() {
    for gpu in device::every_tier() {
        let mut rng = Rng::new(4);
        // ceil(P / 64) · (N + 1) above 2^20.
        let ids: Vec<i32> = (0..8300).map(|_| rng.below(8194) as i32 - 1).collect();
        check_align(&gpu, &ids, 8192, 4);
        // Room for nine chunks, which then have several times as many pairs as are counted at once.
        let own = gpu.capabilities().clone();
        let max_binding_bytes = own.max_binding_bytes.min((ids.len() + 9 * 2 * 8193) as u64 * 4);
        check_align(&gpu.with_capabilities(Capabilities { max_binding_bytes, ..own }), &ids, 8192, 4);
    }
}

#[test]
fn any_ids_are_aligned_as_the_oracle_does() {
    let gpus = device::every_tier();
    let ids = prop_oneof![8 => 0..40i32, 1 => any::<i32>(), 1 => Just(-1)];
    let strategy = (prop::collection::vec(ids, 0..400), 1..40usize, 1..17usize);
    proptest!(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() },
    |((ids, buckets, tile) in strategy)| {
        for gpu in &gpus {
            prop_assert_eq!(align_on(gpu, &ids, buckets, tile, true), reference::align(&ids, buckets, tile, &COLUMNS));
        }
    });
}
