//! `wgmoe bench model`: a whole decoder with random weights: tokens a second for reading prompts and for decoding.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use wgmoe::adapter::MAX_RANK;
use wgmoe::dtype::DType;
use wgmoe::engine::{AdapterId, Engine, EngineOptions, Event, Request};
use wgmoe::exchange::Exchange;
use wgmoe::gpu::Gpu;
use wgmoe::model::{LoadOptions, Model};

use crate::bench::shape::{Shape, Stored};
use crate::bench::synthetic;
use crate::bench::timed::{Reading, Spent, Timed};
use crate::bench::timing::{median, microseconds};
use crate::devices::driver;
use crate::ranks::{ExchangeOption, Loaded, Others, RankOptions, follow};
use crate::table::{bytes, table};
use crate::values::{number, numbers};
use crate::{Device, Format, usage};

/// Time a whole model: reading prompts, and decoding one and many sequences
#[derive(Args)]
#[command(after_help = "\
Weights are random and made on the device, and so are adapters (rank --rank on attention and on every
expert, mixed over the sequences). Decoding is timed from the moment when every sequence has its first
token to the last one, reading from submission to the first token.

Examples:
  wgmoe bench model
  wgmoe bench model --sequences 1,64 --adapters 0,8 --layers 4
  wgmoe bench model --ep 2 --sequences 64 --format json")]
pub struct Options {
    /// Sizes: qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b, tiny, or a folder with config.json [default: qwen3-30b-a3b, tiny on a
    /// software device]
    #[arg(long, value_name = "NAME|DIR")]
    shape: Option<String>,
    /// Layers, where not all of them
    #[arg(long, value_name = "N", value_parser = number(1..=MOST))]
    layers: Option<usize>,
    /// Sequences that decode together
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = numbers(1..=MOST_SEQUENCES), default_value = "1,64")]
    sequences: Vec<usize>,
    /// Tokens of each prompt before decoding
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = number(1..=MOST))]
    prompt: usize,
    /// Tokens that each sequence decodes
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = number(1..=MOST))]
    decode: usize,
    /// Tokens of the prompts that are read alone; 0 for none
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = numbers(0..=MOST), default_value = "4096")]
    prefill: Vec<usize>,
    /// Rows of one step: longer prompts take several
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = number(1..=MOST))]
    step_tokens: usize,
    /// Adapters mixed over the sequences, 0 for none
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = numbers(0..=MOST_ADAPTERS), default_value = "0,8")]
    adapters: Vec<usize>,
    /// Rank of the adapters
    #[arg(long, value_name = "R", default_value_t = 16, value_parser = number(1..=MAX_RANK))]
    rank: usize,
    /// Storage type of the weights
    #[arg(long, value_enum, default_value_t = Stored::Bf16, value_name = "TYPE")]
    dtype: Stored,
    /// Also show where the time of one step goes, dispatch by dispatch
    #[arg(long)]
    profile: bool,
    /// Runs, of which the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = number(1..=MOST))]
    runs: usize,
    /// A table, or one JSON object
    #[arg(long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    format: Format,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    exchange: ExchangeOption,
    #[command(flatten)]
    device: Device,
}

/// Sequences that an engine runs together, adapters, and tokens or anything else, at most.
const MOST_SEQUENCES: usize = 1 << 12;
const MOST_ADAPTERS: usize = 1 << 16;
const MOST: usize = 1 << 24;

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    driver: String,
    tier: String,
    shape: String,
    layers: usize,
    dtype: &'static str,
    ranks: usize,
    ep: usize,
    exchange: String,
    /// Weights and adapters of rank 0.
    bytes_resident: u64,
    adapter_bytes: u64,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    /// `decode` or `prefill`.
    what: &'static str,
    sequences: usize,
    /// Tokens decoded or read, all sequences together.
    tokens: usize,
    adapters: usize,
    tokens_s: f64,
    /// Of one step of all sequences.
    ms: f64,
    /// Of that, what rank 0 spends in exchanges, waiting for the other ranks included; how many there are in a step, and the
    /// bytes that it sends. 0 for one rank.
    exchange_ms: f64,
    exchanges: f64,
    exchange_bytes: f64,
    /// Dispatches of one kind together, in one step, longest first; all but the first dispatch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stages: Vec<Stage>,
}

/// All dispatches of a shader.
#[derive(Debug, Serialize)]
struct Stage {
    stage: String,
    dispatches: usize,
    us: f64,
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    let gpu = options.device.open()?;
    let small = if gpu.info().software { "tiny" } else { "qwen3-30b-a3b" };
    let mut shape = Shape::parse(options.shape.as_deref().unwrap_or(small))?;
    if let Some(n) = options.layers {
        if n > shape.config.layers.len() {
            return Err(usage(format!("--layers {n}: expected 1 to {}", shape.config.layers.len())));
        }
        shape.config.layers.truncate(n);
    }
    options.check(&shape)?;
    let subject = Subject {
        shape,
        dtype: options.dtype.dtype(),
        ranks: options.ranks.clone(),
        adapters: options.most_adapters(),
        rank: options.rank,
    };
    let report = if options.ranks.topology(0)?.world() == 1 {
        options.measure(&gpu, &subject, None)?
    } else {
        let same = subject.clone();
        let work = move |gpu: &Gpu, line| follow(gpu, line, |rank| same.load(gpu, rank));
        let (mut others, line) = Others::start(&options.ranks, &options.device, options.device.tier(), work)?;
        let report = options.measure(&gpu, &subject, Some(line));
        others.join();
        report?
    };
    options.print(&report)
}

/// What is measured, on every rank.
#[derive(Clone)]
struct Subject {
    shape: Shape,
    dtype: DType,
    ranks: RankOptions,
    /// Number of adapters, and the rank of each.
    adapters: usize,
    rank: usize,
}

impl Subject {
    fn load(&self, gpu: &Gpu, rank: usize) -> anyhow::Result<Loaded> {
        let (topology, placement) = (self.ranks.topology(rank)?, self.ranks.rule()?);
        let options = LoadOptions { topology, placement, ..LoadOptions::default() };
        let config = &self.shape.config;
        let model = Model::random(gpu, config, self.dtype, &options)?;
        let adapter = |n: usize| synthetic::model_adapter(config, model.share(), self.rank, n as u32);
        let adapters = (0..self.adapters).map(|n| (n.to_string(), adapter(n))).collect();
        Ok((model, adapters))
    }
}

impl Options {
    fn check(&self, shape: &Shape) -> anyhow::Result<()> {
        let positions = shape.config.max_positions;
        // Of each sequence there is a token more than are timed.
        if let Some(tokens) = self.prefill.iter().find(|tokens| **tokens >= positions) {
            return Err(usage(format!("--prefill {tokens}: expected less than the model's context of {positions}")));
        }
        if self.prompt + self.decode >= positions {
            let (prompt, decode) = (self.prompt, self.decode);
            let message = format!(
                "--prompt {prompt} --decode {decode}: expected less than the model's context of {positions} together"
            );
            return Err(usage(message));
        }
        self.ranks.share(&shape.config, self.ranks.topology(0)?)?;
        if self.most_adapters() > 0 && self.ranks.tp.is_some() {
            return Err(usage("--tp: adapters are made for whole experts; use --ep, or --adapters 0"));
        }
        Ok(())
    }

    fn most_adapters(&self) -> usize {
        self.adapters.iter().copied().max().unwrap_or(0)
    }

    fn engine_options(&self) -> anyhow::Result<EngineOptions> {
        let prefill = self.prefill.iter().copied().max().unwrap_or(0);
        Ok(EngineOptions {
            max_sequences: self.sequences.iter().copied().max().unwrap_or(1),
            max_context: prefill.max(self.prompt + self.decode) + 1,
            max_step_tokens: self.step_tokens,
            adapter_slots: self.most_adapters().max(1),
            exchange: self.exchange.way(&self.ranks)?,
            ..EngineOptions::default()
        })
    }

    fn measure(&self, gpu: &Gpu, subject: &Subject, line: Option<Box<dyn Exchange>>) -> anyhow::Result<Report> {
        let spent = Arc::new(Spent::default());
        let (model, loaded) = subject.load(gpu, 0)?;
        let topology = model.topology();
        let mut engine = match line {
            None => Engine::new(gpu, model, self.engine_options()?)?,
            Some(line) => {
                let line = Box::new(Timed::new(line, &spent));
                Engine::with_ranks(gpu, model, self.engine_options()?, line)?
            }
        };
        let ids = loaded.iter().map(|(name, adapter)| engine.load_adapter(name, adapter));
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        let mut rows = Vec::new();
        for &adapters in &self.adapters {
            let used = &ids[..adapters];
            for &sequences in &self.sequences {
                let work = |engine: &mut Engine| decode(engine, &spent, sequences, self.prompt, self.decode, used);
                let took = self.runs(&mut engine, &work)?;
                let mut row = Row::new("decode", sequences, sequences * self.decode, adapters, took, self.decode);
                if self.profile {
                    submit(&mut engine, sequences, self.prompt, 4, used)?;
                    row.stages = profile(gpu, &mut engine, sequences)?;
                }
                rows.push(row);
            }
            for &tokens in self.prefill.iter().filter(|n| **n > 0) {
                let work = |engine: &mut Engine| prefill(engine, &spent, tokens, used.first().copied());
                let took = self.runs(&mut engine, &work)?;
                let mut row = Row::new("prefill", 1, tokens, adapters.min(1), took, tokens.div_ceil(self.step_tokens));
                if self.profile {
                    submit(&mut engine, 1, tokens, 1, &used[..adapters.min(1)])?;
                    row.stages = profile(gpu, &mut engine, 0)?;
                }
                rows.push(row);
            }
        }
        let report = Report {
            device: gpu.info().name.clone(),
            driver: driver(gpu.info()),
            tier: gpu.tier().to_string(),
            shape: subject.shape.name.clone(),
            layers: subject.shape.config.layers.len(),
            dtype: subject.dtype.name(),
            ranks: topology.world(),
            ep: topology.ep(),
            exchange: engine.options().exchange.map_or_else(String::new, |way| way.to_string()),
            bytes_resident: engine.model().bytes_resident(),
            adapter_bytes: engine.adapter_bytes(),
            rows,
        };
        engine.end()?;
        Ok(report)
    }

    /// The median of some runs after one that compiles shaders and brings adapters to the device.
    fn runs(&self, engine: &mut Engine, run: &dyn Fn(&mut Engine) -> anyhow::Result<Took>) -> anyhow::Result<Took> {
        run(engine)?;
        let took = (0..self.runs).map(|_| run(engine)).collect::<anyhow::Result<Vec<_>>>()?;
        let middle = |part: &dyn Fn(&Took) -> f64| median(took.iter().map(part).collect());
        Ok(Took {
            seconds: middle(&|t| t.seconds),
            exchange: Reading {
                seconds: middle(&|t| t.exchange.seconds),
                exchanges: middle(&|t| t.exchange.exchanges),
                bytes: middle(&|t| t.exchange.bytes),
            },
        })
    }

    fn print(&self, report: &Report) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match self.format {
            Format::Json => writeln!(out, "{}", serde_json::to_string_pretty(report)?)?,
            Format::Table => writeln!(out, "{}", report.text())?,
        }
        Ok(())
    }
}

/// What a run took.
#[derive(Debug, Clone, Copy)]
struct Took {
    seconds: f64,
    exchange: Reading,
}

impl Took {
    /// Since `begin`, when the line had done `before`.
    fn since(begin: Instant, spent: &Spent, before: Reading) -> Self {
        Self { seconds: begin.elapsed().as_secs_f64(), exchange: spent.read() - before }
    }
}

impl Row {
    fn new(what: &'static str, sequences: usize, tokens: usize, adapters: usize, took: Took, steps: usize) -> Self {
        let a_step = |n: f64| n / steps as f64;
        Self {
            what,
            sequences,
            tokens,
            adapters,
            tokens_s: tokens as f64 / took.seconds,
            ms: a_step(took.seconds * 1e3),
            exchange_ms: a_step(took.exchange.seconds * 1e3),
            exchanges: a_step(took.exchange.exchanges),
            exchange_bytes: a_step(took.exchange.bytes),
            stages: Vec::new(),
        }
    }
}

impl Report {
    fn text(&self) -> String {
        let ranks = if self.ranks == 1 {
            String::new()
        } else {
            format!(", {} ranks, ep {}, {}", self.ranks, self.ep, self.exchange)
        };
        let mut header = vec!["", "sequences", "tokens", "adapters", "tokens/s", "ms a step"];
        if self.ranks > 1 {
            header.extend(["exchange, ms", "exchanges", "sent"]);
        }
        let mut rows = table(header);
        for row in &self.rows {
            let mut cells = vec![
                row.what.to_owned(),
                row.sequences.to_string(),
                row.tokens.to_string(),
                if row.adapters == 0 { "-".to_owned() } else { row.adapters.to_string() },
                format!("{:.0}", row.tokens_s),
                format!("{:.2}", row.ms),
            ];
            if self.ranks > 1 {
                let share = 100.0 * row.exchange_ms / row.ms;
                cells.push(format!("{:.2} ({share:.0} %)", row.exchange_ms));
                cells.push(format!("{:.0}", row.exchanges));
                cells.push(bytes(row.exchange_bytes as u64));
            }
            rows.add_row(cells);
        }
        let mut stages = String::new();
        for row in self.rows.iter().filter(|row| !row.stages.is_empty()) {
            let step = match row.what {
                "prefill" => format!("first step of a prompt of {}", row.tokens),
                _ => format!("one step of {} sequences", row.sequences),
            };
            stages += &format!("\n{} adapters, us of {step}:\n", row.adapters);
            let lines = row.stages.iter().map(|s| format!("  {:>9.1}  {:>4} x {}", s.us, s.dispatches, s.stage));
            stages += &lines.collect::<Vec<_>>().join("\n");
        }
        format!(
            "{}, {}, {} tier{ranks}\n{}, {} layers in {}: {} of weights{} on rank 0\n{rows}{stages}",
            self.device,
            self.driver,
            self.tier,
            self.shape,
            self.layers,
            self.dtype,
            bytes(self.bytes_resident),
            if self.adapter_bytes > 0 {
                format!(" and {} of adapters", bytes(self.adapter_bytes))
            } else {
                String::new()
            },
        )
    }
}

/// Ids that differ from sequence to sequence.
fn prompt(engine: &Engine, sequence: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((sequence * 7919 + i * 104_729 + 13) % engine.config().vocab) as u32).collect()
}

fn submit(
    engine: &mut Engine,
    sequences: usize,
    prompt_tokens: usize,
    max_tokens: usize,
    adapters: &[AdapterId],
) -> anyhow::Result<()> {
    for s in 0..sequences {
        let adapter = (!adapters.is_empty()).then(|| adapters[s % adapters.len()]);
        let prompt = prompt(engine, s, prompt_tokens);
        engine.submit(Request { prompt, adapter, max_tokens, ..Request::default() })?;
    }
    Ok(())
}

/// From the moment when every sequence has its first token to the last token of all.
fn decode(
    engine: &mut Engine,
    spent: &Spent,
    sequences: usize,
    prompt_tokens: usize,
    tokens: usize,
    adapters: &[AdapterId],
) -> anyhow::Result<Took> {
    submit(engine, sequences, prompt_tokens, tokens + 1, adapters)?;
    let (mut first, mut begin) = (0, None);
    let mut seen = std::collections::HashSet::new();
    finish(engine, |event| {
        if let Event::Token { sequence, .. } = event
            && seen.insert(*sequence)
        {
            first += 1;
            if first == sequences {
                begin = Some((Instant::now(), spent.read()));
            }
        }
    })?;
    let (begin, before) = begin.context("a sequence without a token")?;
    Ok(Took::since(begin, spent, before))
}

/// What the dispatches of one step of the submitted requests take, each waiting for the one before: of the step after so many
/// tokens.
fn profile(gpu: &Gpu, engine: &mut Engine, after: usize) -> anyhow::Result<Vec<Stage>> {
    let mut tokens = 0;
    while tokens < after {
        engine.begin_step()?;
        tokens += engine.wait()?.iter().filter(|event| matches!(event, Event::Token { .. })).count();
    }
    let (ty, count) = (wgpu::QueryType::Timestamp, wgpu::QUERY_SET_MAX_QUERIES);
    let queries = gpu.device().create_query_set(&wgpu::QuerySetDescriptor { label: None, ty, count });
    engine.profile(&queries, count as usize);
    engine.begin_step()?;
    let labels = engine.profiled();
    finish(engine, |_| {})?;
    let ends = microseconds(gpu, &queries, labels.len())?;
    let mut stages: Vec<Stage> = Vec::new();
    for (i, label) in labels.iter().enumerate().skip(1) {
        let us = ends[i] - ends[i - 1];
        match stages.iter_mut().find(|s| s.stage == *label) {
            Some(stage) => (stage.dispatches, stage.us) = (stage.dispatches + 1, stage.us + us),
            None => stages.push(Stage { stage: label.clone(), dispatches: 1, us }),
        }
    }
    stages.sort_by(|a, b| b.us.total_cmp(&a.us));
    Ok(stages)
}

/// From submission to the first token.
fn prefill(engine: &mut Engine, spent: &Spent, tokens: usize, adapter: Option<AdapterId>) -> anyhow::Result<Took> {
    let prompt = prompt(engine, 0, tokens);
    let (begin, before) = (Instant::now(), spent.read());
    engine.submit(Request { prompt, adapter, max_tokens: 1, ..Request::default() })?;
    finish(engine, |_| {})?;
    Ok(Took::since(begin, spent, before))
}

fn finish(engine: &mut Engine, mut seen: impl FnMut(&Event)) -> anyhow::Result<()> {
    while !engine.is_idle() {
        while engine.begin_step()? {}
        for event in engine.wait()? {
            if let Event::Failed { error, .. } = event {
                return Err(error.into());
            }
            seen(&event);
        }
    }
    Ok(())
}
