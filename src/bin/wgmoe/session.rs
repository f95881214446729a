//! From checked files to answers: start the engine on every rank, run one batch.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use wgmoe::engine::{AdapterId, Engine, EngineOptions, Event, FinishReason, Request, Sampling, SequenceId};
use wgmoe::gpu::{Gpu, Tier};
use wgmoe::model::Model;
use wgmoe::placement::Topology;

use crate::Device;
use crate::files::Files;
use crate::ranks::{Others, World};
use crate::target::Target;

/// Sequences that decode together; more requests wait their turn.
const MAX_SEQUENCES: usize = 128;

impl Files {
    /// Loads model and adapters, on every rank its share, and makes room for `jobs`.
    pub fn start(
        &self,
        world: World,
        device: &Device,
        tier: Option<Tier>,
        jobs: &[Job],
    ) -> anyhow::Result<Session<'_>> {
        let share = &self.share;
        let (others, line) = match world {
            World::Alone => (Others::default(), None),
            World::Threads => {
                let all = share.clone();
                let follow = move |gpu: &Gpu, line| all.follow(gpu, line);
                let (others, line) = Others::start(&share.options, device, tier, follow)?;
                (others, Some(line))
            }
            #[cfg(feature = "mpi")]
            World::Processes(line) => (Others::default(), Some(line)),
        };
        // Rank 0 has the first place of all.
        let gpu = device.open_tier(tier)?;
        let bar = ProgressBar::new(0).with_style(style("loading {bar:30} {binary_bytes}/{binary_total_bytes} {eta}"));
        let (model, streamed) = Model::load(&gpu, &self.checkpoint, &share.load_options(0)?, &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        })?;
        bar.finish_and_clear();
        let read: u64 = self.adapters.iter().map(|(_, adapter)| adapter.bytes_read).sum();
        let bytes_loaded = streamed.bytes_read + read;
        let options = EngineOptions {
            max_sequences: jobs.len().clamp(1, MAX_SEQUENCES),
            max_context: jobs.iter().map(|job| job.ids.len() + job.max_tokens).max().unwrap_or(1),
            adapter_slots: self.adapters.len().max(1),
            adapter_memory: self.adapter_memory,
            count_routing: self.trace.is_some(),
            exchange: self.exchange,
            ..EngineOptions::default()
        };
        let topology = model.topology();
        let engine = match line {
            None => Engine::new(&gpu, model, options)?,
            Some(line) => Engine::with_ranks(&gpu, model, options, line)?,
        };
        let trace = self.trace.as_ref();
        let mut session =
            Session { gpu, engine: Some(engine), others, topology, adapters: HashMap::new(), trace, bytes_loaded };
        for (name, adapter) in &self.adapters {
            let id = session.engine()?.load_adapter(name, adapter).with_context(|| format!("adapter `{name}`"))?;
            session.adapters.insert(name.as_str(), id);
        }
        Ok(session)
    }
}

/// One checked request.
#[derive(Clone)]
pub struct Job {
    /// Where it stands: an option, or a file and line.
    pub place: String,
    /// `None`: the base model.
    pub adapter: Option<String>,
    pub ids: Vec<u32>,
    /// 0: only the prompt's logits are wanted.
    pub max_tokens: usize,
    pub sampling: Sampling,
    pub stop_ids: Vec<u32>,
}

impl Job {
    /// A request for the logits of every position of `ids`.
    pub fn score(place: String, adapter: Option<String>, ids: Vec<u32>) -> Self {
        Self { place, adapter, ids, max_tokens: 0, sampling: Sampling::default(), stop_ids: Vec::new() }
    }
}

/// What a model wrote.
pub struct Answer {
    /// With the stop token where there is one.
    pub ids: Vec<u32>,
    pub reason: FinishReason,
}

impl Answer {
    /// The ids without the stop token.
    pub fn content(&self) -> &[u32] {
        match self.reason {
            FinishReason::Stop => &self.ids[..self.ids.len().saturating_sub(1)],
            _ => &self.ids,
        }
    }

    /// The text without the stop token; `None` where the model has no tokenizer.
    pub fn text(&self, files: &Files) -> anyhow::Result<Option<String>> {
        Ok(files.tokenizer().map(|tokenizer| tokenizer.decode(self.content())).transpose()?)
    }

    /// `stop` or `length`.
    pub fn finish(&self) -> &'static str {
        match self.reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            _ => "cancelled",
        }
    }
}

/// A model on a device, ready for one batch after another.
pub struct Session<'a> {
    pub gpu: Gpu,
    /// There until the session is dropped.
    engine: Option<Engine>,
    others: Others,
    topology: Topology,
    adapters: HashMap<&'a str, AdapterId>,
    trace: Option<&'a Target>,
    /// Bytes of weights and adapter factors that were read.
    pub bytes_loaded: u64,
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if let Some(Err(e)) = self.engine.take().map(Engine::end) {
            log::info!("ending: {e}");
        }
        self.others.join();
    }
}

impl Session<'_> {
    fn engine(&mut self) -> anyhow::Result<&mut Engine> {
        self.engine.as_mut().context("the session has ended")
    }

    /// Runs all jobs in one batch; `on_token` sees (job, id) as they come. Answers are in the order of the jobs.
    pub fn generate(&mut self, jobs: &[Job], mut on_token: impl FnMut(usize, u32)) -> anyhow::Result<Vec<Answer>> {
        let mut answers: Vec<_> =
            jobs.iter().map(|_| Answer { ids: Vec::new(), reason: FinishReason::Cancelled }).collect();
        self.drive(jobs, false, |job, event| {
            match event {
                Event::Token { id, .. } => {
                    answers[job].ids.push(id);
                    on_token(job, id);
                }
                Event::Finished { reason, .. } => answers[job].reason = reason,
                _ => {}
            }
            Ok(())
        })?;
        Ok(answers)
    }

    /// Runs all jobs in one batch and shows `on_row` every row of logits as (job, position, row).
    pub fn score(
        &mut self,
        jobs: &[Job],
        mut on_row: impl FnMut(usize, usize, &[f32]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let vocab = self.engine()?.config().vocab;
        let mut seen = vec![0; jobs.len()];
        self.drive(jobs, true, |job, event| {
            if let Event::Logits { position, rows, .. } = event {
                for (offset, row) in rows.chunks_exact(vocab).enumerate() {
                    on_row(job, position + offset, row).with_context(|| jobs[job].place.clone())?;
                    seen[job] += 1;
                }
            }
            Ok(())
        })?;
        match jobs.iter().zip(&seen).find(|(job, seen)| job.ids.len() != **seen) {
            Some((job, seen)) => {
                anyhow::bail!("{}: expected the logits of {} positions, got {seen}", job.place, job.ids.len())
            }
            None => Ok(()),
        }
    }

    /// Checks all jobs, submits all, steps the engine until it is idle, and writes what it counted.
    fn drive(
        &mut self,
        jobs: &[Job],
        logits: bool,
        mut on_event: impl FnMut(usize, Event) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let requests: Vec<_> = jobs.iter().map(|job| self.request(job, logits)).collect();
        let trace = self.trace;
        let engine = self.engine()?;
        for (job, request) in jobs.iter().zip(&requests) {
            engine.check(request).map_err(|error| error.within(&job.place))?;
        }
        let mut running: HashMap<SequenceId, usize> = HashMap::new();
        for (index, request) in requests.into_iter().enumerate() {
            let id = engine.submit(request).map_err(|error| error.within(&jobs[index].place))?;
            running.insert(id, index);
        }
        while !engine.is_idle() {
            let started = engine.begin_step()?;
            let events = if started { engine.poll()? } else { engine.wait()? };
            for event in events {
                let (Event::Token { sequence, .. }
                | Event::Logits { sequence, .. }
                | Event::Finished { sequence, .. }
                | Event::Failed { sequence, .. }) = &event;
                let job = running[sequence];
                match event {
                    Event::Failed { sequence, error } => {
                        running.remove(&sequence);
                        return Err(error.within(&jobs[job].place).into());
                    }
                    Event::Finished { sequence, .. } => {
                        running.remove(&sequence);
                        on_event(job, event)?;
                    }
                    _ => on_event(job, event)?,
                }
            }
        }
        if let Some(job) = running.values().min() {
            anyhow::bail!("{}: the engine stopped before the answer was complete", jobs[*job].place);
        }
        if let (Some(target), Some(counts)) = (trace, engine.routing_counts()?) {
            target.write(&counts.to_json())?;
        }
        Ok(())
    }

    fn request(&self, job: &Job, logits: bool) -> Request {
        Request {
            prompt: job.ids.clone(),
            adapter: job.adapter.as_deref().map(|name| self.adapters[name]),
            max_tokens: job.max_tokens,
            sampling: job.sampling,
            stop_ids: job.stop_ids.clone(),
            logits,
        }
    }

    /// Device, driver and tier, for the line below an answer.
    pub fn whereabouts(&self) -> String {
        let info = self.gpu.info();
        let exchange = self.engine.as_ref().and_then(|engine| engine.options().exchange);
        let ranks = match (self.topology.world(), self.topology.ep(), exchange) {
            (1, ..) | (.., None) => String::new(),
            (tp, ep, Some(way)) => format!(" · {tp} ranks, {ep} expert groups, {way}"),
        };
        format!("device {} · driver {} · tier {}{ranks}", info.name, crate::devices::driver(info), self.gpu.tier())
    }
}

/// Tokens, seconds and tokens/s of a batch.
pub fn speed(tokens: usize, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    format!("{tokens} tokens · {seconds:.2} s · {:.1} tokens/s", tokens as f64 / seconds.max(1e-9))
}

/// A progress bar on stderr, invisible where stderr is not a terminal.
pub fn bar(length: usize, unit: &str) -> ProgressBar {
    let template = format!("{{bar:30}} {{pos}}/{{len}} {unit} {{elapsed}} {{msg}}");
    ProgressBar::new(length as u64).with_style(style(&template))
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Runs `jobs` under a progress bar that counts tokens; the answers and the time they took.
pub fn generate_with_bar(session: &mut Session, jobs: &[Job]) -> anyhow::Result<(Vec<Answer>, Duration)> {
    let limit = jobs.iter().map(|job| job.max_tokens).sum();
    let bar = bar(limit, "tokens at most");
    let start = Instant::now();
    let answers = session.generate(jobs, |_, _| bar.inc(1));
    bar.finish_and_clear();
    Ok((answers?, start.elapsed()))
}

/// The stem of a path, for messages and task names.
pub fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
