//! What a device can do wrong: it is lost, has no memory left, or refuses a shader. Each is an error of a kind that a
//! caller can match, the process goes on, and another device can be opened.

#[path = "common/device.rs"]
mod device;

use std::path::Path;

use wgmoe::dtype::DType;
use wgmoe::kernels::expert_gemm::{self, EXPERT_GEMM};
use wgmoe::kernels::linker::{Var, pipeline};
use wgmoe::{Checkpoint, Engine, EngineOptions, ErrorKind, Event, Gpu, GpuOptions, LoadOptions, Model, Request};

/// A device of the test's own, since others must not lose theirs.
fn open() -> Gpu {
    let index = device::every_tier()[0].info().index;
    Gpu::new(&GpuOptions { device: Some(index.to_string()), tier: None }).unwrap()
}

fn engine(gpu: &Gpu) -> Engine {
    let checkpoint = Checkpoint::open(Path::new("examples/demo/base")).unwrap();
    let (model, _) = Model::load(gpu, &checkpoint, &LoadOptions::default(), &mut |_, _| {}).unwrap();
    Engine::new(gpu, model, EngineOptions::default()).unwrap()
}

/// Tokens until the engine is idle, or what stopped it.
fn run(engine: &mut Engine, mut between_steps: impl FnMut()) -> wgmoe::Result<usize> {
    let prompt = vec![73, 74, 200];
    engine.submit(Request { prompt, max_tokens: 8, ..Request::default() })?;
    let mut tokens = 0;
    for _ in 0..1000 {
        if engine.is_idle() {
            return Ok(tokens);
        }
        engine.begin_step()?;
        between_steps();
        tokens += engine.wait()?.iter().filter(|e| matches!(e, Event::Token { .. })).count();
    }
    panic!("the engine neither ends nor fails");
}

#[test]
fn a_lost_device_ends_an_engine_with_an_error_and_another_device_runs() {
    let gpu = open();
    let mut engine_of_lost = engine(&gpu);
    let mut steps = 0;
    let error = run(&mut engine_of_lost, || {
        steps += 1;
        if steps == 3 {
            gpu.device().destroy();
        }
    })
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device, "{error}");
    // It stays an error, whatever is asked for.
    assert_eq!(engine_of_lost.begin_step().unwrap_err().kind(), ErrorKind::Device);
    let buffer = gpu.buffer("after the loss", 64, wgpu::BufferUsages::empty());
    assert_eq!(buffer.unwrap_err().kind(), ErrorKind::Device);
    let vars = expert_gemm::vars(gpu.capabilities(), DType::F16, "pairs", 1);
    assert_eq!(pipeline(&gpu, &EXPERT_GEMM, vars).unwrap_err().kind(), ErrorKind::Device);
    drop(engine_of_lost);

    let another = open();
    assert_eq!(run(&mut engine(&another), || {}).unwrap(), 8);
}

#[test]
fn reading_from_a_lost_device_is_an_error() {
    let gpu = open();
    let buffer = gpu.buffer("lost", 64, wgpu::BufferUsages::empty()).unwrap();
    gpu.device().destroy();
    assert_eq!(gpu.read(&buffer, 0, 64).unwrap_err().kind(), ErrorKind::Device);
}

#[test]
fn a_shader_that_the_device_refuses_is_an_error_and_the_device_goes_on() {
    let gpu = open();
    let mut wide = expert_gemm::vars(gpu.capabilities(), DType::F32, "pairs", 1);
    wide.iter_mut().filter(|(name, _)| *name == "lanes").for_each(|(_, v)| *v = Var::Number(1 << 16));
    let refused = pipeline(&gpu, &EXPERT_GEMM, wide).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Device, "{refused}");
    assert!(refused.to_string().contains("expert_gemm["), "{refused}");
    // A variable that the file needs is missing: found before the device is asked.
    let missing = pipeline(&gpu, &EXPERT_GEMM, Vec::new()).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Unsupported, "{missing}");
    assert_eq!(run(&mut engine(&gpu), || {}).unwrap(), 8);
}

/// In a process of its own with little memory, so that a device in software runs out of it; drivers of GPUs may take
/// the machine's instead.
#[cfg(target_os = "linux")]
#[test]
fn memory_that_runs_out_is_an_error_and_the_device_goes_on() {
    const INSIDE: &str = "WGMOE_TEST_LITTLE_MEMORY";
    if std::env::var_os(INSIDE).is_none() {
        if !device::every_tier()[0].info().software {
            return;
        }
        let program = std::env::current_exe().unwrap();
        let name = "memory_that_runs_out_is_an_error_and_the_device_goes_on";
        let limited = format!("ulimit -v 3500000; exec '{}' --exact {name} --nocapture", program.display());
        let output = std::process::Command::new("sh").args(["-c", &limited]).env(INSIDE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", output.status);
        return;
    }
    let gpu = open();
    let mut held = Vec::new();
    let error = loop {
        assert!(held.len() < 100, "memory does not run out");
        match gpu.buffer("large", 256 << 20, wgpu::BufferUsages::empty()) {
            Ok(buffer) => held.push(buffer),
            Err(e) => break e,
        }
    };
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    drop(held);
    gpu.device().poll(wgpu::PollType::wait_indefinitely()).unwrap();
    assert_eq!(run(&mut engine(&gpu), || {}).unwrap(), 8);
}
