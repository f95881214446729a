//! Slots of the adapter pool come and go without a trace in anyone's output.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/moe.rs"]
mod moe;

use common::{Rng, rel_err, tolerance};
use moe::{Batch, SHAPE, Twin, adapter, adapter_of, biased, cut, forward, pin, rank_share};
use wgmoe::adapter::pool::AdapterId;
use wgmoe::adapter::{Factor, Site};
use wgmoe::dtype::DType;
use wgmoe::placement::{ExpertShare, Placement, PlacementRule, Topology};
use wgmoe::shape::MoeShape;
use wgmoe::{Adapter, ErrorKind, Gpu};

const EXPERT_SITES: [Site; 3] = [Site::ExpertGate, Site::ExpertUp, Site::ExpertDown];
/// Pairs one by one, and tiles.
const TOKENS: [usize; 2] = [4, 40];

fn twin(gpu: &Gpu) -> Twin {
    Twin::new(gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap())
}

fn batch(mapping: Vec<i32>) -> Batch {
    let x = Rng::new(91).floats(mapping.len() * SHAPE.hidden);
    Batch { x, mapping, residual: None }
}

/// Bits of the outputs, so that nothing counts as near enough.
fn bits(gpu: &Gpu, twin: &Twin, pool: Option<&wgmoe::adapter::pool::AdapterPool>, batch: &Batch) -> Vec<u32> {
    let (out, status) = forward(gpu, &twin.device, pool, batch);
    assert_eq!(status, 0);
    assert!(out.iter().all(|v| v.is_finite()));
    out.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn a_slot_reused_by_an_adapter_without_expert_factors_gives_base_outputs_exactly() {
    for gpu in device::every_tier() {
        for tokens in TOKENS {
            let twin = twin(&gpu);
            let mut pool = twin.pool(&gpu, 1);
            let batch = batch(vec![0; tokens]);
            let base = bits(&gpu, &twin, None, &batch);
            let large =
                adapter(75, 64, DType::F32, &[Site::Router, Site::ExpertGate, Site::ExpertUp, Site::ExpertDown], false);
            assert_eq!(pin(&mut pool, 1, &large), Some(0));
            assert_ne!(bits(&gpu, &twin, Some(&pool), &batch), base);
            pool.unpin(0);
            let attention_only = adapter(76, 2, DType::F32, &[Site::Q], false);
            assert_eq!(pin(&mut pool, 2, &attention_only), Some(0));
            assert_eq!(pool.max_rank(0), 2);
            assert_eq!(bits(&gpu, &twin, Some(&pool), &batch), base);
        }
    }
}

#[test]
fn a_slot_reused_by_a_smaller_adapter_has_nothing_of_the_larger() {
    for gpu in device::every_tier() {
        let twin = twin(&gpu);
        for tokens in TOKENS {
            let batch = batch(vec![0; tokens]);
            let small = adapter(77, 3, DType::F16, &[Site::ExpertUp], false);
            let mut fresh = twin.pool(&gpu, 1);
            pin(&mut fresh, 1, &small);
            let mut reused = twin.pool(&gpu, 1);
            pin(&mut reused, 1, &adapter(78, 64, DType::F32, &EXPERT_SITES, true));
            reused.unpin(0);
            pin(&mut reused, 2, &small);
            assert_eq!(bits(&gpu, &twin, Some(&reused), &batch), bits(&gpu, &twin, Some(&fresh), &batch));
        }
    }
}

#[test]
fn an_unloaded_adapter_leaves_base_output_unchanged() {
    for gpu in device::every_tier() {
        let twin = twin(&gpu);
        for tokens in TOKENS {
            let mut pool = twin.pool(&gpu, 2);
            let nobody = batch(vec![-1; tokens]);
            let base = bits(&gpu, &twin, None, &nobody);
            for number in 0..2 {
                pin(&mut pool, number, &adapter(79 + number, 16, DType::Bf16, &EXPERT_SITES, false));
            }
            // Every second token has an adapter: the others do not notice.
            let mixed = batch((0..tokens as i32).map(|t| if t % 2 == 0 { t / 2 % 2 } else { -1 }).collect());
            let got = bits(&gpu, &twin, Some(&pool), &mixed);
            for t in 0..tokens {
                let row = t * SHAPE.hidden..(t + 1) * SHAPE.hidden;
                assert_eq!(got[row.clone()] == base[row], t % 2 == 1, "token {t} of {tokens}");
            }
            pool.unpin(0);
            pool.unload(AdapterId::new(0));
            assert_eq!(pool.resident(AdapterId::new(0)), None);
            assert_eq!(bits(&gpu, &twin, Some(&pool), &nobody), base);
            // Not even a token that is mapped to the emptied slot finds anything of it.
            assert_eq!(bits(&gpu, &twin, Some(&pool), &batch(vec![0; tokens])), base);
        }
    }
}

/// The rank's part of a layer of experts that are 12 wide: 6 columns of every third expert.
fn part(rank: usize) -> (MoeShape, ExpertShare) {
    let shape = MoeShape { expert_width: 12, ..SHAPE };
    let topology = Topology::new(Some(6), Some(3), rank).unwrap();
    (shape, ExpertShare::new(&PlacementRule::RoundRobin, topology, shape.experts, shape.expert_width).unwrap())
}

#[test]
fn an_adapter_cut_while_it_was_read_gives_the_bits_of_one_cut_by_the_pool() {
    for gpu in device::every_tier() {
        for rank in 0..6 {
            let (shape, share) = part(rank);
            let twin = Twin::of(&gpu, DType::Bf16, shape, share.clone());
            let sites = [Site::Q, Site::Router, Site::ExpertUp, Site::ExpertDown];
            let adapters = [
                adapter_of(shape, 85, 4, DType::F16, &EXPERT_SITES, true),
                biased(90, DType::F16, adapter_of(shape, 86, 16, DType::F32, &sites, false)),
            ];
            let [mut whole, mut reduced] = [twin.pool(&gpu, 2), twin.pool(&gpu, 2)];
            for (i, adapter) in adapters.iter().enumerate() {
                pin(&mut whole, i as u64, adapter);
                pin(&mut reduced, i as u64, &cut(shape, adapter, &share));
            }
            assert_eq!(whole.bytes(), reduced.bytes());
            for tokens in TOKENS {
                let batch = batch((0..tokens as i32).map(|t| t % 3 - 1).collect());
                assert_eq!(bits(&gpu, &twin, Some(&whole), &batch), bits(&gpu, &twin, Some(&reduced), &batch));
            }
        }
    }
}

#[test]
fn the_pool_holds_the_experts_and_columns_of_its_rank_once() {
    for gpu in device::every_tier().into_iter().take(1) {
        let (shape, share) = part(0);
        let twin = Twin::of(&gpu, DType::F32, shape, share);
        let mut pool = twin.pool(&gpu, 1);
        pin(&mut pool, 1, &adapter_of(shape, 87, 8, DType::F16, &EXPERT_SITES, true));
        // Three experts; gate and up share A [8, 24] and have B [8, 8]; down has A [8, 8] and B [24, 8].
        assert_eq!(pool.bytes(), 3 * 2 * 8 * (24 + 2 * 8 + 8 + 24));
    }
}

#[test]
fn adapters_that_do_not_fit_the_rank_are_refused_with_a_reason() {
    let (shape, share) = part(1);
    let (_, other) = part(2);
    let whole = |sites: &[Site]| adapter_of(shape, 88, 4, DType::F32, sites, false);
    let changed = |mut adapter: Adapter, change: &dyn Fn(&mut Factor)| {
        adapter.factors.iter_mut().for_each(change);
        adapter
    };
    let cases = [
        (
            "an expert of another rank",
            changed(cut(shape, &whole(&[Site::ExpertUp]), &share), &|f| f.expert = (f.expert + 1) % 8),
            "expected an expert of this rank",
        ),
        ("another rank's part", cut(shape, &whole(&EXPERT_SITES), &other), "another part of the experts"),
        (
            "whole factors called cut",
            Adapter { share: Some(rank_share(shape, &share)), ..whole(&[Site::ExpertUp]) },
            "B [6, 4]",
        ),
        (
            "cut factors called whole",
            Adapter { share: None, ..cut(shape, &whole(&[Site::ExpertUp]), &share) },
            "[12, 4]",
        ),
        ("another width", adapter_of(SHAPE, 89, 4, DType::F32, &[Site::ExpertDown], false), "A [4, 12]"),
        ("no such layer", changed(whole(&[Site::Q]), &|f| f.layer = 1), "layer 1 Q 0: the model has no such layer"),
        ("no such expert", changed(whole(&[Site::ExpertUp]), &|f| f.expert += 1), "expected an expert below 8"),
        ("a dense projection", changed(whole(&[Site::Q]), &|f| f.site = Site::Gate), "no such projection"),
        (
            "a shared expert",
            changed(whole(&[Site::Q]), &|f| f.site = Site::SharedUp),
            "SharedUp 0: adapters of the shared",
        ),
        (
            "a bias of another length",
            changed(whole(&[Site::ExpertUp]), &|f| f.bias = Some(f.b.clone())),
            "expected a bias [12, 1], got [12, 4]",
        ),
        ("rank 0", changed(whole(&[Site::Router]), &|f| f.rank = 0), "expected A [0, 24]"),
    ];
    for gpu in device::every_tier().into_iter().take(1) {
        let twin = Twin::of(&gpu, DType::F32, shape, share.clone());
        let mut pool = twin.pool(&gpu, 1);
        let mut failures = Vec::new();
        for (name, adapter, expected) in &cases {
            match pool.load(AdapterId::new(1), adapter) {
                Err(e) if e.kind() == ErrorKind::Adapter && e.to_string().contains(expected) => {}
                other => failures.push(format!("{name}: {other:?}")),
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
        assert_eq!((pool.resident(AdapterId::new(1)), pool.bytes(), pool.growths()), (None, 0, 0));
    }
}

#[test]
fn pinned_adapters_stay_and_the_least_recently_used_goes() {
    for gpu in device::every_tier() {
        let twin = twin(&gpu);
        let mut pool = twin.pool(&gpu, 2);
        let [a, b, c] =
            [(82, 2), (83, 16), (84, 64)].map(|(seed, rank)| adapter(seed, rank, DType::F16, &EXPERT_SITES, false));
        assert_eq!((pin(&mut pool, 1, &a), pin(&mut pool, 2, &b)), (Some(0), Some(1)));
        assert_eq!(pin(&mut pool, 3, &c), None);
        pool.unload(AdapterId::new(1));
        assert_eq!(pool.resident(AdapterId::new(1)), Some(0));
        // Both free, b used last: a goes. The buffer grows, and b's factors move with it.
        pool.unpin(1);
        pool.unpin(0);
        assert_eq!(pin(&mut pool, 2, &b), Some(1));
        assert_eq!(pin(&mut pool, 3, &c), Some(0));
        assert_eq!(pool.resident(AdapterId::new(1)), None);
        let mixed = batch((0..20).map(|t| t % 3 - 1).collect());
        let held: [Option<&Adapter>; 2] = [Some(&c), Some(&b)];
        let expected = twin.expected(&mixed.x, &mixed.mapping, &held);
        let (got, _) = forward(&gpu, &twin.device, Some(&pool), &mixed);
        let off = rel_err(&got, &expected.out);
        assert!(off <= tolerance(&gpu), "off by {off}");
    }
}
