//! The memory of the adapter pool: budgets, limits, devices that run out, and loads in any order.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/moe.rs"]
mod moe;

use std::collections::BTreeMap;

use common::{Rng, rel_err, tolerance};
use moe::{Batch, SHAPE, Twin, adapter, forward};
use proptest::prelude::*;
use wgmoe::adapter::Site;
use wgmoe::adapter::pool::{AdapterId, AdapterPool, PoolOptions};
use wgmoe::dtype::DType;
use wgmoe::placement::Placement;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::{Adapter, ErrorKind, Gpu};

const EXPERT_SITES: [Site; 3] = [Site::ExpertGate, Site::ExpertUp, Site::ExpertDown];
/// What the pool's site `gate_up` has.
const GATE_UP: [Site; 2] = [Site::ExpertGate, Site::ExpertUp];

fn twin(gpu: &Gpu) -> Twin {
    Twin::new(gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap())
}

/// A pool of two layers like the twin's.
fn pool(gpu: &Gpu, twin: &Twin, slots: usize, budget: Option<u64>) -> AdapterPool {
    let one = twin.pool_options(slots).layers.remove(0);
    AdapterPool::with_options(gpu, PoolOptions { layers: vec![one.clone(), one], ends: None, slots, budget }).unwrap()
}

/// An adapter of both layers, f32 on the experts: `192 · padded rank` words a layer.
fn both(seed: u64, rank: usize) -> Adapter {
    let mut adapter = adapter(seed, rank, DType::F32, &EXPERT_SITES, false);
    let second = adapter.factors.clone().into_iter().map(|mut f| {
        f.layer = 1;
        f
    });
    adapter.factors.extend(second.collect::<Vec<_>>());
    adapter
}

/// Bytes that it takes alone.
fn size(gpu: &Gpu, twin: &Twin, adapter: &Adapter) -> u64 {
    let mut alone = pool(gpu, twin, 1, None);
    alone.load(AdapterId::new(0), adapter).unwrap();
    alone.bytes()
}

/// Bytes that the first layer takes of it for `projections`, those of one site of the pool.
fn site_bytes(gpu: &Gpu, twin: &Twin, adapter: &Adapter, projections: &[Site]) -> u64 {
    let factors = adapter.factors.iter().filter(|f| f.layer == 0 && projections.contains(&f.site)).cloned().collect();
    size(gpu, twin, &Adapter { factors, ..adapter.clone() })
}

/// Bits of a batch that maps its tokens to `slots` in turn.
fn bits(gpu: &Gpu, twin: &Twin, pool: &AdapterPool, slots: &[i32]) -> Vec<u32> {
    let x = Rng::new(92).floats(6 * SHAPE.hidden);
    let batch = Batch { x, mapping: slots.iter().copied().cycle().take(6).collect(), residual: None };
    forward(gpu, &twin.device, Some(pool), &batch).0.iter().map(|v| v.to_bits()).collect()
}

const fn id(n: u64) -> AdapterId {
    AdapterId::new(n)
}

/// A name, device, budget, buffers that can be made, whether b is pinned, what is loaded, and the error's kind and words.
type FailedLoad<'a> = (&'a str, &'a Gpu, Option<u64>, Option<usize>, bool, &'a Adapter, ErrorKind, Vec<&'a str>);

#[test]
fn a_failed_load_leaves_everything_as_it_was() {
    for gpu in device::every_tier() {
        let twin = twin(&gpu);
        let [a, b, large] = [(1, 4), (2, 8), (3, 64)].map(|(seed, rank)| both(seed, rank));
        let [size_a, size_b, size_large] = [&a, &b, &large].map(|adapter| size(&gpu, &twin, adapter));
        let own = gpu.capabilities().clone();
        let gate_up = site_bytes(&gpu, &twin, &large, &GATE_UP);
        let narrow = gpu.with_capabilities(Capabilities { max_binding_bytes: gate_up - 16, ..own });
        let budget = size_large - 16;
        let (needed, bound) = (format!("{size_large} bytes needed"), format!("budget is {budget}"));
        let pinned = format!("{} bytes needed, where {size_b} are pinned and the budget is {}", size_a, size_b + 16);
        let binding = [
            format!("{gate_up} bytes for `gate_up` of layer 0"),
            format!("binding limit is {}, which holds 0", gate_up - 16),
        ];
        let cases: [FailedLoad<'_>; 6] = [
            ("budget", &gpu, Some(budget), None, false, &large, ErrorKind::Limit, vec![&needed, &bound]),
            ("binding", &narrow, None, None, false, &large, ErrorKind::Limit, vec![&binding[0], &binding[1]]),
            ("no memory at all", &gpu, None, Some(0), false, &large, ErrorKind::OutOfMemory, vec!["memory"]),
            ("memory for one site", &gpu, None, Some(1), false, &large, ErrorKind::OutOfMemory, vec!["memory"]),
            ("memory for one layer", &gpu, None, Some(2), false, &large, ErrorKind::OutOfMemory, vec!["memory"]),
            ("pinned", &gpu, Some(size_b + 16), None, true, &a, ErrorKind::Limit, vec![&pinned]),
        ];
        let mut failures = Vec::new();
        for (name, gpu, budget, buffers, pin_b, loaded, kind, words) in cases {
            let mut pool = pool(gpu, &twin, 3, budget);
            if pin_b {
                pool.pin(id(2), &b).unwrap().unwrap();
            } else {
                pool.load(id(1), &a).unwrap();
                pool.load(id(2), &b).unwrap();
            }
            let state = |pool: &AdapterPool| {
                let resident = [1, 2, 3].map(|n| pool.resident(id(n)));
                let ranks = [0, 1, 2].map(|slot| pool.max_rank(slot));
                (resident, ranks, pool.bytes(), pool.growths(), bits(gpu, &twin, pool, &[0, 1, 2, -1]))
            };
            let before = state(&pool);
            pool.fail_buffers_after(buffers);
            match pool.load(id(3), loaded) {
                Err(e) if e.kind() == kind && words.iter().all(|w| e.to_string().contains(w)) => {}
                other => failures.push(format!("{} {name}: {other:?}", gpu.tier())),
            }
            if pin_b {
                assert_eq!(pool.pin(id(3), loaded).unwrap(), None, "it waits");
            }
            if state(&pool) != before {
                failures.push(format!("{} {name}: something changed", gpu.tier()));
            }
            // Nor was anybody's turn to be evicted touched: 1 was used before 2.
            pool.fail_buffers_after(None);
            if !pin_b {
                for n in [4, 5] {
                    pool.load(id(n), &both(4, 1)).unwrap();
                }
                if (pool.resident(id(1)), pool.resident(id(2))) != (None, before.0[1]) {
                    failures.push(format!("{} {name}: the wrong one went", gpu.tier()));
                }
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
    }
}

#[test]
fn a_layer_larger_than_a_binding_is_held_where_each_of_its_sites_fits() {
    for gpu in device::every_tier() {
        let twin = twin(&gpu);
        let adapters = [11, 12, 13].map(|seed| adapter(seed, 24, DType::F32, &EXPERT_SITES, false));
        let gate_up = site_bytes(&gpu, &twin, &adapters[0], &GATE_UP);
        // Two adapters to the byte: no slack helps a third.
        let limit = 2 * gate_up;
        let narrow = gpu.with_capabilities(Capabilities { max_binding_bytes: limit, ..gpu.capabilities().clone() });
        let mut pool = twin.pool(&narrow, 3);
        for (n, adapter) in (0..2).zip(&adapters) {
            assert_eq!(pool.pin(id(n), adapter).unwrap(), Some(n as usize));
        }
        assert!(pool.bytes() > limit, "{} bytes are no more than a binding of {limit}", pool.bytes());
        let mapping: Vec<i32> = (0..24).map(|t| t % 4 - 1).collect();
        let x = Rng::new(93).floats(mapping.len() * SHAPE.hidden);
        let batch = Batch { x, mapping, residual: None };
        let off = |pool: &AdapterPool, held: [Option<usize>; 3]| {
            let held = held.map(|n| n.map(|n| &adapters[n]));
            let expected = twin.expected(&batch.x, &batch.mapping, &held).out;
            rel_err(&forward(&gpu, &twin.device, Some(pool), &batch).0, &expected)
        };
        let first = off(&pool, [Some(0), Some(1), None]);
        // The site that is full has no room beside what is pinned, and takes the place of what is not.
        let error = pool.load(id(2), &adapters[2]).unwrap_err();
        let words = format!("{gate_up} bytes for `gate_up` of layer 0, where {limit} are pinned");
        assert!(error.kind() == ErrorKind::Limit && error.to_string().contains(&words), "{error}");
        assert!(
            error.to_string().contains(&format!("binding limit is {limit}, which holds 2 of this size")),
            "{error}"
        );
        assert_eq!(pool.pin(id(2), &adapters[2]).unwrap(), None);
        pool.unpin(0);
        assert_eq!(pool.pin(id(2), &adapters[2]).unwrap(), Some(2));
        assert_eq!([0, 1].map(|n| pool.resident(id(n))), [None, Some(1)]);
        let second = off(&pool, [None, Some(1), Some(2)]);
        assert!(first.max(second) <= tolerance(&gpu), "off by {first} and {second}");
    }
}

#[test]
fn when_memory_runs_out_the_least_recently_used_goes_instead() {
    for gpu in device::every_tier() {
        let twin = twin(&gpu);
        let mut pool = pool(&gpu, &twin, 4, None);
        for n in 1..=2 {
            pool.load(id(n), &both(n, 8)).unwrap();
        }
        // The buffers hold two; a third has to make them grow.
        pool.load(id(1), &both(1, 8)).unwrap();
        pool.fail_buffers_after(Some(1));
        let (bytes, growths) = (pool.bytes(), pool.growths());
        let slot = pool.load(id(3), &both(3, 8)).unwrap();
        assert_eq!([1, 2].map(|n| pool.resident(id(n)).is_some()), [true, false]);
        assert_eq!((pool.bytes(), pool.growths()), (bytes, growths));
        let mut fresh = self::pool(&gpu, &twin, 4, None);
        fresh.load(id(3), &both(3, 8)).unwrap();
        assert_eq!(bits(&gpu, &twin, &pool, &[slot as i32]), bits(&gpu, &twin, &fresh, &[0]));
        // A slot that was emptied on the way has nothing left.
        let empty = (0..4).find(|s| pool.max_rank(*s) == 0).unwrap();
        assert_eq!(bits(&gpu, &twin, &pool, &[empty as i32]), bits(&gpu, &twin, &pool, &[-1]));
    }
}

#[test]
fn a_budget_is_kept_by_moving_what_stays_and_by_shrinking_other_layers() {
    for gpu in device::every_tier() {
        let twin = twin(&gpu);
        let one_layer = |seed, layer| {
            let mut adapter = adapter(seed, 16, DType::F32, &EXPERT_SITES, false);
            adapter.factors.iter_mut().for_each(|f| f.layer = layer);
            adapter
        };
        let (first, second) = (one_layer(5, 0), one_layer(6, 1));
        let small = both(7, 1);
        let budget = size(&gpu, &twin, &first) + size(&gpu, &twin, &small);
        let mut pool = pool(&gpu, &twin, 2, Some(budget));
        pool.load(id(1), &first).unwrap();
        let slot = pool.pin(id(2), &small).unwrap().unwrap() as i32;
        let bits_small = bits(&gpu, &twin, &pool, &[slot]);
        // All of the budget is in layer 0 now, and layer 1 needs it; the small one lies behind what goes.
        for n in 0..4 {
            let next = if n % 2 == 0 { &second } else { &first };
            pool.load(id(3 + n), next).unwrap();
            assert!(pool.bytes() <= budget, "{} of {budget}", pool.bytes());
            assert_eq!(bits(&gpu, &twin, &pool, &[slot]), bits_small, "load {n}");
        }
        pool.unpin(slot as usize);
        assert!(pool.unload(id(2)) && !pool.unload(id(2)));
        assert_eq!(bits(&gpu, &twin, &pool, &[slot]), bits(&gpu, &twin, &pool, &[-1]));
    }
}

/// What a program does with a pool.
#[derive(Debug, Clone, Copy)]
enum Op {
    Load(u64),
    Pin(u64),
    Unpin(u64),
    Unload(u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = (0..5u8, 0..7u64).prop_map(|(kind, n)| match kind {
        0 | 1 => Op::Load(n),
        2 => Op::Pin(n),
        3 => Op::Unpin(n),
        _ => Op::Unload(n),
    });
    proptest::collection::vec(op, 1..60)
}

#[test]
fn loads_in_any_order_keep_the_budget_the_pins_and_everyones_factors() {
    for gpu in device::every_tier() {
        let twin = twin(&gpu);
        let adapters: Vec<Adapter> = [1, 3, 8, 9, 16, 24, 40].iter().zip(0..).map(|(r, s)| both(20 + s, *r)).collect();
        let sizes: Vec<u64> = adapters.iter().map(|a| size(&gpu, &twin, a)).collect();
        // Whichever is larger decides.
        let [gate_up, down]: [Vec<u64>; 2] = [&GATE_UP[..], &[Site::ExpertDown]]
            .map(|sites| adapters.iter().map(|a| site_bytes(&gpu, &twin, a, sites)).collect());
        let alone: Vec<Vec<u32>> = adapters
            .iter()
            .map(|a| {
                let mut pool = pool(&gpu, &twin, 4, None);
                pool.load(id(0), a).unwrap();
                bits(&gpu, &twin, &pool, &[0])
            })
            .collect();
        let config = ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() };
        // Room for the largest and one of the middle; the narrow binding forbids slack at a site.
        proptest!(config, |(ops in ops(), narrow in any::<bool>())| {
            let budget = sizes[6] + sizes[3];
            let own = gpu.capabilities().clone();
            let limit = if narrow { gate_up[6] + gate_up[1] } else { own.max_binding_bytes };
            // Only the pool is bound by it: the scratch of the tests is larger.
            let bound = gpu.with_capabilities(Capabilities { max_binding_bytes: limit, ..own });
            let mut pool = pool(&bound, &twin, 4, Some(budget));
            let mut pins: BTreeMap<u64, usize> = BTreeMap::new();
            for op in ops {
                let live: u64 = pins.keys().map(|n| sizes[*n as usize]).sum();
                match op {
                    Op::Load(n) | Op::Pin(n) => {
                        let was = pool.resident(id(n));
                        let with = |site: &[u64]| pins.keys().chain([&n]).map(|n| site[*n as usize]).sum::<u64>();
                        let largest = with(&gate_up).max(with(&down));
                        let fits = was.is_some() || pins.len() < 4
                            && live + sizes[n as usize] <= budget && largest <= limit;
                        let slot = match op {
                            Op::Load(_) => pool.load(id(n), &adapters[n as usize]).ok(),
                            _ => pool.pin(id(n), &adapters[n as usize]).unwrap(),
                        };
                        prop_assert_eq!(slot.is_some(), fits, "{:?} with {:?} pinned", op, pins);
                        prop_assert!(was.is_none() || was == slot);
                        if let (Op::Pin(_), Some(_)) = (op, slot) {
                            *pins.entry(n).or_default() += 1;
                        }
                    }
                    Op::Unpin(n) => {
                        if let Some(count) = pins.get_mut(&n) {
                            pool.unpin(pool.resident(id(n)).unwrap());
                            *count -= 1;
                        }
                        pins.retain(|_, count| *count > 0);
                    }
                    Op::Unload(n) => {
                        let gone = pool.resident(id(n)).is_some() && !pins.contains_key(&n);
                        prop_assert_eq!(pool.unload(id(n)), gone);
                    }
                }
                prop_assert!(pool.bytes() <= budget);
                prop_assert_eq!(pool.pinned_bytes(), pins.keys().map(|n| sizes[*n as usize]).sum::<u64>());
                prop_assert!(pins.keys().all(|n| pool.resident(id(*n)).is_some()));
            }
            for (n, alone) in alone.iter().enumerate() {
                if let Some(slot) = pool.resident(id(n as u64)) {
                    prop_assert_eq!(&bits(&gpu, &twin, &pool, &[slot as i32]), alone, "adapter {}", n);
                }
            }
        });
    }
}
