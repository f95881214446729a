//! One layer on one batch, by the device's clock.

use std::time::{Duration, Instant};

use wgmoe::gpu::Gpu;
use wgmoe::kernels::{Recording, View};
use wgmoe::layer::{LoraBatch, MoeTensors, Routed};
use wgmoe::shape::MoeShape;

use crate::bench::report::Stage;
use crate::bench::routing;
use crate::bench::synthetic::Synthetic;
use crate::bench::timing::{STAGES, Times};

/// Sets of tokens that runs take in turn.
const INPUTS: usize = 4;

/// A layer and the device that it is on.
pub struct Bench<'a> {
    pub gpu: &'a Gpu,
    pub layer: &'a Synthetic,
    /// Those of its adapters.
    pub ranks: &'a [usize],
}

/// A batch on the device, with several sets of tokens.
pub struct Batch {
    pub tokens: usize,
    inputs: Vec<Input>,
}

struct Input {
    x: View,
    lora: Option<LoraBatch>,
}

/// How long to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Runs of which the median is taken; 0: only the output is of interest.
    pub runs: usize,
    /// How long the device works before it is timed: an idle one lowers its clock.
    pub warm_up: Duration,
    /// Each dispatch is timed.
    pub profile: bool,
}

/// What some runs gave.
pub struct Measured {
    pub us: f64,
    pub stages: Vec<Stage>,
    /// `[T, D]` of the first tokens.
    pub out: Vec<f32>,
    /// `[T, A]` of the same.
    pub ids: Vec<i32>,
}

impl Bench<'_> {
    /// Random tokens with adapters that take turns.
    pub fn batch(&self, tokens: usize, adapters: usize) -> anyhow::Result<Batch> {
        let d = self.layer.layer.shape.hidden;
        let storage = |bytes: &[u8]| -> anyhow::Result<View> {
            let view = storage(self.gpu, bytes.len())?;
            self.gpu.queue().write_buffer(&view.buffer, 0, bytes);
            Ok(view)
        };
        let inputs = (0..INPUTS).map(|i| {
            let rows = routing::tokens(tokens, d, seed(i));
            let slots = slots(tokens, i, adapters);
            let mapping = storage(bytemuck::cast_slice(&slots))?;
            let lora = LoraBatch::of(&self.layer.pool, &slots, mapping);
            Ok(Input { x: storage(bytemuck::cast_slice(&rows))?, lora })
        });
        Ok(Batch { tokens, inputs: inputs.collect::<anyhow::Result<_>>()? })
    }

    /// The dispatches that `gpu` decides for: nothing is run.
    pub fn ways(&self, gpu: &Gpu, tokens: usize, adapters: usize) -> anyhow::Result<Vec<String>> {
        let d = self.layer.layer.shape.hidden;
        let lora = LoraBatch::of(&self.layer.pool, &slots(tokens, 0, adapters), storage(gpu, tokens * 4)?);
        let inputs = vec![Input { x: storage(gpu, tokens * d * 4)?, lora }];
        let batch = Batch { tokens, inputs };
        let mut runner = Runner::new(self, gpu, &batch)?;
        runner.rec.labels();
        runner.record(0, None)?;
        Ok(runner.rec.labels())
    }

    /// Median time of the whole layer over runs with rotating tokens, and its output for the first tokens. The device never
    /// waits between runs.
    pub fn measure(&self, gpu: &Gpu, batch: &Batch, effort: Effort) -> anyhow::Result<Measured> {
        let MoeShape { top_k, hidden: d, .. } = self.layer.layer.shape;
        let Effort { runs, warm_up, profile } = effort;
        let tokens = batch.tokens;
        let times = Times::new(gpu, runs.max(1));
        let mut runner = Runner::new(self, gpu, batch)?;
        // Compiles shaders, then keeps the device busy until its clock is up.
        let (_, topk_ids) = runner.run(0, None)?;
        let out = bytemuck::pod_collect_to_vec(&gpu.read(&runner.out.buffer, 0, (tokens * d * 4) as u64)?);
        let ids = bytemuck::pod_collect_to_vec(&gpu.read(&topk_ids.buffer, 0, (tokens * top_k * 4) as u64)?);
        if runs == 0 {
            return Ok(Measured { us: 0.0, stages: Vec::new(), out, ids });
        }
        let begin = Instant::now();
        while begin.elapsed() < warm_up {
            for i in 0..INPUTS {
                runner.run(i, None)?;
            }
            gpu.device().poll(wgpu::PollType::wait_indefinitely())?;
        }
        let mut labels = Vec::new();
        for run in 0..runs {
            (labels, _) = runner.run(run, Some(Clock { times: &times, run, profile }))?;
        }
        let (us, parts) = times.medians(gpu, &labels)?;
        let stages = labels.into_iter().zip(parts).map(|(stage, us)| Stage { stage, us }).collect();
        Ok(Measured { us, stages, out, ids })
    }
}

/// Where a run leaves its times.
#[derive(Clone, Copy)]
struct Clock<'a> {
    times: &'a Times,
    run: usize,
    profile: bool,
}

/// What runs share.
struct Runner<'a> {
    bench: &'a Bench<'a>,
    gpu: &'a Gpu,
    batch: &'a Batch,
    rec: Recording,
    out: View,
    status: View,
}

impl<'a> Runner<'a> {
    fn new(bench: &'a Bench<'a>, gpu: &'a Gpu, batch: &'a Batch) -> anyhow::Result<Self> {
        let (out, status) = (storage(gpu, batch.tokens * bench.layer.layer.shape.hidden * 4)?, storage(gpu, 4)?);
        Ok(Self { bench, gpu, batch, rec: Recording::new(gpu), out, status })
    }

    /// Records the layer on set `i` of the tokens.
    fn record(&mut self, i: usize, clock: Option<Clock<'_>>) -> anyhow::Result<(Vec<wgpu::CommandBuffer>, Routed)> {
        let Self { bench, gpu, batch, rec, out, status } = self;
        let (layer, pool, tokens) = (&bench.layer.layer, &bench.layer.pool, batch.tokens);
        let input = &batch.inputs[i % batch.inputs.len()];
        rec.reset();
        let encoder = || gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut commands = Vec::new();
        let (sites, factors) = pool.layer(0);
        // Once for all layers of a step: not timed.
        let lora = match &input.lora {
            None => None,
            Some(batch) => {
                let mut encoder = encoder();
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                let batch = batch.clone().prepare(rec, &mut pass, tokens, sites.router.iter(), status)?;
                drop(pass);
                commands.push(encoder.finish());
                Some(batch)
            }
        };
        if let Some(clock) = clock.filter(|clock| clock.profile) {
            rec.profile(clock.times.stages(clock.run), STAGES as usize);
        }
        let mut encoder = encoder();
        let routed = {
            let timestamp_writes = clock.map(|clock| clock.times.pass(clock.run));
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: None, timestamp_writes });
            let lora = lora.as_ref().map(|batch| (batch, sites, factors));
            let tensors = MoeTensors { tokens, x: &input.x, out, accumulate: false, status, lora };
            layer.record(rec, &mut pass, &tensors)?
        };
        commands.push(encoder.finish());
        Ok((commands, routed))
    }

    /// Runs it; the dispatches that were timed, and the chosen experts.
    fn run(&mut self, i: usize, clock: Option<Clock<'_>>) -> anyhow::Result<(Vec<String>, View)> {
        let (commands, routed) = self.record(i, clock)?;
        self.rec.flush();
        // Each begins when the one before has ended.
        for commands in commands {
            self.gpu.queue().submit([commands]);
        }
        Ok((self.rec.profiled(), routed.topk_ids))
    }
}

fn storage(gpu: &Gpu, bytes: usize) -> anyhow::Result<View> {
    Ok(View::whole(&gpu.buffer("bench", bytes as u64, wgpu::BufferUsages::empty())?))
}

/// Seed of a set of tokens.
pub fn seed(input: usize) -> u32 {
    1000 + input as u32
}

/// The adapters of all tokens, -1 for none.
fn slots(tokens: usize, input: usize, adapters: usize) -> Vec<i32> {
    (0..tokens).map(|t| slot(t, input, adapters).map_or(-1, |s| s as i32)).collect()
}

/// The adapter of a token.
pub fn slot(token: usize, input: usize, adapters: usize) -> Option<usize> {
    (adapters > 0).then(|| (token * 5 + input) % adapters)
}
