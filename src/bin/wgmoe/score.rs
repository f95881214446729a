//! `wgmoe score`: log-probabilities of given texts, for evaluation harnesses.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::files::ModelFiles;
use crate::requests::{ScoreLine, read_lines};
use crate::session::{Job, bar};
use crate::{Device, logits, usage};

/// Give the log-probability of every token of given texts, and the best alternatives
#[derive(Args)]
#[command(after_help = "\
A line of the --requests file is a JSON object:
  {\"adapter\": \"shout\", \"text\": \"hello world\\nHELLO WORLD\", \"top_logprobs\": 5}
  {\"ids\": [73, 70, 77, 77, 80, 200]}
The answer, one line each in input order, natural logarithms:
  {\"adapter\": ..., \"ids\": [...], \"logprobs\": [null, ...], \"top_logprobs\": [[[id, logprob], ...], ...]}
logprobs[i] belongs to ids[i] given what precedes it; top_logprobs[i] are the
K best continuations after ids[0..=i], best first, ties to the lower id, so
the last entry predicts the next token. All requests run in one batch, and
every line is checked before any work starts.

Example:
  wgmoe score --model base --lora shout=adapters/shout --requests requests.jsonl > answers.jsonl")]
pub struct Options {
    #[command(flatten)]
    files: ModelFiles,
    /// A file of JSON lines, one request each (`-` is standard input)
    #[arg(long, value_name = "FILE.jsonl")]
    requests: PathBuf,
    /// JSON lines are the only format
    #[arg(long, value_enum, default_value_t = OnlyJson::Json, value_name = "FORMAT")]
    format: OnlyJson,
    #[command(flatten)]
    device: Device,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OnlyJson {
    Json,
}

#[derive(Serialize)]
struct Scored<'a> {
    adapter: Option<&'a str>,
    ids: &'a [u32],
    logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Vec<(usize, f64)>>,
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    let OnlyJson::Json = options.format;
    let Some(world) = options.files.join(&options.device)? else { return Ok(()) };
    let tier = options.device.tier();
    let mut lines = read_lines::<ScoreLine>("--requests", &options.requests)?;
    for line in &lines {
        options.files.check_adapter(&line.place, line.value.adapter.as_deref())?;
    }
    let files = options.files.open(&world)?;
    let vocab = files.config().vocab;
    let mut jobs = Vec::new();
    for line in &mut lines {
        let prompt = line.value.prompt().map_err(|reason| usage(format!("{}: {reason}", line.place)))?;
        if line.value.top_logprobs > vocab {
            let k = line.value.top_logprobs;
            return Err(usage(format!("{}: top_logprobs: expected at most {vocab}, got {k}", line.place)));
        }
        let ids = files.ids(&line.place, &prompt)?;
        jobs.push(Job::score(line.place.clone(), line.value.adapter.clone(), ids));
    }
    let mut session = files.start(world, &options.device, tier, &jobs)?;
    let mut answers: Vec<_> = jobs
        .iter()
        .map(|job| Scored {
            adapter: job.adapter.as_deref(),
            ids: &job.ids,
            logprobs: vec![None; job.ids.len()],
            top_logprobs: vec![Vec::new(); job.ids.len()],
        })
        .collect();
    let bar = bar(jobs.iter().map(|job| job.ids.len()).sum(), "tokens");
    session.score(&jobs, |job, position, row| {
        let normaliser = logits::log_sum_exp(row)?;
        if let Some(next) = jobs[job].ids.get(position + 1) {
            answers[job].logprobs[position + 1] = Some(f64::from(row[*next as usize]) - normaliser);
        }
        answers[job].top_logprobs[position] = logits::top(row, normaliser, lines[job].value.top_logprobs);
        bar.inc(1);
        Ok(())
    })?;
    bar.finish_and_clear();
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for answer in &answers {
        writeln!(out, "{}", serde_json::to_string(answer)?)?;
    }
    out.flush()?;
    Ok(())
}
