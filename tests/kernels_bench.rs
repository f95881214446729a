//! The stages that benchmarks are made of: random weights equal those of the host, copies are copies, and bursts of arithmetic
//! compute what they say.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use common::{TOL_F32, UNWRITTEN_I32, each_case, rel_err};
use gpu_run::{Output, replayed, run, upload};
use wgmoe::dtype::DType;
use wgmoe::kernels::matrix_probe::{MatrixProbe, WORDS, subgroup_size};
use wgmoe::kernels::random::Random;
use wgmoe::kernels::rate::Rate;
use wgmoe::kernels::stream::Stream;

#[test]
fn random_weights_are_those_of_the_host_in_every_type() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (exponent, seed, first, n) in [(-6, 1, 0, 8), (0, 7, 3, 4104), (7, u32::MAX, u32::MAX - 100, 264)] {
            cases.push((Random { dtype, exponent, seed }, first, n));
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |(random, first, n)| {
            let out = Output::new(&gpu, n * random.dtype.size() / 4, UNWRITTEN_I32);
            run(&gpu, |rec, pass| random.fill(rec, pass, &out.view, *first, *n));
            let got = random.dtype.decode(bytemuck::cast_slice(&out.read(&gpu)));
            let expected: Vec<f32> = (0..*n).map(|i| random.value(first.wrapping_add(i as u32))).collect();
            let limit = (random.exponent as f32).exp2();
            if got != expected || got.iter().any(|v| *v == 0.0 || v.abs() >= limit) {
                return Err(format!("{:?}, expected {:?}", &got[..8], &expected[..8]));
            }
            // Spread over the range, on both sides.
            let mean = got.iter().sum::<f32>() / *n as f32 / limit;
            if *n > 1000 && mean.abs() > 0.05 { Err(format!("mean {mean}")) } else { Ok(()) }
        });
    }
}

#[test]
fn a_copy_is_a_copy() {
    for gpu in device::every_variant() {
        each_case(&[4, 1020, 1028, 70_000], |n| {
            let words: Vec<u32> = (0..*n as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
            let source = upload(&gpu, &words);
            let copy = Output::new(&gpu, *n, UNWRITTEN_I32 as u32);
            run(&gpu, |rec, pass| Stream { from: &source, to: &copy.view }.record(rec, pass));
            if copy.read(&gpu) == words { Ok(()) } else { Err("differs".to_owned()) }
        });
    }
}

#[test]
fn a_burst_computes_all_of_its_steps() {
    const WORKGROUPS: usize = 3;
    for gpu in device::every_variant() {
        let matrix = gpu.capabilities().matrix;
        each_case(&[1, 5], |rounds| {
            let out = Output::new(&gpu, WORKGROUPS * 256, 0.0f32);
            let burst = Rate { workgroups: WORKGROUPS as u32, rounds: *rounds, out: &out.view };
            run(&gpu, |rec, pass| burst.record(rec, pass));
            let got = out.read(&gpu);
            let expected: Vec<f32> = (0..WORKGROUPS * 256).map(|i| chain(i % 256, *rounds)).collect();
            let off = if matrix { 0.0 } else { rel_err(&got, &expected) };
            let done = got.iter().all(|v| v.is_finite()) && got.iter().any(|v| *v != 0.0);
            if done && off <= TOL_F32 { Ok(()) } else { Err(format!("off by {off}, {:?}", &got[..4])) }
        });
    }
}

/// What an invocation of the f32 burst leaves: four times eight chains of `sum · x + x`.
fn chain(lane: usize, rounds: u32) -> f32 {
    let x = (lane % 7) as f32 * 0.0625 - 0.1875;
    let one = |begin: f32| (0..4 * rounds).fold(x + begin, |sum, _| sum * x + x);
    4.0 * (0..8).map(|i| one(i as f32)).sum::<f32>()
}

#[test]
#[ignore = "repeats MSL on the CPU: portability/steps/msl-run.sh"]
fn the_probe_finds_matrices_of_8() {
    let gpu = replayed::device(|tuning| tuning);
    let out = Output::new(&gpu, WORDS, UNWRITTEN_I32 as u32);
    run(&gpu, |rec, pass| MatrixProbe { edge: gpu.capabilities().edge, out: &out.view }.record(rec, pass));
    assert_eq!(subgroup_size(&out.read(&gpu)), Some(32));
    let out = Output::new(&gpu, 256, 0.0f32);
    run(&gpu, |rec, pass| Rate { workgroups: 1, rounds: 1, out: &out.view }.record(rec, pass));
    // Four products of the same operands a round, whose sums eight chains leave.
    let operand = |i: usize| (i % 7) as f32 * 0.0625 - 0.1875;
    let product = |at: usize| (0..16).map(|k| operand(k * 16 + at % 16) * operand(256 + at / 16 * 16 + k)).sum::<f32>();
    let expected: Vec<f32> = (0..256).map(|at| 8.0 * 4.0 * product(at)).collect();
    assert!(rel_err(&out.read(&gpu), &expected) <= TOL_F32);
}
