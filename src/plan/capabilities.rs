//! What the kernels may assume of a device, and the variants that follow from it.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{GpuInfo, Tier};
use crate::plan::matrix::{self, Cuts};
use crate::plan::tuning::{Tuning, TuningTable};

/// Decisions that depend on the device alone. The rest of the crate asks this instead of limits or features.
#[derive(Debug, Clone, PartialEq)]
pub struct Capabilities {
    /// The tier these decisions are for.
    pub tier: Tier,
    /// Largest storage binding in bytes, and so the largest buffer of weights, factors, cache or scratch.
    pub max_binding_bytes: u64,
    /// Subgroup operations may be used, with any size from 4.
    pub subgroup: bool,
    /// Invocations of the workgroups that reduce one row (norm, route, attention, sample).
    pub row_lanes: u32,
    /// Such a workgroup is exactly one subgroup, so it needs no barrier. Only where the size is fixed.
    pub one_subgroup: bool,
    /// Invocations of a matrix-product workgroup.
    pub gemm_lanes: u32,
    /// The lanes of a product lie along the rows of the weights, a subgroup a run of rows: where memory is read in cache
    /// lines. Else each lane has rows of its own: where every lane's load costs, as in software. Needs `one_subgroup`.
    pub along_depth: bool,
    /// Attention of single rows is cut along the context, a workgroup a key head: on hardware, where many workgroups and
    /// wide loads pay. In software a workgroup takes one query head without any barrier.
    pub split_attention: bool,
    /// Products of many rows run on cooperative matrices.
    pub matrix: bool,
    /// Rows, columns and depth of these matrices: 16, or 8 where a block of 16 x 16 is four of them. Without them it means nothing.
    pub edge: u32,
    /// Multiply-accumulates that one submission may hold (a desktop driver resets a device after about two seconds).
    pub macs_per_submission: u64,
    /// Where one way to do the same work becomes better than another: the entry of the tier.
    pub tuning: Tuning,
    /// How products on cooperative matrices are cut. Without them it means nothing.
    pub cuts: Arc<Cuts>,
}

/// Largest binding that is used, also where a device would take more: shaders count elements in u32, DX12 counts bytes in
/// 32 bits, and Metal is told sizes in 32 bits. No index into a binding under this overflows, whatever its elements.
const MAX_BINDING_BYTES: u64 = (1 << 31) - 4;
/// Invocations of a workgroup that every device must allow. No variant uses more, also where a device would.
const MIN_INVOCATIONS: u32 = 256;

impl Capabilities {
    /// Decides for one device, by the built-in [`TuningTable`].
    ///
    /// # Errors
    /// [`ErrorKind::Device`] naming the limit that is too small.
    pub fn new(info: &GpuInfo, limits: &wgpu::Limits, downlevel: wgpu::DownlevelFlags, tier: Tier) -> Result<Self> {
        for (name, got, need) in [
            ("max_storage_buffers_per_shader_stage", limits.max_storage_buffers_per_shader_stage, 8),
            ("max_compute_invocations_per_workgroup", limits.max_compute_invocations_per_workgroup, MIN_INVOCATIONS),
            ("max_compute_workgroup_storage_size", limits.max_compute_workgroup_storage_size, 16 << 10),
            ("max_compute_workgroups_per_dimension", limits.max_compute_workgroups_per_dimension, 65_535),
        ] {
            if got < need {
                return Err(Error::new(
                    ErrorKind::Device,
                    format!("device `{}`: {name} is {got}, expected {need} or more", info.name),
                ));
            }
        }
        if !downlevel.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS | wgpu::DownlevelFlags::INDIRECT_EXECUTION) {
            return Err(Error::new(
                ErrorKind::Device,
                format!("device `{}`: no compute shaders or no indirect dispatch", info.name),
            ));
        }
        // Every shader with adapters or f16 weights unpacks halves.
        if !downlevel.contains(wgpu::DownlevelFlags::SHADER_F16_IN_F32) {
            return Err(Error::new(ErrorKind::Device, format!("device `{}`: no unpack2x16float", info.name)));
        }
        let (min, max) = info.subgroup_sizes;
        let subgroup = tier >= Tier::Subgroup;
        let one_subgroup = subgroup && min == max && (4..=128).contains(&min);
        let matrix = tier >= Tier::Matrix && matrix::takes_subgroups(min, max);
        let edge = info.matrix_edge.filter(|_| matrix).unwrap_or(matrix::EDGE);
        let table = TuningTable::built_in()?;
        Ok(Self {
            tier,
            max_binding_bytes: limits
                .max_storage_buffer_binding_size
                .min(limits.max_buffer_size)
                .min(MAX_BINDING_BYTES),
            subgroup,
            row_lanes: if one_subgroup { min } else { 64 },
            one_subgroup,
            gemm_lanes: if info.software { 16 } else { 64 },
            split_attention: !info.software,
            along_depth: one_subgroup && !info.software && 4 * min <= MIN_INVOCATIONS,
            matrix,
            edge,
            macs_per_submission: if info.software { 100_000_000 } else { 200_000_000_000 },
            tuning: table.of(tier),
            cuts: Arc::new(table.cuts.of(edge).clone()),
        })
    }
}
