//! From a model folder to answers: open and check the files, start the engine, run one batch.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use wgmoe::adapter::Adapter;
use wgmoe::checkpoint::{Checkpoint, ModelConfig};
use wgmoe::engine::{AdapterId, Engine, EngineOptions, Event, FinishReason, Request, Sampling, SequenceId};
#[cfg(feature = "mpi")]
use wgmoe::exchange::Exchange as _;
use wgmoe::gpu::{Gpu, Tier};
use wgmoe::model::Model;
use wgmoe::placement::{ExpertShare, Topology};
use wgmoe::text::{ChatTemplate, Tokenizer};

use crate::ranks::{Others, RankOptions, Share, World, places};
use crate::requests::Prompt;
use crate::{Device, size, usage};

/// Sequences that decode together; more requests wait their turn.
const MAX_SEQUENCES: usize = 128;

/// What to run.
#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct ModelFiles {
    /// Model folder: config.json, *.safetensors, and tokenizer.json where text is used
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Adapter folder to load under a name; give it several times for several adapters
    #[arg(long = "lora", value_name = "NAME=DIR", value_parser = named_dir)]
    pub loras: Vec<(String, PathBuf)>,
    /// Device memory for adapters, such as 512MiB: more of them take turns [default: as much as they need]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub adapter_memory: Option<u64>,
    #[command(flatten)]
    pub ranks: RankOptions,
    /// Ranks are the processes that mpirun started: rank 0 reads and writes, the others follow
    #[cfg(feature = "mpi")]
    #[arg(long, help_heading = "Ranks")]
    pub mpi: bool,
}

fn named_dir(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, dir)) if !name.is_empty() && !dir.is_empty() => Ok((name.to_owned(), dir.into())),
        _ => Err("expected NAME=DIR".into()),
    }
}

impl ModelFiles {
    /// A name that no `--lora` loads is a usage error; `place` says where it stands. The base (`None`) always fits.
    pub fn check_adapter(&self, place: &str, name: Option<&str>) -> anyhow::Result<()> {
        match name {
            Some(name) if !self.loras.iter().any(|(loaded, _)| loaded == name) => {
                let names: Vec<_> = self.loras.iter().map(|(name, _)| format!("`{name}`")).collect();
                let loaded = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                Err(usage(format!("{place}: adapter `{name}` is not loaded; --lora loads {loaded}")))
            }
            _ => Ok(()),
        }
    }

    /// Who the other ranks are. `None` in a process that is one of them, which has done its work then.
    pub fn join(&self, device: &Device) -> anyhow::Result<Option<World>> {
        #[cfg(feature = "mpi")]
        if self.mpi {
            return self.join_processes(device);
        }
        let _ = device;
        let world = self.ranks.topology(0)?.world();
        Ok(Some(if world == 1 { World::Alone } else { World::Threads }))
    }

    #[cfg(feature = "mpi")]
    fn join_processes(&self, device: &Device) -> anyhow::Result<Option<World>> {
        let line = wgmoe::exchange::mpi::Mpi::join()?;
        let (rank, ranks, local_rank) = (line.rank(), line.ranks(), line.local_rank());
        let world = World::Processes(Box::new(line));
        let share = self.share(&world);
        let asked = share.options.topology(0)?.world();
        if asked != ranks {
            return Err(usage(format!("--mpi: expected {asked} processes for --tp and --ep, got {ranks}")));
        }
        let World::Processes(mut line) = world else { return Ok(None) };
        if rank == 0 {
            return Ok(Some(World::Processes(line)));
        }
        let places = places(device);
        match device.open_at(places[local_rank % places.len()], device.tier()) {
            Ok(gpu) => share.follow(&gpu, line)?,
            Err(e) => {
                line.fail(&format!("{e:#}"));
                return Err(e);
            }
        }
        Ok(None)
    }

    fn share(&self, world: &World) -> Share {
        let mut options = self.ranks.clone();
        if let (Some(ranks), None, None) = (world.processes(), options.tp, options.ep) {
            options.ep = Some(ranks);
        }
        Share { model: self.model.clone(), loras: self.loras.clone(), options }
    }

    /// Opens and checks every file, of adapters what rank 0 owns; nothing is put on a device yet.
    pub fn open(&self, world: &World) -> anyhow::Result<Files> {
        for (index, (name, _)) in self.loras.iter().enumerate() {
            if self.loras[..index].iter().any(|(earlier, _)| earlier == name) {
                return Err(usage(format!("--lora: the name `{name}` is given twice")));
            }
        }
        let checkpoint = Checkpoint::open(&self.model)?;
        let share = self.share(world);
        let moe = &checkpoint.config().moe;
        let owned =
            ExpertShare::new(&share.options.rule()?, share.options.topology(0)?, moe.experts, moe.expert_width)?;
        let tokenizer = Tokenizer::open(&self.model)?;
        let open = |(name, dir): &(String, PathBuf)| {
            let adapter = Adapter::open_for(dir, checkpoint.config(), &owned);
            let adapter = adapter.with_context(|| format!("adapter `{name}`"))?;
            anyhow::Ok((name.clone(), adapter))
        };
        let adapters = self.loras.iter().map(open).collect::<Result<_, _>>()?;
        let template = OnceCell::new();
        Ok(Files { checkpoint, tokenizer, template, adapters, adapter_memory: self.adapter_memory, share })
    }
}

/// A checked model folder with its adapters.
pub struct Files {
    checkpoint: Checkpoint,
    tokenizer: Option<Tokenizer>,
    template: OnceCell<ChatTemplate>,
    adapters: Vec<(String, Adapter)>,
    adapter_memory: Option<u64>,
    share: Share,
}

impl Files {
    pub fn config(&self) -> &ModelConfig {
        self.checkpoint.config()
    }

    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Token ids of a prompt, checked against the model: not empty, in the vocabulary, no longer than the context.
    pub fn ids(&self, place: &str, prompt: &Prompt) -> anyhow::Result<Vec<u32>> {
        let ids = self.any_ids(place, prompt)?;
        self.check_ids(place, &ids)?;
        Ok(ids)
    }

    /// Token ids of a prompt of any length, not checked.
    pub fn any_ids(&self, place: &str, prompt: &Prompt) -> anyhow::Result<Vec<u32>> {
        Ok(match prompt {
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Text(text) => self.text_tokenizer(place)?.encode(text)?,
            Prompt::Messages(messages) => {
                let tokenizer = self.text_tokenizer(place)?;
                let text = self.template(place)?.render(messages).with_context(|| place.to_owned())?;
                tokenizer.encode_rendered(&text)?
            }
        })
    }

    pub fn check_ids(&self, place: &str, ids: &[u32]) -> anyhow::Result<()> {
        let config = self.config();
        if ids.is_empty() {
            return Err(usage(format!("{place}: the prompt has no tokens")));
        }
        if ids.len() > config.max_positions {
            return Err(usage(format!(
                "{place}: the prompt has {} tokens, longer than the model's context of {}",
                ids.len(),
                config.max_positions
            )));
        }
        match ids.iter().find(|id| **id as usize >= config.vocab) {
            Some(id) => Err(usage(format!("{place}: token id {id} is outside the vocabulary of {}", config.vocab))),
            None => Ok(()),
        }
    }

    fn text_tokenizer(&self, place: &str) -> anyhow::Result<&Tokenizer> {
        let dir = self.checkpoint.dir().display();
        self.tokenizer()
            .ok_or_else(|| usage(format!("{place}: `{dir}` has no tokenizer.json, so prompts must be `ids`")))
    }

    fn template(&self, place: &str) -> anyhow::Result<&ChatTemplate> {
        if let Some(template) = self.template.get() {
            return Ok(template);
        }
        let dir = self.checkpoint.dir();
        let template = ChatTemplate::open(dir)?.ok_or_else(|| {
            usage(format!("{place}: `{}` has no chat template; give the whole prompt as raw text", dir.display()))
        })?;
        Ok(self.template.get_or_init(|| template))
    }

    /// Loads model and adapters, on every rank its share, and makes room for `jobs`.
    pub fn start(
        &self,
        world: World,
        device: &Device,
        tier: Option<Tier>,
        jobs: &[Job],
    ) -> anyhow::Result<Session<'_>> {
        let (mut others, share) = (Others::default(), &self.share);
        let line = match world {
            World::Alone => None,
            World::Threads => {
                let (started, line) = Others::start(share, device, tier)?;
                others = started;
                Some(line)
            }
            #[cfg(feature = "mpi")]
            World::Processes(line) => Some(line),
        };
        let gpu = match &line {
            None => device.open_tier(tier)?,
            Some(_) => device.open_at(places(device)[0], tier)?,
        };
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
            ..EngineOptions::default()
        };
        let topology = model.topology();
        let engine = match line {
            None => Engine::new(&gpu, model, options)?,
            Some(line) => Engine::with_ranks(&gpu, model, options, line)?,
        };
        let mut session =
            Session { gpu, engine: Some(engine), others, topology, adapters: HashMap::new(), bytes_loaded };
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

    /// Checks all jobs, submits all, and steps the engine until it is idle.
    fn drive(
        &mut self,
        jobs: &[Job],
        logits: bool,
        mut on_event: impl FnMut(usize, Event) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let requests: Vec<_> = jobs.iter().map(|job| self.request(job, logits)).collect();
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
        match running.values().min() {
            Some(job) => anyhow::bail!("{}: the engine stopped before the answer was complete", jobs[*job].place),
            None => Ok(()),
        }
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
        let ranks = match (self.topology.world(), self.topology.ep()) {
            (1, _) => String::new(),
            (tp, ep) => format!(" · {tp} ranks, {ep} expert groups"),
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
