//! Devices for tests. A machine without one fails the tests, unless `WGMOE_TEST_NO_DEVICE=skip` is set. The environment
//! makes one machine stand for others:
//! - `WGMOE_TEST_DEVICE` picks another device than the first (`WGPU_BACKEND` another back end);
//! - `WGMOE_TEST_LIMITS=webgpu` opens it with WebGPU's default limits and no feature, as a browser does;
//! - `WGMOE_TEST_BINDING_BYTES` lowers the binding limit that the plan sees, so that more is cut;
//! - `RUST_LOG=wgmoe::kernels::linker=debug` tells what was compiled, for which tier of which device.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::sync::OnceLock;

use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::tuning::TuningTable;
use wgmoe::{Gpu, GpuOptions};

/// The test device once for each tier it offers. Tests of a process share them: NVIDIA's driver can hang when many
/// threads make and destroy devices at once.
pub fn every_tier() -> Vec<Gpu> {
    static TIERS: OnceLock<Vec<Gpu>> = OnceLock::new();
    TIERS.get_or_init(|| open_every_tier().into_iter().map(capped).collect()).clone()
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

fn open_every_tier() -> Vec<Gpu> {
    if variable("RUST_LOG").is_some() {
        // Another test of the process may have been first.
        let _ = env_logger::try_init();
    }
    let device = variable("WGMOE_TEST_DEVICE");
    let best = match Gpu::new(&GpuOptions { device: device.clone(), tier: None }) {
        Ok(gpu) => gpu,
        Err(e) if variable("WGMOE_TEST_NO_DEVICE").is_some_and(|v| v == "skip") => {
            eprintln!("SKIPPED, WGMOE_TEST_NO_DEVICE=skip: {e}");
            return Vec::new();
        }
        Err(e) => panic!("{e}"),
    };
    match variable("WGMOE_TEST_LIMITS").as_deref() {
        Some("webgpu") => return vec![with_webgpu_limits(best.info().index)],
        Some(other) => panic!("WGMOE_TEST_LIMITS: expected `webgpu`, got `{other}`"),
        None => {}
    }
    let tiers = best.info().tiers.clone();
    tiers.into_iter().map(|tier| Gpu::new(&GpuOptions { device: device.clone(), tier: Some(tier) }).unwrap()).collect()
}

/// Heights of the tiles in which the matrix tier takes pairs: those of the crate's cuts, alike for matrices of every edge.
pub fn matrix_heights() -> Vec<usize> {
    let table = TuningTable::built_in().unwrap();
    let [heights, others] =
        [&table.cuts.of_16, &table.cuts.of_8].map(|cuts| cuts.experts.iter().map(|cut| cut.height as usize));
    let heights: Vec<usize> = heights.collect();
    assert!(heights.iter().copied().eq(others), "the tests take one list of heights");
    heights
}

/// A device as a page in a browser gets it when it asks for nothing.
pub fn with_webgpu_limits(index: usize) -> Gpu {
    let adapter = Gpu::adapter(index).unwrap();
    let desc = wgpu::DeviceDescriptor { required_limits: wgpu::Limits::defaults(), ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&desc)).unwrap();
    Gpu::from_wgpu(&adapter, device, queue, None).unwrap()
}

fn capped(gpu: Gpu) -> Gpu {
    let Some(text) = variable("WGMOE_TEST_BINDING_BYTES") else { return gpu };
    let bytes = text.parse().unwrap_or_else(|_| panic!("WGMOE_TEST_BINDING_BYTES: expected bytes, got `{text}`"));
    let own = gpu.capabilities().clone();
    let max_binding_bytes = own.max_binding_bytes.min(bytes);
    gpu.with_capabilities(Capabilities { max_binding_bytes, ..own })
}

/// Every tier, and on each also the variants of a device with wide products and without a fixed subgroup size, and
/// products whose lanes lie the other way.
pub fn every_variant() -> Vec<Gpu> {
    let mut all = every_tier();
    for i in 0..all.len() {
        let own = all[i].capabilities().clone();
        let wide = if own.gemm_lanes == 64 { 16 } else { 64 };
        all.push(all[i].with_capabilities(Capabilities {
            row_lanes: 64,
            one_subgroup: false,
            matrix: false,
            along_depth: false,
            gemm_lanes: wide,
            ..own.clone()
        }));
        if own.one_subgroup {
            all.push(all[i].with_capabilities(Capabilities { along_depth: !own.along_depth, ..own.clone() }));
        }
    }
    all
}

/// The devices whose lanes can lie along the depth, with products that do.
pub fn every_along_depth() -> Vec<Gpu> {
    every_variant().into_iter().filter(|gpu| gpu.capabilities().along_depth).collect()
}

/// Every tier, and the devices of [`every_along_depth`] that are none of them: all that take a step of few rows their own way.
pub fn every_way_to_decode() -> Vec<Gpu> {
    let mut all = every_tier();
    let known: Vec<Capabilities> = all.iter().map(|gpu| gpu.capabilities().clone()).collect();
    all.extend(every_along_depth().into_iter().filter(|gpu| !known.contains(gpu.capabilities())));
    all
}
