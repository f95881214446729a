//! One mixture-of-experts layer, recorded into an encoder of one's own on a device of one's own.
//!
//! `cargo run --release --example layer`

use wgmoe::activation::Activation;
use wgmoe::checkpoint::Block;
use wgmoe::dtype::DType;
use wgmoe::kernels::{Recording, View};
use wgmoe::layer::{MoeLayer, MoeTensors};
use wgmoe::router::RouteOptions;
use wgmoe::shape::MoeShape;
use wgmoe::upload::{StreamOptions, Uploader};
use wgmoe::{Gpu, Result};

fn main() -> Result<()> {
    // The caller's own instance, adapter and device: only `wanted` has to be asked.
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let adapter = adapters.first().expect("a GPU");
    let (required_features, required_limits, experimental_features) = Gpu::wanted(adapter);
    let descriptor =
        wgpu::DeviceDescriptor { required_features, required_limits, experimental_features, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
    let gpu = Gpu::from_wgpu(adapter, device.clone(), queue.clone(), None)?;

    // A layer of 8 experts, 2 a token. Weights are row-major bytes in f32, f16 or bf16.
    let shape = MoeShape { experts: 8, top_k: 2, hidden: 64, expert_width: 32 };
    let (d, f) = (shape.hidden, shape.expert_width);
    let values = |n: usize, seed: usize| -> Vec<u8> {
        let wave: Vec<f32> = (0..n).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 5045.0 - 0.1).collect();
        DType::Bf16.encode(&wave)
    };
    let router = values(shape.experts * d, 1);
    let gate_up: Vec<Vec<u8>> = (0..shape.experts).map(|e| values(2 * f * d, 2 + e)).collect();
    let down: Vec<Vec<u8>> = (0..shape.experts).map(|e| values(d * f, 20 + e)).collect();
    let mut up = Uploader::new(&gpu);
    let layer = MoeLayer {
        shape,
        experts: shape.experts,
        width: f,
        owners: None,
        router: up.stack("router", 1, [shape.experts, d], &|_| {
            Ok(vec![Block::borrowed(DType::Bf16, [shape.experts, d], &router)?])
        })?,
        options: RouteOptions::default(),
        gate_up: up.stack("gate_up", shape.experts, [2 * f, d], &|e| {
            Ok(vec![Block::borrowed(DType::Bf16, [2 * f, d], &gate_up[e])?])
        })?,
        down: up
            .stack("down", shape.experts, [d, f], &|e| Ok(vec![Block::borrowed(DType::Bf16, [d, f], &down[e])?]))?,
        activation: Activation::Silu,
    };
    up.run(&StreamOptions::default(), &mut |_done, _total| {})?;

    // Five tokens, through the caller's encoder and pass.
    let tokens = 5;
    let storage =
        |bytes: usize| gpu.buffer("example", bytes as u64, wgpu::BufferUsages::empty()).map(|b| View::whole(&b));
    let (x, out, status) = (storage(tokens * d * 4)?, storage(tokens * d * 4)?, storage(4)?);
    let rows: Vec<f32> = (0..tokens * d).map(|i| (i as f32 * 0.37).sin()).collect();
    queue.write_buffer(&x.buffer, 0, bytemuck::cast_slice(&rows));
    let mut recording = Recording::new(&gpu);
    let mut encoder = device.create_command_encoder(&Default::default());
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        let tensors = MoeTensors { tokens, x: &x, out: &out, accumulate: false, status: &status, lora: None };
        layer.record(&mut recording, &mut pass, &tensors)?;
    }
    recording.flush();
    queue.submit([encoder.finish()]);

    let bytes = gpu.read(&out.buffer, 0, (tokens * d * 4) as u64)?;
    let result: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
    println!("{} ({} tier)", gpu.info().name, gpu.tier());
    for (t, row) in result.chunks(d).enumerate() {
        println!("token {t}: {:+.5} {:+.5} {:+.5} ...", row[0], row[1], row[2]);
    }
    Ok(())
}
