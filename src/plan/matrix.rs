//! The matrix tier: what a device needs for it, how its products are cut, which cut one takes, and which values lie in its range.

mod bound;
mod cut;
mod cuts;
mod range;

pub use bound::*;
pub use cut::*;
pub use cuts::*;
pub use range::*;

/// Rows, columns and depth of the blocks that the shaders are written for: f16 operands, f32 sums. A device whose cooperative
/// matrices are smaller multiplies several for each block ([`Capabilities::edge`](crate::plan::capabilities::Capabilities::edge)).
pub const EDGE: u32 = 16;

/// Edges of the cooperative matrices that a block can be made of, the better first, and the workgroup memory that the largest
/// cut of a device with them needs, in bytes: devices whose matrices are small have less of it.
pub const EDGES: [(u32, u32); 2] = [(EDGE, WORKGROUP_BYTES), (8, 32 << 10)];

/// Subgroup sizes that cuts are made for.
const WIDTHS: [u32; 1] = [32];

/// Workgroup memory that the largest product on matrices of [`EDGE`] needs, in bytes.
pub const WORKGROUP_BYTES: u32 = 48 << 10;

/// Features that a device of this tier has beside subgroups.
pub const FEATURES: wgpu::Features = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::SUBGROUP_BARRIER);

/// Whether lanes can be laid out: by the size of a subgroup, which is fixed.
pub fn takes_subgroups(min: u32, max: u32) -> bool {
    min == max && WIDTHS.contains(&min)
}

/// Whether the back end does not tell the size of subgroups: wgpu 30 says of every Metal device that it is between 4 and 64,
/// which is so of no device. Such a device is asked once it is open ([`MatrixProbe`](crate::kernels::matrix_probe)).
pub fn asks_subgroups(backend: wgpu::Backend) -> bool {
    backend == wgpu::Backend::Metal
}

/// Whether an adapter can run this tier, and with matrices of which edge: f16, subgroups of one size or of one to be asked for,
/// and matrices with our types in its list.
pub fn offered(
    info: &wgpu::AdapterInfo,
    features: &wgpu::Features,
    limits: &wgpu::Limits,
    listed: &[wgpu::CooperativeMatrixProperties],
) -> Option<u32> {
    use wgpu::CooperativeScalarType::{F16, F32};
    let subgroups = takes_subgroups(info.subgroup_min_size, info.subgroup_max_size) || asks_subgroups(info.backend);
    if !features.contains(FEATURES) || !subgroups {
        return None;
    }
    // WGSL has square matrices only.
    let lists = |edge: u32| {
        let ours = |m: &wgpu::CooperativeMatrixProperties| {
            [m.m_size, m.n_size, m.k_size] == [edge; 3] && m.ab_type == F16 && m.cr_type == F32
        };
        listed.iter().any(ours)
    };
    let fits = |bytes: u32| limits.max_compute_workgroup_storage_size >= bytes;
    EDGES
        .into_iter()
        .find(|(edge, bytes)| takes_edge(info.backend, *edge) && lists(*edge) && fits(*bytes))
        .map(|(edge, _)| edge)
}

/// Whether the back end takes the shaders for matrices of this edge. Those of 8 have structs in workgroup memory, for Metal's sake, to
/// which naga 30 gives a layout that Vulkan forbids there.
pub fn takes_edge(backend: wgpu::Backend, edge: u32) -> bool {
    (edge == EDGE) != (backend == wgpu::Backend::Metal)
}

/// Workgroup memory that the largest cut for matrices of this edge needs, in bytes.
pub fn workgroup_bytes(edge: u32) -> u32 {
    EDGES.into_iter().find(|of| of.0 == edge).map_or(WORKGROUP_BYTES, |of| of.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_tier_by_its_own_list() {
        use wgpu::{Backend, CooperativeScalarType::F16, CooperativeScalarType::F32};
        let listed = |edge: u32, cr_type| wgpu::CooperativeMatrixProperties {
            m_size: edge,
            n_size: edge,
            k_size: edge,
            ab_type: F16,
            cr_type,
            saturating_accumulation: false,
        };
        let offered = |backend, (subgroup_min_size, subgroup_max_size), bytes, list: &[(u32, _)]| {
            let info = wgpu::AdapterInfo {
                subgroup_min_size,
                subgroup_max_size,
                ..wgpu::AdapterInfo::new(wgpu::DeviceType::DiscreteGpu, backend)
            };
            let limits = wgpu::Limits { max_compute_workgroup_storage_size: bytes, ..wgpu::Limits::defaults() };
            let list: Vec<_> = list.iter().map(|(edge, sums)| listed(*edge, *sums)).collect();
            super::offered(&info, &FEATURES, &limits, &list)
        };
        let fixed = |bytes, list: &[(u32, _)]| offered(Backend::Vulkan, (32, 32), bytes, list);
        assert_eq!(fixed(48 << 10, &[(16, F32), (8, F32)]), Some(16));
        assert_eq!(fixed(32 << 10, &[(16, F32)]), None, "the cuts for 16 do not fit");
        assert_eq!(fixed(48 << 10, &[(8, F32)]), None, "Vulkan does not take the shaders for 8");
        let metal = |bytes, list: &[(u32, _)]| offered(Backend::Metal, (4, 64), bytes, list);
        assert_eq!(metal(32 << 10, &[(8, F16), (8, F32)]), Some(8));
        assert_eq!(metal(48 << 10, &[(16, F32)]), None, "there is no such matrix in Metal");
        assert_eq!(metal(16 << 10, &[(8, F32)]), None);
        assert_eq!(fixed(48 << 10, &[(16, F16), (8, F16)]), None, "sums of f16");
        assert_eq!(offered(Backend::Vulkan, (32, 64), 64 << 10, &[(16, F32)]), None);
        assert_eq!(offered(Backend::Metal, (4, 64), 32 << 10, &[(8, F32)]), Some(8), "it will be asked");
        assert_eq!(offered(Backend::Metal, (4, 64), 32 << 10, &[]), None);
    }
}
