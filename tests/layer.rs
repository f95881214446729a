//! A mixture-of-experts layer on the device against the oracle, with mixed adapters and with experts held elsewhere.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/moe.rs"]
mod moe;

use common::{ROUTE_GAP, Rng, each_case, rel_err, tolerance};
use gpu_run::run_in;
use moe::{Batch, OnDevice, SHAPE, Twin, adapter, forward, pin, poisoned};
use wgmoe::adapter::Site;
use wgmoe::adapter::pool::AdapterPool;
use wgmoe::dtype::DType;
use wgmoe::placement::Placement;
use wgmoe::reference::MoeOutput;
use wgmoe::router::STATUS_SLOT;
use wgmoe::{Adapter, Gpu};

const EXPERT_SITES: [Site; 3] = [Site::ExpertGate, Site::ExpertUp, Site::ExpertDown];

/// Both are pairs, the second tiles where few experts are held, the third and fourth tiles of 4 and of 8, the last higher
/// ones on the matrix tier.
const TOKENS: [usize; 5] = [1, 5, 11, 40, 90];

/// Fused, per expert, and one that changes gate alone.
fn adapters() -> [Adapter; 3] {
    [
        adapter(71, 4, DType::F16, &EXPERT_SITES, true),
        adapter(72, 17, DType::Bf16, &EXPERT_SITES, false),
        adapter(73, 8, DType::F32, &[Site::ExpertGate], false),
    ]
}

fn loaded(gpu: &Gpu, twin: &Twin, adapters: &[Adapter]) -> AdapterPool {
    let mut pool = twin.pool(gpu, adapters.len());
    for (i, adapter) in adapters.iter().enumerate() {
        assert_eq!(pin(&mut pool, i as u64, adapter), Some(i));
    }
    pool
}

/// Tokens that go round `slots`.
fn batch(tokens: usize, slots: &[i32], residual: bool) -> Batch {
    let mut rng = Rng::new(81 + tokens as u64);
    Batch {
        x: rng.floats(tokens * SHAPE.hidden),
        mapping: (0..tokens).map(|t| slots[t % slots.len()]).collect(),
        residual: residual.then(|| rng.floats(tokens * SHAPE.hidden)),
    }
}

fn compare(gpu: &Gpu, (got, status): (Vec<f32>, u32), expected: &MoeOutput, batch: &Batch) -> Result<(), String> {
    assert!(expected.routed.gap.iter().all(|gap| *gap > ROUTE_GAP), "the seed gives a tie in the router");
    let mut sum = expected.out.clone();
    for (s, r) in sum.iter_mut().zip(batch.residual.iter().flatten()) {
        *s += r;
    }
    let off = rel_err(&got, &sum);
    if off > tolerance(gpu) {
        return Err(format!("off by {off}"));
    }
    if status != expected.status { Err(format!("status {status}, expected {}", expected.status)) } else { Ok(()) }
}

#[test]
fn a_layer_with_mixed_adapters_equals_the_oracle_wherever_its_experts_live() {
    let placements = [
        Placement::linear(8, 1, 0).unwrap(),
        Placement::linear(8, 2, 1).unwrap(),
        Placement::round_robin(8, 3, 2).unwrap(),
    ];
    let adapters = adapters();
    let held: Vec<Option<&Adapter>> = adapters.iter().map(Some).collect();
    let mut cases = Vec::new();
    for placement in &placements {
        for tokens in TOKENS {
            for slots in [vec![-1], vec![0, 1, -1, 2], vec![1, -1, 3, 0]] {
                cases.push((placement, tokens, slots));
            }
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |(placement, tokens, slots)| {
            for (dtype, residual) in [(DType::Bf16, true), (DType::F32, false)] {
                let twin = Twin::new(&gpu, dtype, (*placement).clone());
                let pool = loaded(&gpu, &twin, &adapters);
                let batch = batch(*tokens, slots, residual);
                let expected = twin.expected(&batch.x, &batch.mapping, &held);
                assert_eq!(expected.status != 0, batch.mapping.contains(&3));
                compare(&gpu, forward(&gpu, &twin.device, Some(&pool), &batch), &expected, &batch)?;
                if slots == &[-1] {
                    compare(&gpu, forward(&gpu, &twin.device, None, &batch), &expected, &batch)?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn partial_sums_of_all_ranks_add_up_to_the_whole_layer() {
    for gpu in device::every_variant() {
        let adapters = adapters();
        let held: Vec<Option<&Adapter>> = adapters.iter().map(Some).collect();
        let batch = batch(11, &[0, 1, -1, 2], false);
        let whole = Twin::new(&gpu, DType::F32, Placement::linear(8, 1, 0).unwrap());
        let expected = whole.expected(&batch.x, &batch.mapping, &held);
        let mut sum = vec![0.0; batch.x.len()];
        for rank in 0..3 {
            let twin = Twin::new(&gpu, DType::F32, Placement::round_robin(8, 3, rank).unwrap());
            let pool = loaded(&gpu, &twin, &adapters);
            let (part, _) = forward(&gpu, &twin.device, Some(&pool), &batch);
            sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
        }
        compare(&gpu, (sum, 0), &expected, &batch).unwrap();
    }
}

#[test]
fn an_adapter_of_the_router_changes_the_routing_of_its_tokens() {
    for gpu in device::every_variant() {
        for tokens in TOKENS {
            let mut twin = Twin::new(&gpu, DType::F32, Placement::linear(8, 1, 0).unwrap());
            let routing = adapter(74, 3, DType::F32, &[Site::Router], false);
            let pool = loaded(&gpu, &twin, std::slice::from_ref(&routing));
            let batch = batch(tokens, &[0], false);
            let base = twin.expected(&batch.x, &batch.mapping, &[None]);
            // The oracle's layer takes no router adapter: it gets the merged router, since all tokens share one.
            let factor = &routing.factors[0];
            let values = |m: &wgmoe::adapter::Matrix| m.dtype.decode(&m.bytes);
            let (a, b) = (values(&factor.a), values(&factor.b));
            for e in 0..SHAPE.experts {
                for i in 0..SHAPE.hidden {
                    let delta: f32 = (0..factor.rank).map(|r| b[e * factor.rank + r] * a[r * SHAPE.hidden + i]).sum();
                    twin.router[e * SHAPE.hidden + i] += factor.scale * delta;
                }
            }
            let expected = twin.expected(&batch.x, &batch.mapping, &[None]);
            assert!(tokens < 11 || expected.routed.ids != base.routed.ids, "the adapter moves no token");
            compare(&gpu, forward(&gpu, &twin.device, Some(&pool), &batch), &expected, &batch).unwrap();
        }
    }
}

#[test]
fn recordings_are_independent_until_one_submission_runs_them() {
    for gpu in device::every_variant() {
        let twin = Twin::new(&gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap());
        let adapters = adapters();
        let held: Vec<Option<&Adapter>> = adapters.iter().map(Some).collect();
        let pool = loaded(&gpu, &twin, &adapters);
        let batches = [batch(40, &[0, 1, -1], false), batch(5, &[2, 0], true), batch(11, &[3, 1], false)];
        let on_device: Vec<OnDevice> = batches.iter().map(|b| OnDevice::new(&gpu, b)).collect();
        let (mut first, mut second) = (poisoned(&gpu), poisoned(&gpu));
        run_in(&mut first, |rec, pass| {
            // Two layers in one recording share its scratch; another recording has its own.
            on_device[0].record(rec, pass, &twin.device, Some(&pool))?;
            on_device[1].record(&mut second, pass, &twin.device, Some(&pool))?;
            on_device[2].record(rec, pass, &twin.device, Some(&pool))?;
            second.flush();
            Ok(())
        });
        for (batch, on_device) in batches.iter().zip(&on_device) {
            let expected = twin.expected(&batch.x, &batch.mapping, &held);
            compare(&gpu, on_device.read(&gpu), &expected, batch).unwrap();
        }
        assert_eq!(on_device[2].read(&gpu).1, STATUS_SLOT);
    }
}
