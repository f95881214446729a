//! What an open device is asked because its back end does not tell.

use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernels::Recording;
use crate::kernels::matrix_probe::{MatrixProbe, WORDS, subgroup_size};

/// The size of a device's subgroups, where the matrix tier with matrices of `edge` runs on them: found with one dispatch. Blocks.
///
/// Errors: the device refuses the shader, or was lost.
pub(super) fn subgroups(gpu: &Gpu, edge: u32) -> Result<Option<u32>> {
    let mut rec = Recording::new(gpu);
    let out = rec.scratch("matrix probe", WORDS as u64 * 4)?;
    let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("asked") });
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    MatrixProbe { edge, out: &out }.record(&mut rec, &mut pass)?;
    drop(pass);
    rec.flush();
    gpu.queue().submit([encoder.finish()]);
    let bytes = gpu.read(&out.buffer, out.offset, WORDS as u64 * 4)?;
    Ok(subgroup_size(&bytemuck::pod_collect_to_vec(&bytes)))
}
