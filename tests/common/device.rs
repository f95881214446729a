//! Devices for tests. A machine without one fails the tests, unless `WGMOE_TEST_NO_DEVICE=skip` is set.

use wgmoe::{Gpu, GpuOptions};

/// The test device once for each tier it offers (`WGMOE_TEST_DEVICE` picks another than the first).
pub fn every_tier() -> Vec<Gpu> {
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
