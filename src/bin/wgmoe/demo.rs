//! `wgmoe demo`: the main job on the demonstration model, checked against its references.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use wgmoe::engine::{FinishReason, Sampling};
use wgmoe::gpu::Tier;
use wgmoe::text::Message;

use crate::files::{Files, ModelFiles};
use crate::perplexity::{self, Measured};
use crate::ranks::{ExchangeOption, RankOptions, World};
use crate::requests::{Prompt, read_lines};
use crate::session::{Answer, Job, Session, generate_with_bar, speed};
use crate::table::{bytes, cell, table};
use crate::values::folder;
use crate::{Device, Format};

/// Longest answer: the longest right one has fewer than 60 tokens.
const MAX_TOKENS: usize = 128;
/// Wrong answers that are shown in full.
const SHOWN_WRONG: usize = 10;

/// Answer six prompts with base and four adapters in ONE batch, and mark each answer right or wrong
#[derive(Args)]
#[command(after_help = "\
The base model repeats its prompt and each adapter transforms it, so that a
person sees at once whether the right adapter met the right sequence. An
answer is right when its text and its token ids equal the reference. The exit
code is 1 if anything is wrong.

Examples:
  wgmoe demo
  wgmoe demo --full --all-tiers")]
pub struct Options {
    /// The demonstration: base/, adapters/, reference.json, eval.jsonl, eval.safetensors
    #[arg(long, value_name = "DIR", default_value = "examples/demo")]
    dir: PathBuf,
    /// Also check all answers of eval.jsonl and the perplexity of every pair of adapter and task
    #[arg(long)]
    full: bool,
    /// Run on every tier that the device has, not only on the best
    #[arg(long, conflicts_with = "tier")]
    all_tiers: bool,
    /// Tables, or one JSON object a tier
    #[arg(long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    format: Format,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    exchange: ExchangeOption,
    #[command(flatten)]
    device: Device,
}

/// What reference.json holds; the keys keep the file's order.
#[derive(Deserialize)]
struct Reference {
    /// `base`, then the adapters.
    exact_match: Map<String, Value>,
    /// Adapter (or `base`) -> task -> perplexity.
    perplexity: Map<String, Value>,
    greedy: Vec<Greedy>,
}

/// One reference answer.
#[derive(Deserialize)]
struct Greedy {
    prompt: String,
    adapter: Option<String>,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    text: String,
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    let tier = options.device.tier();
    for file in ["reference.json", "base/config.json"] {
        folder("--dir", &options.dir, file)?;
    }
    let path = options.dir.join("reference.json");
    let place = || format!("`{}`", path.display());
    let reference: Reference =
        serde_json::from_reader(BufReader::new(File::open(&path).with_context(place)?)).with_context(place)?;
    let adapters: Vec<_> = reference.exact_match.keys().filter(|name| *name != "base").cloned().collect();
    for name in &adapters {
        folder("--dir", &options.dir, &format!("adapters/{name}/adapter_config.json"))?;
    }
    let loras = adapters.iter().map(|name| (name.clone(), options.dir.join("adapters").join(name))).collect();
    let files = ModelFiles {
        model: options.dir.join("base"),
        loras,
        adapter_memory: None,
        trace_routing: None,
        ranks: options.ranks.clone(),
        exchange: options.exchange.clone(),
        #[cfg(feature = "mpi")]
        mpi: false,
    };
    let world = files.ranks.topology(0)?.world();
    let files = files.open(&World::Threads)?;
    let tiers: Vec<Option<Tier>> = if options.all_tiers {
        options.device.open()?.info().tiers.iter().copied().map(Some).collect()
    } else {
        vec![tier]
    };
    let mut wrong = 0;
    for tier in tiers {
        wrong += Demo { options, world, files: &files, reference: &reference, adapters: &adapters }.on(tier)?;
    }
    match wrong {
        0 => Ok(()),
        n => bail!("{n} results differ from the references"),
    }
}

struct Demo<'a> {
    options: &'a Options,
    /// Number of ranks.
    world: usize,
    files: &'a Files,
    reference: &'a Reference,
    adapters: &'a [String],
}

impl Demo<'_> {
    /// Everything on one tier; the number of wrong results.
    fn on(&self, tier: Option<Tier>) -> anyhow::Result<usize> {
        let table = self.options.format == Format::Table;
        let greedy = self.greedy_jobs()?;
        let eval = if self.options.full { Some(self.eval()?) } else { None };
        let all: Vec<Job> = greedy.iter().chain(eval.iter().flat_map(|eval| &eval.jobs)).cloned().collect();
        let world = if self.world == 1 { World::Alone } else { World::Threads };
        let mut session = self.files.start(world, &self.options.device, tier, &all)?;
        let (answers, elapsed) = generate_with_bar(&mut session, &greedy)?;
        let (mut wrong, shown) = self.check_greedy(&answers)?;
        let tokens: usize = answers.iter().map(|answer| answer.ids.len()).sum();
        let mut summary = json!({
            "device": session.gpu.info().name,
            "driver": crate::devices::driver(session.gpu.info()),
            "tier": session.gpu.tier().to_string(),
            "answers": answers.len(),
            "right": answers.len() - wrong,
            "tokens": tokens,
            "seconds": elapsed.as_secs_f64(),
            "bytes_loaded": session.bytes_loaded,
        });
        if table {
            let mut out = std::io::stdout().lock();
            writeln!(out, "{shown}")?;
            writeln!(
                out,
                "{} of {} right, in one batch · {} · {} · {} loaded",
                answers.len() - wrong,
                answers.len(),
                session.whereabouts(),
                speed(tokens, elapsed),
                bytes(session.bytes_loaded),
            )?;
        }
        if let Some(eval) = eval {
            let (answers, elapsed) = generate_with_bar(&mut session, &eval.jobs)?;
            let (bad, shown) = self.check_eval(&eval, &answers)?;
            let tokens = answers.iter().map(|answer| answer.ids.len()).sum();
            summary["eval_answers"] = answers.len().into();
            summary["eval_right"] = (answers.len() - bad).into();
            if table {
                let mut out = std::io::stdout().lock();
                let right = answers.len() - bad;
                writeln!(out, "\n{shown}\n{right} of {} right · {}", answers.len(), speed(tokens, elapsed))?;
            }
            let (off, shown, worst) = self.check_perplexity(&mut session)?;
            summary["perplexity_pairs_off"] = off.into();
            summary["perplexity_worst_relative_error"] = worst.into();
            if table {
                writeln!(std::io::stdout().lock(), "\n{shown}\nlargest relative error {:.4} %", worst * 100.0)?;
            }
            wrong += bad + off;
        }
        if !table {
            writeln!(std::io::stdout().lock(), "{summary}")?;
        }
        Ok(wrong)
    }

    fn job(&self, place: String, adapter: Option<String>, ids: Vec<u32>) -> Job {
        let stop_ids = self.files.config().stop_ids.clone();
        Job { place, adapter, ids, max_tokens: MAX_TOKENS, sampling: Sampling::default(), stop_ids }
    }

    /// The thirty reference prompts, through the tokenizer, whose ids are checked too.
    fn greedy_jobs(&self) -> anyhow::Result<Vec<Job>> {
        let job = |(index, case): (usize, &Greedy)| {
            let place = format!("reference.json greedy[{index}]");
            let message = Message::user(case.prompt.trim_end_matches('\n'));
            let ids = self.files.ids(&place, &Prompt::Messages(vec![message]))?;
            if ids != case.prompt_ids {
                bail!("{place}: expected prompt ids {:?}, got {ids:?}", case.prompt_ids);
            }
            Ok(self.job(place, case.adapter.clone(), ids))
        };
        self.reference.greedy.iter().enumerate().map(job).collect()
    }

    /// One row a prompt, one column an adapter, a mark in every cell.
    fn check_greedy(&self, answers: &[Answer]) -> anyhow::Result<(usize, comfy_table::Table)> {
        let mut prompts: Vec<&str> = Vec::new();
        for case in &self.reference.greedy {
            if !prompts.contains(&case.prompt.as_str()) {
                prompts.push(&case.prompt);
            }
        }
        let columns: Vec<Option<&str>> =
            std::iter::once(None).chain(self.adapters.iter().map(|name| Some(name.as_str()))).collect();
        let header = columns.iter().map(|name| name.unwrap_or("base"));
        let mut table = table(std::iter::once("prompt").chain(header));
        let mut wrong = 0;
        for prompt in prompts {
            let mut row = vec![cell(prompt.trim_end_matches('\n'))];
            for column in &columns {
                let pair = self.reference.greedy.iter().zip(answers);
                let mut found = pair.filter(|(case, _)| case.prompt == prompt && case.adapter.as_deref() == *column);
                let Some((case, answer)) = found.next() else {
                    row.push(String::new());
                    continue;
                };
                let text = answer.text(self.files)?.unwrap_or_default();
                let right = text == case.text && answer.ids == case.output_ids;
                wrong += usize::from(!right);
                row.push(format!("{} {}", mark(right), cell(&text)));
            }
            table.add_row(row);
        }
        Ok((wrong, table))
    }

    /// Every phrase of eval.jsonl for base and each adapter, with the right answers.
    fn eval(&self) -> anyhow::Result<Eval> {
        let path = self.options.dir.join("eval.jsonl");
        let mut eval = Eval { jobs: Vec::new(), expected: Vec::new() };
        for line in read_lines::<Map<String, Value>>("--dir", &path)? {
            let text = |key: &str| {
                let value = line.value.get(key).and_then(Value::as_str);
                value.with_context(|| format!("{}: expected text for `{key}`", line.place))
            };
            let ids = self.files.ids(&line.place, &Prompt::Messages(vec![Message::user(text("prompt")?)]))?;
            for name in std::iter::once("base").chain(self.adapters.iter().map(String::as_str)) {
                let adapter = (name != "base").then(|| name.to_owned());
                eval.jobs.push(self.job(line.place.clone(), adapter, ids.clone()));
                eval.expected.push(text(name)?.to_owned());
            }
        }
        Ok(eval)
    }

    /// Right answers by adapter; the first wrong ones go to stderr.
    fn check_eval(&self, eval: &Eval, answers: &[Answer]) -> anyhow::Result<(usize, comfy_table::Table)> {
        let mut table = table(["adapter", "right", "of"]);
        let mut wrong = 0;
        for column in std::iter::once(None).chain(self.adapters.iter().map(Some)) {
            let (mut right, mut total) = (0, 0);
            for ((job, expected), answer) in eval.jobs.iter().zip(&eval.expected).zip(answers) {
                if job.adapter.as_ref() != column {
                    continue;
                }
                total += 1;
                let text = answer.text(self.files)?.unwrap_or_default();
                if text == *expected && answer.reason == FinishReason::Stop {
                    right += 1;
                    continue;
                }
                wrong += 1;
                if wrong <= SHOWN_WRONG {
                    let name = column.map_or("base", String::as_str);
                    eprintln!("{}: {name}: expected `{}`, got `{}`", job.place, cell(expected), cell(&text));
                }
            }
            table.add_row([column.map_or("base", String::as_str).to_owned(), right.to_string(), total.to_string()]);
        }
        Ok((wrong, table))
    }

    /// Perplexity of every pair as a matrix with its relative error; the number of pairs off, and the worst error.
    fn check_perplexity(&self, session: &mut Session) -> anyhow::Result<(usize, comfy_table::Table, f64)> {
        let tasks = perplexity::read_tasks(self.files, &self.options.dir.join("eval.safetensors"))?;
        let mut pairs = Vec::new();
        let mut expected = Vec::new();
        for (name, row) in &self.reference.perplexity {
            let adapter = (name != "base").then_some(name.as_str());
            for (task_name, value) in row.as_object().into_iter().flatten() {
                let task = tasks.iter().find(|task| task.name == *task_name);
                pairs.push((adapter, task.with_context(|| format!("eval.safetensors: no task `{task_name}`"))?));
                expected.push(value.as_f64().context("reference.json: perplexity: expected numbers")?);
            }
        }
        let jobs = perplexity::jobs(&pairs);
        let measured = perplexity::measure(session, &pairs, &jobs)?;
        let mut columns: Vec<&str> = Vec::new();
        for (_, task) in &pairs {
            if !columns.contains(&task.name.as_str()) {
                columns.push(&task.name);
            }
        }
        let mut table = table(std::iter::once("perplexity").chain(columns.iter().copied()));
        let (mut off, mut worst) = (0, 0.0_f64);
        for name in self.reference.perplexity.keys() {
            let mut row = vec![name.clone()];
            for column in &columns {
                let found = |(m, _): &(&Measured, &f64)| m.task == *column && m.adapter.unwrap_or("base") == *name;
                let Some((measured, expected)) = measured.iter().zip(&expected).find(found) else {
                    row.push(String::new());
                    continue;
                };
                let error = (measured.perplexity - expected).abs() / expected;
                let right = error <= tolerance(*expected);
                off += usize::from(!right);
                worst = if error.is_nan() { f64::NAN } else { worst.max(error) };
                row.push(format!("{} {:.5}\n{:.4} %", mark(right), measured.perplexity, error * 100.0));
            }
            table.add_row(row);
        }
        Ok((off, table, worst))
    }
}

struct Eval {
    jobs: Vec<Job>,
    /// The right text of each job.
    expected: Vec<String>,
}

/// Relative error allowed on a perplexity: large ones magnify small differences of logits.
fn tolerance(expected: f64) -> f64 {
    if expected > 1000.0 { 0.01 } else { 0.005 }
}

fn mark(right: bool) -> char {
    if right { '✓' } else { '✗' }
}

#[cfg(test)]
mod tests {
    use super::tolerance;

    #[test]
    fn large_perplexities_are_allowed_twice_the_error() {
        assert_eq!((tolerance(1.0), tolerance(1000.0), tolerance(1000.1)), (0.005, 0.005, 0.01));
    }
}
