//! Slices to the device, stages recorded in one pass, outputs back with a check that nothing was written past them.
#![allow(dead_code, reason = "each test binary uses a part of it")]

#[path = "posing.rs"]
pub mod posing;
#[path = "replayed.rs"]
pub mod replayed;
#[path = "traced.rs"]
pub mod traced;

use bytemuck::Pod;
use wgmoe::Gpu;
use wgmoe::dtype::DType;
use wgmoe::kernels::operands::Weights;
use wgmoe::kernels::{Recording, View};
use wgmoe::plan::matrix::Measured;
use wgmoe::plan::pieces::cut;

/// Elements behind every output that no kernel may touch.
const GUARD: usize = 64;

/// A slice as a storage buffer.
pub fn upload<T: Pod>(gpu: &Gpu, values: &[T]) -> View {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let buffer = gpu.buffer("test input", bytes.len() as u64, wgpu::BufferUsages::empty()).unwrap();
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(4), 0);
    gpu.queue().write_buffer(&buffer, 0, &padded);
    View::whole(&buffer)
}

/// An output: its initial values, and a guard of the same fill behind them.
pub struct Output<T> {
    pub view: View,
    n: usize,
    fill: T,
}

impl<T: Pod> Output<T> {
    /// `n` elements of `fill`.
    pub fn new(gpu: &Gpu, n: usize, fill: T) -> Self {
        Self { view: upload(gpu, &vec![fill; n + GUARD]), n, fill }
    }

    /// An output that is added to: `values`, and a guard of `fill`.
    pub fn of(gpu: &Gpu, values: &[T], fill: T) -> Self {
        let mut all = values.to_vec();
        all.resize(values.len() + GUARD, fill);
        Self { view: upload(gpu, &all), n: values.len(), fill }
    }

    /// The values, once the work has been submitted.
    pub fn read(&self, gpu: &Gpu) -> Vec<T> {
        let mut all = read(gpu, &self.view, self.n + GUARD);
        let guard = all.split_off(self.n);
        let touched = guard.iter().position(|v| bytemuck::bytes_of(v) != bytemuck::bytes_of(&self.fill));
        assert_eq!(touched, None, "written past an output of {} elements", self.n);
        all
    }
}

/// The first `n` elements of a view.
pub fn read<T: Pod>(gpu: &Gpu, view: &View, n: usize) -> Vec<T> {
    bytemuck::pod_collect_to_vec(&gpu.read(&view.buffer, view.offset, (n * size_of::<T>()) as u64).unwrap())
}

/// Records into one pass, then submits.
pub fn run<R>(gpu: &Gpu, record: impl FnOnce(&mut Recording, &mut wgpu::ComputePass<'_>) -> wgmoe::Result<R>) -> R {
    let mut rec = Recording::new(gpu);
    run_in(&mut rec, record)
}

/// The same in a recording that is used again.
pub fn run_in<R>(
    rec: &mut Recording,
    record: impl FnOnce(&mut Recording, &mut wgpu::ComputePass<'_>) -> wgmoe::Result<R>,
) -> R {
    let gpu = rec.gpu().clone();
    let scope = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
    traced::begin(rec);
    let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("test") });
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    let result = record(rec, &mut pass).unwrap();
    drop(pass);
    rec.flush();
    let repeated = replayed::Case::recorded(rec);
    let stages = traced::Stages::recorded(rec);
    gpu.queue().submit([encoder.finish()]);
    rec.reset();
    if let Some(case) = repeated {
        case.run(&gpu);
    }
    if let Some(stages) = stages {
        stages.write(&gpu);
    }
    if let Some(e) = pollster::block_on(scope.pop()) {
        panic!("{e}");
    }
    result
}

/// Matrices `[count, out, in]` as the storage type holds them: the resident weights, cut under `limit` bytes a binding,
/// and their decoded values.
pub fn weights(
    gpu: &Gpu,
    dtype: DType,
    [count, out, inner]: [usize; 3],
    values: &[f32],
    limit: u64,
) -> (Weights, Vec<f32>) {
    assert_eq!(values.len(), count * out * inner, "values: [count, out, in]");
    let bytes = dtype.encode(values);
    let row = inner * dtype.size();
    let pieces = cut(count, out, row as u64, limit).unwrap().into_iter().map(|piece| {
        let mut part = Vec::new();
        for m in piece.first..piece.first + piece.count {
            let begin = (m * out + piece.row_begin) * row;
            part.extend_from_slice(&bytes[begin..begin + piece.rows * row]);
        }
        (piece, upload(gpu, &part))
    });
    let pieces = pieces.collect();
    let (measured, magnitude) = Measured::new(dtype, count, inner);
    if let Some(measured) = measured {
        bytes.chunks((out * row).max(1)).enumerate().for_each(|(m, part)| measured.add(m, part));
        measured.finish();
    }
    (Weights { dtype, count, out_dim: out, in_dim: inner, pieces, magnitude }, dtype.decode(&bytes))
}
