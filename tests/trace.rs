//! A layer with two adapters, dispatch by dispatch: every shader, buffer and grid, and what the oracle expects. Another
//! program can repeat it on what it takes for a GPU. With `WGMOE_TRACE=FILE` the trace is written there as JSON:
//! `examples/web` runs it in a browser, `portability/msl` on CPU threads.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/moe.rs"]
mod moe;

use std::collections::BTreeMap;

use common::{Rng, TOL_F32, rel_err};
use gpu_run::traced::Buffers;
use moe::{Batch, OnDevice, SHAPE, Twin, adapter, pin, poisoned};
use serde_json::{Value, json};
use wgmoe::adapter::Site;
use wgmoe::dtype::DType;
use wgmoe::placement::Placement;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::{Adapter, Gpu, Tier};

/// Tokens that are taken pair by pair, in tiles of four and in tiles of eight.
const TOKENS: [usize; 3] = [1, 11, 40];

/// As on a GPU whose subgroups have no fixed size, which is what Metal and browsers say of theirs.
fn as_anywhere(gpu: &Gpu) -> Gpu {
    let own = gpu.capabilities().clone();
    gpu.with_capabilities(Capabilities {
        row_lanes: 64,
        one_subgroup: false,
        gemm_lanes: 64,
        along_depth: false,
        matrix: false,
        ..own
    })
}

fn traced(gpu: &Gpu, tokens: usize, placement: &Placement, shaders: &mut BTreeMap<String, String>) -> Value {
    let twin = Twin::new(gpu, DType::Bf16, placement.clone());
    let sites = [Site::ExpertGate, Site::ExpertUp, Site::ExpertDown];
    let adapters = [adapter(91, 4, DType::F16, &sites, true), adapter(92, 17, DType::F32, &sites, false)];
    let mut pool = twin.pool(gpu, adapters.len());
    for (i, adapter) in adapters.iter().enumerate() {
        assert_eq!(pin(&mut pool, i as u64, adapter), Some(i));
    }
    let mut rng = Rng::new(93 + tokens as u64);
    let batch = Batch {
        x: rng.floats(tokens * SHAPE.hidden),
        mapping: (0..tokens as i32).map(|t| [0, 1, -1][t as usize % 3]).collect(),
        residual: Some(rng.floats(tokens * SHAPE.hidden)),
    };
    let held: Vec<Option<&Adapter>> = adapters.iter().map(Some).collect();
    let oracle = twin.expected(&batch.x, &batch.mapping, &held);
    let expected: Vec<f32> = oracle.out.iter().zip(batch.residual.iter().flatten()).map(|(o, r)| o + r).collect();

    let on_device = OnDevice::new(gpu, &batch);
    let mut rec = poisoned(gpu);
    rec.trace();
    let mut buffers = Buffers::default();
    // What the buffers hold is read after recording and before the work is submitted.
    let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    on_device.record(&mut rec, &mut pass, &twin.device, Some(&pool)).unwrap();
    drop(pass);
    rec.flush();
    let trace = rec.trace();
    let dispatches: Vec<Value> = trace.iter().map(|t| buffers.dispatch(t)).collect();
    let [out, status] = on_device.results().map(|view| buffers.number(&view.buffer, view.offset + view.size));
    let contents = buffers.contents(gpu);
    gpu.queue().submit([encoder.finish()]);
    let (got, got_status) = on_device.read(gpu);
    assert!(rel_err(&got, &expected) <= TOL_F32, "{} {tokens} tokens", gpu.tier());
    assert_eq!(got_status, oracle.status);

    shaders.extend(trace.into_iter().map(|t| (t.label, t.wgsl)));
    json!({
        "tier": gpu.tier(),
        "tokens": tokens,
        "hidden": SHAPE.hidden,
        "experts": placement.owned().len(),
        "adapters": batch.mapping,
        "topk_ids": oracle.routed.ids,
        "buffers": contents,
        "dispatches": dispatches,
        "out": out,
        "status": status,
        "expected": expected,
        "expected_status": oracle.status,
        "tolerance": TOL_F32,
    })
}

#[test]
fn a_traced_layer_holds_all_that_is_needed_to_repeat_it() {
    let copies = [vec![0], vec![0, 1], vec![1], vec![1, 0], vec![0], vec![1], vec![0], vec![0, 1]];
    let placements = [
        Placement::linear(8, 1, 0).unwrap(),
        Placement::linear(8, 2, 1).unwrap(),
        Placement::table(&copies, 2, 1).unwrap(),
    ];
    let (mut shaders, mut cases) = (BTreeMap::new(), Vec::new());
    // Browsers have no matrices; those of 8 x 8 are repeated on CPU threads by tests of their own (`tests/common/replayed.rs`).
    for gpu in device::every_tier().iter().filter(|gpu| gpu.tier() < Tier::Matrix).map(as_anywhere) {
        for tokens in TOKENS {
            for placement in &placements {
                cases.push(traced(&gpu, tokens, placement, &mut shaders));
            }
        }
    }
    for stage in ["route", "localise", "localise_copies", "remap", "align_few", "lora_expand", "combine"] {
        assert!(shaders.keys().any(|label| label.starts_with(stage)), "no {stage}");
    }
    if let Some(path) = std::env::var_os("WGMOE_TRACE") {
        let trace = json!({ "shaders": shaders, "cases": cases });
        std::fs::write(path, serde_json::to_vec(&trace).unwrap()).unwrap();
    }
}
