//! `wgmoe run`: answer prompts, all in one batch.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use clap::{ArgGroup, Args};
use serde_json::json;
use wgmoe::engine::Sampling;
use wgmoe::text::Message;

use crate::files::{Files, ModelFiles};
use crate::requests::{Placed, Prompt, PromptLine, read_lines};
use crate::session::{Answer, Job, Session, generate_with_bar, speed};
use crate::table::{cell, table};
use crate::values::{number, probability, temperature};
use crate::{Device, Format, usage};

/// Answer one prompt, or a file of prompts in one batch, each with its own adapter
#[derive(Args)]
#[command(group = ArgGroup::new("input").required(true), after_help = "\
A line of the --prompts file is a JSON object; missing keys take the values of
the options:
  {\"adapter\": \"shout\", \"messages\": [{\"role\": \"user\", \"content\": \"hello world\"}]}
  {\"adapter\": null, \"prompt\": \"hello world\\n\", \"max_tokens\": 40}
  {\"ids\": [73, 70, 77, 77, 80, 200]}
`\"adapter\": null` is the base model. Every line is checked before any work
starts, and all lines run in one batch. Each line is sampled with the seed
alone, whatever else is in the batch.

Generation stops at the stop tokens of generation_config.json (else
config.json), after --max-tokens, or where the model's context ends.

Examples:
  wgmoe run --model base --message 'mixture of experts'
  wgmoe run --model base --lora shout=adapters/shout --adapter shout --prompt $'hello world\\n'
  wgmoe run --model base --lora shout=adapters/shout --lora mirror=adapters/mirror \\
      --prompts prompts.jsonl --format json")]
pub struct Options {
    #[command(flatten)]
    files: ModelFiles,
    /// Adapter for the prompts that name none [default: the base model]
    #[arg(long, value_name = "NAME", help_heading = "Prompt")]
    adapter: Option<String>,
    /// A user message; the model's chat template makes the prompt of it
    #[arg(long, value_name = "TEXT", group = "input", help_heading = "Prompt")]
    message: Option<String>,
    /// A raw prompt, taken as it is
    #[arg(long, value_name = "TEXT", group = "input", help_heading = "Prompt")]
    prompt: Option<String>,
    /// A file of JSON lines, one prompt each (`-` is standard input)
    #[arg(long, value_name = "FILE.jsonl", group = "input", help_heading = "Prompt")]
    prompts: Option<PathBuf>,
    /// Longest answer, in tokens
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = number(1..=u32::MAX as usize), help_heading = "Sampling")]
    max_tokens: usize,
    /// 0 takes the best token each time (greedy)
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = temperature, help_heading = "Sampling")]
    temperature: f32,
    /// Sample from the smallest set of tokens that has this probability; 1 is off
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = probability, help_heading = "Sampling")]
    top_p: f32,
    /// Sample from the N best tokens; 0 is off
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number(0..=u32::MAX), help_heading = "Sampling")]
    top_k: u32,
    /// Seed of the sampling of every prompt
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number(0..=u64::MAX), help_heading = "Sampling")]
    seed: u64,
    /// Go on after a stop token, up to --max-tokens
    #[arg(long, help_heading = "Sampling")]
    ignore_eos: bool,
    /// A table (one prompt: the text as it comes), or one JSON object a line, in input order
    #[arg(long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    format: Format,
    #[command(flatten)]
    device: Device,
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    let Some(world) = options.files.join(&options.device)? else { return Ok(()) };
    let sampling = options.sampling();
    let tier = options.device.tier();
    let inputs = options.inputs()?;
    let files = options.files.open(&world)?;
    let jobs = inputs.iter().map(|input| options.job(&files, input, &sampling)).collect::<Result<Vec<_>, _>>()?;
    let mut session = files.start(world, &options.device, tier, &jobs)?;
    match options.format {
        Format::Table if jobs.len() == 1 => stream(&files, &mut session, &jobs),
        format => batch(&files, &mut session, &jobs, format),
    }
}

/// A prompt with everything a line may say about it.
struct Input {
    place: String,
    adapter: Option<String>,
    prompt: Prompt,
    max_tokens: usize,
}

impl Options {
    fn sampling(&self) -> Sampling {
        let Self { temperature, top_k, top_p, seed, .. } = *self;
        Sampling { temperature, top_k, top_p, seed }
    }

    /// The prompts of the options or of the file; their adapters are known.
    fn inputs(&self) -> anyhow::Result<Vec<Input>> {
        self.files.check_adapter("--adapter", self.adapter.as_deref())?;
        let one = |place: &str, prompt| {
            vec![Input { place: place.into(), adapter: self.adapter.clone(), prompt, max_tokens: self.max_tokens }]
        };
        let inputs = match (&self.message, &self.prompt, &self.prompts) {
            (Some(text), ..) => one("--message", Prompt::Messages(vec![Message::user(text)])),
            (_, Some(text), _) => one("--prompt", Prompt::Text(text.clone())),
            (.., Some(path)) => {
                let lines = read_lines::<PromptLine>("--prompts", path)?;
                lines.into_iter().map(|line| self.line(line)).collect::<Result<_, _>>()?
            }
            (None, None, None) => return Err(usage("expected --message, --prompt or --prompts")),
        };
        match inputs.iter().find(|input| input.max_tokens == 0) {
            Some(input) => Err(usage(format!("{}: max_tokens: expected 1 or more, got 0", input.place))),
            None => Ok(inputs),
        }
    }

    fn line(&self, mut line: Placed<PromptLine>) -> anyhow::Result<Input> {
        let prompt = line.value.prompt().map_err(|reason| usage(format!("{}: {reason}", line.place)))?;
        let adapter = line.value.adapter.unwrap_or_else(|| self.adapter.clone());
        self.files.check_adapter(&line.place, adapter.as_deref())?;
        Ok(Input { place: line.place, adapter, prompt, max_tokens: line.value.max_tokens.unwrap_or(self.max_tokens) })
    }

    fn job(&self, files: &Files, input: &Input, sampling: &Sampling) -> anyhow::Result<Job> {
        let ids = files.ids(&input.place, &input.prompt)?;
        let context = files.config().max_positions;
        let room = context - ids.len();
        if room == 0 {
            return Err(usage(format!(
                "{}: the prompt has {} tokens and leaves no room for an answer in the model's context of {context}",
                input.place,
                ids.len()
            )));
        }
        Ok(Job {
            place: input.place.clone(),
            adapter: input.adapter.clone(),
            ids,
            max_tokens: input.max_tokens.min(room),
            sampling: *sampling,
            stop_ids: if self.ignore_eos { Vec::new() } else { files.config().stop_ids.clone() },
        })
    }
}

/// One prompt for a person: text as it comes (ids where there is no tokenizer).
fn stream(files: &Files, session: &mut Session, jobs: &[Job]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let mut written: std::io::Result<()> = Ok(());
    let mut show = |text: &str| {
        if written.is_ok() {
            written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    };
    let mut text = files.tokenizer().map(|tokenizer| tokenizer.stream());
    let start = Instant::now();
    let answers = session.generate(jobs, |job, id| {
        if jobs[job].stop_ids.contains(&id) {
            return;
        }
        match &mut text {
            Some(stream) => show(&stream.push(id).unwrap_or_default()),
            None => show(&format!("{id} ")),
        }
    })?;
    let elapsed = start.elapsed();
    show(&text.and_then(|stream| stream.finish()).unwrap_or_default());
    show("\n");
    written?;
    report(session, &answers, elapsed);
    Ok(())
}

fn batch(files: &Files, session: &mut Session, jobs: &[Job], format: Format) -> anyhow::Result<()> {
    let (answers, elapsed) = generate_with_bar(session, jobs)?;
    let mut out = std::io::stdout().lock();
    match format {
        Format::Json => {
            for (job, answer) in jobs.iter().zip(&answers) {
                let line = json!({
                    "adapter": job.adapter,
                    "prompt_ids": job.ids,
                    "ids": answer.ids,
                    "text": answer.text(files)?,
                    "finish_reason": answer.finish(),
                });
                writeln!(out, "{line}")?;
            }
        }
        Format::Table => {
            let mut table = table(["adapter", "prompt", "answer", "finish"]);
            for (job, answer) in jobs.iter().zip(&answers) {
                let adapter = job.adapter.clone().unwrap_or_else(|| "(base)".into());
                let prompt = shown(files, &job.ids)?;
                table.add_row([adapter, prompt, shown(files, answer.content())?, answer.finish().into()]);
            }
            writeln!(out, "{table}")?;
        }
    }
    report(session, &answers, elapsed);
    Ok(())
}

/// Ids as text for a table cell, or as numbers where there is no tokenizer.
fn shown(files: &Files, ids: &[u32]) -> anyhow::Result<String> {
    Ok(match files.tokenizer() {
        Some(tokenizer) => cell(&tokenizer.decode(ids)?),
        None => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
    })
}

/// Where and how fast, on stderr.
fn report(session: &Session, answers: &[Answer], elapsed: std::time::Duration) {
    let tokens = answers.iter().map(|answer| answer.ids.len()).sum();
    eprintln!("{} · {}", session.whereabouts(), speed(tokens, elapsed));
}
