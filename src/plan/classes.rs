//! One device of each class that [`Capabilities::new`] tells apart: by the built-in table kernel variants depend on nothing
//! else of a device, so what is checked for these is checked for every device.

use super::capabilities::Capabilities;
use super::matrix::{self, EDGES};
use crate::gpu::{GpuInfo, Tier};

/// Subgroup sizes: every fixed one that kernels treat as such, one that varies, and none known.
const SUBGROUP_SIZES: [(u32, u32); 8] = [(0, 0), (4, 4), (8, 8), (16, 16), (32, 32), (64, 64), (128, 128), (4, 128)];

/// What is decided on a device of each class on each tier, each decision once, lowest tier first. The limits are those
/// of WebGPU.
pub fn classes() -> Vec<Capabilities> {
    let mut all: Vec<Capabilities> = Vec::new();
    for tier in [Tier::Baseline, Tier::Subgroup, Tier::Matrix] {
        for software in [false, true] {
            for (sizes, edge) in SUBGROUP_SIZES.into_iter().flat_map(|sizes| EDGES.map(|(edge, _)| (sizes, edge))) {
                let (subgroups, matrices) = (sizes.0 >= 4, matrix::takes_subgroups(sizes.0, sizes.1));
                if tier >= Tier::Subgroup && !subgroups || tier >= Tier::Matrix && !matrices {
                    continue;
                }
                let device = device(sizes, software, edge);
                let decided =
                    Capabilities::new(&device, &wgpu::Limits::defaults(), wgpu::DownlevelFlags::compliant(), tier);
                all.extend(decided.ok().filter(|d| !all.contains(d)));
            }
        }
    }
    all
}

fn device(subgroup_sizes: (u32, u32), software: bool, edge: u32) -> GpuInfo {
    let limits = wgpu::Limits::defaults();
    GpuInfo {
        index: 0,
        name: format!("a device with subgroups of {} to {}", subgroup_sizes.0, subgroup_sizes.1),
        backend: String::new(),
        device_type: if software { "cpu" } else { "discrete" }.to_owned(),
        driver: String::new(),
        driver_info: String::new(),
        subgroup_sizes,
        tiers: Vec::new(),
        matrix_edge: Some(edge),
        max_binding_bytes: limits.max_storage_buffer_binding_size,
        max_buffer_bytes: limits.max_buffer_size,
        max_workgroup_bytes: limits.max_compute_workgroup_storage_size,
        max_invocations: limits.max_compute_invocations_per_workgroup,
        max_storage_buffers: limits.max_storage_buffers_per_shader_stage,
        shader_f16: false,
        software,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tuning::{FIELDS, Field, Tuning};

    #[test]
    fn no_threshold_makes_a_variant_that_is_not_listed() {
        // Of two fields in order the lower one stands first.
        let set = |tuning: Tuning, (field, value): (&Field, f64)| field.with(&tuning, value).unwrap();
        for class in classes() {
            let lowest = FIELDS.iter().map(|f| (f, if f.whole { 1.0 } else { 0.1 })).fold(class.tuning, set);
            let highest = FIELDS.iter().rev().map(|f| (f, 65_535.0)).fold(class.tuning, set);
            let listed = crate::kernels::variants::variants(&class);
            for tuning in [lowest, highest, Tuning { two_columns_from: 1, ..highest }] {
                let changed = Capabilities { tuning, ..class.clone() };
                let more = crate::kernels::variants::variants(&changed);
                assert!(more.iter().all(|variant| listed.contains(variant)), "{changed:?}");
            }
        }
    }

    #[test]
    fn every_size_of_subgroups_is_of_a_class() {
        let classes = classes();
        for min in [4, 8, 16, 32, 64, 128] {
            for max in [4, 8, 16, 32, 64, 128].into_iter().filter(|max| *max >= min) {
                for software in [false, true] {
                    for tier in [Tier::Baseline, Tier::Subgroup, Tier::Matrix] {
                        // More than WebGPU's limits changes how much is bound, not what is compiled.
                        let limits = wgpu::Limits {
                            max_compute_invocations_per_workgroup: 1024,
                            max_storage_buffer_binding_size: 1 << 31,
                            max_buffer_size: 1 << 34,
                            ..wgpu::Limits::defaults()
                        };
                        for (edge, _) in EDGES {
                            let got = Capabilities::new(
                                &device((min, max), software, edge),
                                &limits,
                                wgpu::DownlevelFlags::compliant(),
                                tier,
                            )
                            .unwrap();
                            let known = |class: &Capabilities| {
                                crate::kernels::variants::variants(class) == crate::kernels::variants::variants(&got)
                            };
                            assert!(classes.iter().any(known), "{min}..{max} software {software} {tier}: {got:?}");
                        }
                    }
                }
            }
        }
    }
}
