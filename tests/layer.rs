//! A mixture-of-experts layer on the device against the oracle, with mixed adapters and with experts held elsewhere.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/moe.rs"]
mod moe;

use common::{ROUTE_GAP, Rng, each_case, folds, rel_err, shrinks, tolerance};
use gpu_run::{replayed, run_in};
use moe::{Batch, OnDevice, SHAPE, Twin, adapter, adapter_of, biased, cut, forward, pin, poisoned};
use wgmoe::activation::Activation;
use wgmoe::adapter::Site;
use wgmoe::adapter::pool::AdapterPool;
use wgmoe::dtype::DType;
use wgmoe::placement::{ExpertShare, Placement, PlacementRule, Topology};
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::tuning::{FIELDS, Field, Tuning};
use wgmoe::reference::MoeOutput;
use wgmoe::router::STATUS_SLOT;
use wgmoe::shape::MoeShape;
use wgmoe::{Adapter, Gpu};

const EXPERT_SITES: [Site; 3] = [Site::ExpertGate, Site::ExpertUp, Site::ExpertDown];

/// Both are pairs, the second tiles where few experts are held, the third and fourth tiles of 4 and of 8, the last higher
/// ones on the matrix tier.
const TOKENS: [usize; 5] = [1, 5, 11, 40, 90];

/// Fused, per expert with biases, and one that changes gate alone.
fn adapters() -> [Adapter; 3] {
    [
        adapter(71, 4, DType::F16, &EXPERT_SITES, true),
        biased(75, DType::Bf16, adapter(72, 17, DType::Bf16, &EXPERT_SITES, false)),
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
    batch_of(SHAPE, tokens, slots, residual)
}

/// The same for a layer of any shape.
fn batch_of(shape: MoeShape, tokens: usize, slots: &[i32], residual: bool) -> Batch {
    let mut rng = Rng::new(81 + tokens as u64);
    Batch {
        x: rng.floats(tokens * shape.hidden),
        mapping: (0..tokens).map(|t| slots[t % slots.len()]).collect(),
        residual: residual.then(|| rng.floats(tokens * shape.hidden)),
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
            for slots in [vec![-1], vec![0, 1, -1, 2], vec![1, -1, 3, 0], vec![0, -1, 2]] {
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
fn few_pairs_shrink_beside_other_work_where_both_sites_have_adapters() {
    let of = |sites: &[Site]| adapter(71, 4, DType::F16, sites, false);
    let [gate, up, down] = EXPERT_SITES;
    // Adapters of a layer, and the stages after the router: of pairs one by one, and in tiles. Where a product comes first, it chooses.
    let plain = ["pair_gemm", "down_combine"].as_slice();
    let both = ["pair_gemm_shrink", "pair_expand_shrink", "down_combine"].as_slice();
    let first = ["route", "pair_shrink", "pair_gemm", "down_combine"].as_slice();
    let second = ["route", "pair_gemm", "pair_shrink", "down_combine"].as_slice();
    let tiles = ["route", "align_few", "pair_gemm_shrink", "pair_expand_shrink", "pair_gemm", "combine"].as_slice();
    let cases = [
        (None, 1, plain),
        (Some(of(&[gate, up, down])), 1, both),
        (Some(of(&[gate, down])), 1, both),
        (Some(of(&[gate, up])), 1, first),
        (Some(of(&[down])), 1, second),
        (Some(of(&[gate, up, down])), 5, tiles),
    ];
    for gpu in device::every_along_depth() {
        let twin = Twin::new(&gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap());
        for (adapter, tokens, stages) in &cases {
            let adapters: Vec<Adapter> = adapter.iter().cloned().collect();
            let held: Vec<Option<&Adapter>> = adapters.iter().map(Some).collect();
            let pool = loaded(&gpu, &twin, &adapters);
            let pool = adapter.is_some().then_some(&pool);
            let batch = batch(*tokens, &[if pool.is_some() { 0 } else { -1 }], true);
            let on_device = OnDevice::new(&gpu, &batch);
            let mut rec = poisoned(&gpu);
            rec.labels();
            run_in(&mut rec, |rec, pass| on_device.record(rec, pass, &twin.device, pool));
            let labels = rec.labels();
            let stems: Vec<&str> = labels.iter().filter_map(|label| label.split('[').next()).collect();
            assert!(stems.ends_with(stages) && stems.len() == stages.len() + 1, "{stems:?}");
            let expected = twin.expected(&batch.x, &batch.mapping, &held);
            compare(&gpu, on_device.read(&gpu), &expected, &batch).unwrap();
        }
    }
}

#[test]
fn gate_and_up_may_alternate() {
    let adapters = adapters();
    let held: Vec<Option<&Adapter>> = adapters.iter().map(Some).collect();
    let cases: Vec<(usize, Vec<i32>)> =
        TOKENS.into_iter().flat_map(|tokens| [(tokens, vec![0, 1, -1, 2]), (tokens, vec![0, -1, 2])]).collect();
    for gpu in device::every_variant() {
        each_case(&cases, |(tokens, slots)| {
            let mut twin = Twin::new(&gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap());
            twin.device.activation = Activation::SwigluClamped { alpha: 1.702, limit: 7.0 };
            let pool = loaded(&gpu, &twin, &adapters);
            let batch = batch(*tokens, slots, false);
            let expected = twin.expected(&batch.x, &batch.mapping, &held);
            compare(&gpu, forward(&gpu, &twin.device, Some(&pool), &batch), &expected, &batch)
        });
    }
}

#[test]
fn a_layer_equals_the_oracle_whatever_its_thresholds_are() {
    let adapters = adapters();
    let held: Vec<Option<&Adapter>> = adapters.iter().map(Some).collect();
    // Of two fields in order the lower one stands first.
    let set = |tuning: Tuning, (field, value): (&Field, f64)| field.with(&tuning, value).unwrap();
    for gpu in device::every_variant() {
        let caps = gpu.capabilities();
        let lowest = FIELDS.iter().map(|f| (f, if f.whole { 1.0 } else { 0.1 })).fold(caps.tuning, set);
        let highest = FIELDS.iter().rev().map(|f| (f, 65_535.0)).fold(caps.tuning, set);
        let tiles_of_4 = Tuning { tiles_from: 0.1, single_pairs_per_expert: 0.1, ..highest };
        let cases: Vec<(Tuning, usize)> = [lowest, highest, tiles_of_4]
            .into_iter()
            .flat_map(|tuning| TOKENS.map(|tokens| (tuning, tokens)))
            .collect();
        each_case(&cases, |(tuning, tokens)| {
            let gpu = gpu.with_capabilities(Capabilities { tuning: *tuning, ..caps.clone() });
            let twin = Twin::new(&gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap());
            let pool = loaded(&gpu, &twin, &adapters);
            let batch = batch(*tokens, &[0, 1, -1, 2], true);
            let expected = twin.expected(&batch.x, &batch.mapping, &held);
            compare(&gpu, forward(&gpu, &twin.device, Some(&pool), &batch), &expected, &batch)
        });
    }
}

/// Wide enough for products on cooperative matrices to add adapters.
const WIDE: MoeShape = MoeShape { experts: 4, top_k: 2, hidden: 128, expert_width: 64 };

/// Tokens with more pairs an expert of [`WIDE`] than any tile through workgroup memory holds.
const MANY: usize = 300;

#[test]
fn a_wide_layer_with_adapters_inside_its_products_equals_the_oracle() {
    let of = |seed, rank, dtype, sites: &[Site], fused| adapter_of(WIDE, seed, rank, dtype, sites, fused);
    let adapters = [
        of(71, 4, DType::F16, &EXPERT_SITES, true),
        of(72, 17, DType::Bf16, &EXPERT_SITES, false),
        of(73, 8, DType::F32, &[Site::ExpertGate], false),
        biased(75, DType::Bf16, of(74, 16, DType::Bf16, &EXPERT_SITES, false)),
    ];
    let held: Vec<Option<&Adapter>> = adapters.iter().map(Some).collect();
    // Slots, and whether the products of gate and up and of down add what is in them: both; the first, whose rows are
    // long enough for three times 32 ranks; none, since there is a bias.
    let mixes: [(&[i32], [bool; 2]); 8] = [
        (&[0, -1, 1], [true, true]),
        (&[1, -1, 4, 0], [true, true]),
        (&[2, -1], [true, true]),
        (&[0], [true, true]),
        // Every token has one: so many that the shrink leaves x for the product, also where the up half has no factor.
        (&[0, 1], [true, true]),
        (&[2], [true, true]),
        (&[0, 1, -1, 2], [true, false]),
        (&[0, 3, -1], [false, false]),
    ];
    let silu = Activation::Silu;
    let clamped = Activation::SwigluClamped { alpha: 1.702, limit: 7.0 };
    let mut cases = Vec::new();
    // Tiles of 16, 32 and 80 pairs on the matrix tier, and there alone the direct ones.
    for tokens in [12, 40, 90, MANY] {
        for mix in mixes {
            for (dtype, activation) in [(DType::Bf16, silu), (DType::F16, clamped)] {
                cases.push((tokens, mix, dtype, activation));
            }
        }
    }
    for gpu in device::every_variant() {
        let own = gpu.capabilities();
        // Elsewhere both are the same.
        let ways: &[bool] = if own.matrix && own.along_depth { &[false, true] } else { &[false] };
        for apart in ways {
            let apart_pairs = if *apart { 65_535.0 } else { 0.1 };
            // The router on matrices, and not.
            let exact_matrix_rows = if *apart { 9 } else { 65_536 };
            let tuning = Tuning { apart_pairs, matrix_workgroups: 1, exact_matrix_rows, ..own.tuning };
            let gpu = gpu.with_capabilities(Capabilities { tuning, ..own.clone() });
            let cases: Vec<_> = cases.iter().filter(|case| own.matrix || case.0 < MANY).collect();
            each_case(&cases, |(tokens, (slots, folded), dtype, activation)| {
                let share = ExpertShare::whole(WIDE.experts, WIDE.expert_width).unwrap();
                let mut twin = Twin::of(&gpu, *dtype, WIDE, share);
                twin.device.activation = *activation;
                let pool = loaded(&gpu, &twin, &adapters);
                let batch = batch_of(WIDE, *tokens, slots, tokens % 4 == 0);
                let on_device = OnDevice::new(&gpu, &batch);
                let mut rec = poisoned(&gpu);
                rec.labels();
                run_in(&mut rec, |rec, pass| on_device.record(rec, pass, &twin.device, Some(&pool)));
                let labels = rec.labels();
                if own.matrix {
                    // Pairs are sorted for both products where one of them needs it.
                    let one_by_one = *apart && *folded == [true, true];
                    let shrink = if one_by_one { "pair_shrink_packed" } else { "lora_shrink_matrix" };
                    let has = |word: &str| labels.iter().any(|label| label.contains(word));
                    // Of half as many pairs again as a tile holds for each adapter and expert, 64 are shrunk at a time.
                    let used = slots.iter().filter(|slot| (0..held.len() as i32).contains(slot)).count();
                    let high = *tokens * WIDE.top_k >= 24 * used * WIDE.experts;
                    if has("expert_gemm_direct[") != (*tokens == MANY)
                        || has(" tall ") != (high && !one_by_one && *folded == [true, true])
                    {
                        return Err(format!("{tokens} tokens, {folded:?}: {labels:?}"));
                    }
                    if folds(&labels) != folded || shrinks(&labels) != [shrink; 2] {
                        return Err(format!("not {folded:?} with {shrink}: {labels:?}"));
                    }
                }
                let expected = twin.expected(&batch.x, &batch.mapping, &held);
                compare(&gpu, on_device.read(&gpu), &expected, &batch)
            });
        }
    }
}

/// E not divisible by most ranks; F smaller than eight ranks, so that some hold no column, and E too.
const UNEVEN: MoeShape = MoeShape { experts: 5, top_k: 2, hidden: 24, expert_width: 6 };

/// Expert e lives in group e mod `ep`, and every third one in the next group as well.
fn replicas(experts: usize, ep: usize) -> PlacementRule {
    let owners = |e: usize| if e.is_multiple_of(3) && ep > 1 { vec![e % ep, (e + 1) % ep] } else { vec![e % ep] };
    PlacementRule::Table((0..experts).map(owners).collect())
}

#[test]
fn partial_sums_of_all_ranks_add_up_to_the_whole_layer() {
    let mut cases = Vec::new();
    for shape in [SHAPE, UNEVEN] {
        for tp in [1, 2, 3, 4, 8] {
            for ep in (1..=tp).filter(|ep| tp % ep == 0) {
                for rule in [PlacementRule::Linear, PlacementRule::RoundRobin, replicas(shape.experts, ep)] {
                    cases.push((shape, tp, ep, rule));
                }
            }
        }
    }
    for gpu in device::every_tier() {
        for dtype in [DType::F32, DType::Bf16] {
            for shape in [SHAPE, UNEVEN] {
                // Fused, per expert with biases, gate alone, down alone with biases.
                let of = |seed, rank, dtype, sites: &[Site], fused| adapter_of(shape, seed, rank, dtype, sites, fused);
                let adapters = [
                    of(71, 4, DType::F16, &EXPERT_SITES, true),
                    biased(75, DType::F32, of(72, 16, DType::Bf16, &EXPERT_SITES, false)),
                    of(73, 8, DType::F32, &[Site::ExpertGate, Site::Router], false),
                    biased(76, DType::F32, of(74, 3, DType::F32, &[Site::ExpertDown], false)),
                ];
                let batch = batch(11, &[0, 1, -1, 2, 3], false);
                let one = ExpertShare::whole(shape.experts, shape.expert_width).unwrap();
                let twin = Twin::of(&gpu, dtype, shape, one);
                let (whole, _) = forward(&gpu, &twin.device, Some(&loaded(&gpu, &twin, &adapters)), &batch);
                let of_shape: Vec<_> = cases.iter().filter(|(s, ..)| *s == shape).collect();
                each_case(&of_shape, |(_, tp, ep, rule)| {
                    let mut sum = vec![0.0; whole.len()];
                    for rank in 0..*tp {
                        let topology = Topology::new(Some(*tp), Some(*ep), rank).unwrap();
                        let share = ExpertShare::new(rule, topology, shape.experts, shape.expert_width).unwrap();
                        // Every second rank cuts its adapters while it reads them, the others in the pool.
                        let read: Vec<Adapter> = adapters
                            .iter()
                            .map(|a| if rank % 2 == 0 { a.clone() } else { cut(shape, a, &share) })
                            .collect();
                        let twin = Twin::of(&gpu, dtype, shape, share);
                        let (part, status) = forward(&gpu, &twin.device, Some(&loaded(&gpu, &twin, &read)), &batch);
                        if status != 0 {
                            return Err(format!("rank {rank}: status {status}"));
                        }
                        if twin.share.experts() == 0 && part.iter().any(|v| *v != 0.0) {
                            return Err(format!("rank {rank} holds nothing, but adds something"));
                        }
                        sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
                    }
                    let off = rel_err(&sum, &whole);
                    if off > tolerance(&gpu) { Err(format!("off by {off}")) } else { Ok(()) }
                });
            }
        }
    }
}

#[test]
fn a_rank_without_experts_or_columns_adds_nothing() {
    let without_experts = Topology::new(Some(8), Some(8), 7).unwrap();
    let without_columns = Topology::new(Some(8), Some(1), 7).unwrap();
    for gpu in device::every_variant() {
        for topology in [without_experts, without_columns] {
            let share =
                ExpertShare::new(&PlacementRule::Linear, topology, UNEVEN.experts, UNEVEN.expert_width).unwrap();
            assert_eq!(share.experts(), 0);
            let twin = Twin::of(&gpu, DType::Bf16, UNEVEN, share);
            let adapters = [adapter_of(UNEVEN, 71, 4, DType::F16, &EXPERT_SITES, true)];
            let pool = loaded(&gpu, &twin, &adapters);
            for tokens in TOKENS {
                let added = batch(tokens, &[0, -1], true);
                let (out, status) = forward(&gpu, &twin.device, Some(&pool), &added);
                assert_eq!((Some(out), status), (added.residual, 0), "the residual is left alone");
                let written = batch(tokens, &[0, -1], false);
                let (out, _) = forward(&gpu, &twin.device, None, &written);
                assert!(out.iter().all(|v| *v == 0.0), "{tokens} tokens: {out:?}");
            }
        }
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

#[test]
#[ignore = "repeats MSL on the CPU: portability/steps/msl-run.sh"]
fn a_layer_on_matrices_of_8_equals_the_oracle() {
    // From 64 tokens on the router runs on matrices, and shares what is packed with the experts.
    let gpu = replayed::device(|tuning| Tuning { exact_matrix_rows: 64, ..tuning });
    let adapters = adapters();
    let held: Vec<Option<&Adapter>> = adapters.iter().map(Some).collect();
    let cases =
        [(5, vec![0, 1, -1, 2]), (40, vec![0, 1, -1, 2]), (90, vec![0, -1, 2]), (200, vec![0, -1]), (450, vec![2, 0])];
    each_case(&cases, |(tokens, slots)| {
        let twin = Twin::new(&gpu, DType::Bf16, Placement::linear(8, 1, 0).unwrap());
        let pool = loaded(&gpu, &twin, &adapters);
        let batch = batch(*tokens, slots, true);
        let expected = twin.expected(&batch.x, &batch.mapping, &held);
        compare(&gpu, forward(&gpu, &twin.device, Some(&pool), &batch), &expected, &batch)
    });
}
