//! Devices for tests. A machine without one fails the tests, unless `WGMOE_TEST_NO_DEVICE=skip` is set.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::sync::OnceLock;

use wgmoe::plan::capabilities::Capabilities;
use wgmoe::{Gpu, GpuOptions};

/// The test device once for each tier it offers (`WGMOE_TEST_DEVICE` picks another than the first). Tests of a process
/// share them: NVIDIA's driver can hang when many threads make and destroy devices at once.
pub fn every_tier() -> Vec<Gpu> {
    static TIERS: OnceLock<Vec<Gpu>> = OnceLock::new();
    TIERS.get_or_init(open_every_tier).clone()
}

fn open_every_tier() -> Vec<Gpu> {
    let device = std::env::var("WGMOE_TEST_DEVICE").ok();
    let best = match Gpu::new(&GpuOptions { device: device.clone(), tier: None }) {
        Ok(gpu) => gpu,
        Err(e) if std::env::var("WGMOE_TEST_NO_DEVICE").is_ok_and(|v| v == "skip") => {
            eprintln!("SKIPPED, WGMOE_TEST_NO_DEVICE=skip: {e}");
            return Vec::new();
        }
        Err(e) => panic!("{e}"),
    };
    let tiers = best.info().tiers.clone();
    tiers.into_iter().map(|tier| Gpu::new(&GpuOptions { device: device.clone(), tier: Some(tier) }).unwrap()).collect()
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
