//! The command line: one file a command, and those that commands share.

mod bench;
mod demo;
mod devices;
mod files;
mod inspect;
mod logits;
mod perplexity;
mod placement;
mod ranks;
mod requests;
mod run;
mod score;
mod session;
mod table;
mod target;
mod values;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use wgmoe::ErrorKind;
use wgmoe::gpu::{Gpu, GpuInfo, GpuOptions, Tier};
use wgmoe::plan::tuning::TuningTable;

/// Run mixture-of-experts models with a different LoRA adapter for each prompt of a batch, on any GPU.
#[derive(Parser)]
#[command(
    name = "wgmoe",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    after_help = "\
A model is a Hugging Face folder (config.json, *.safetensors, and
tokenizer.json where text is used); an adapter is a PEFT folder
(adapter_config.json, adapter_model.safetensors).

Examples:
  wgmoe devices
  wgmoe run --model examples/demo/base --lora shout=examples/demo/adapters/shout \\
      --adapter shout --message 'mixture of experts'

Answers go to stdout; progress, timing and errors go to stderr. Exit code 1 is
a failure, 2 a mistake in the command line or in a request. WGMOE_LOG=info (or
debug, trace) shows what happens inside."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Devices(devices::Options),
    Inspect(inspect::Options),
    Run(run::Options),
    Score(score::Options),
    Perplexity(perplexity::Options),
    Placement(placement::Options),
    Demo(demo::Options),
    Bench(bench::Options),
}

/// Where to run.
#[derive(Args)]
#[command(next_help_heading = "Device")]
struct Device {
    /// GPU to use, by index or by a part of its name, as `wgmoe devices` shows them [default: the first]
    #[arg(long, value_name = "INDEX|NAME", value_parser = NonEmptyStringValueParser::new())]
    device: Option<String>,
    /// Kernel tier; `auto` takes the best one that the device can run
    #[arg(long, value_enum, default_value_t = TierChoice::Auto, value_name = "TIER")]
    tier: TierChoice,
    /// Thresholds of the tiers and cuts of products in the place of the built-in ones, as `wgmoe bench tune` writes them
    #[arg(long, value_name = "FILE")]
    tuning: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TierChoice {
    Auto,
    Baseline,
    Subgroup,
    Matrix,
}

/// How answers are written.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    Table,
    /// For programs
    Json,
}

impl Device {
    /// The tier asked for, `None` for the best.
    fn tier(&self) -> Option<Tier> {
        match self.tier {
            TierChoice::Auto => None,
            TierChoice::Baseline => Some(Tier::Baseline),
            TierChoice::Subgroup => Some(Tier::Subgroup),
            TierChoice::Matrix => Some(Tier::Matrix),
        }
    }

    /// Opens the device; a `--device` that matches none is a usage error that lists what there is.
    fn open(&self) -> anyhow::Result<Gpu> {
        self.open_tier(self.tier())
    }

    /// The device number `index`, else the one asked for.
    fn open_at(&self, index: Option<usize>, tier: Option<Tier>) -> anyhow::Result<Gpu> {
        match index {
            Some(index) => {
                let table = self.table()?;
                let gpu = Gpu::new(&GpuOptions { device: Some(index.to_string()), tier })?;
                Ok(gpu.with_tuning(&table)?)
            }
            None => self.open_tier(tier),
        }
    }

    /// The thresholds and cuts asked for, of all tiers.
    fn table(&self) -> anyhow::Result<TuningTable> {
        match &self.tuning {
            Some(path) => {
                values::file("--tuning", path, "a file as `wgmoe bench tune` writes it")?;
                TuningTable::read(path).context("--tuning")
            }
            None => Ok(TuningTable::built_in()?),
        }
    }

    /// The first of `all` devices that is asked for; where none is, a usage error that lists them.
    fn named<'a>(&self, all: &'a [GpuInfo]) -> anyhow::Result<Option<&'a GpuInfo>> {
        let Some(wanted) = &self.device else { return Ok(all.first()) };
        let found = all.iter().find(|info| info.matches(wanted, all.len()));
        let listed: Vec<_> = all.iter().map(|info| format!("index {} is `{}`", info.index, info.name)).collect();
        let listed = if all.is_empty() { "there is none".to_owned() } else { listed.join(", ") };
        let message = format!("--device `{wanted}`: expected the index of a device or a part of its name; {listed}");
        found.map(Some).ok_or_else(|| usage(message))
    }

    fn open_tier(&self, tier: Option<Tier>) -> anyhow::Result<Gpu> {
        let table = self.table()?;
        let options = GpuOptions { device: self.device.clone(), tier };
        let gpu = Gpu::new(&options).map_err(|error| match Gpu::list() {
            all if all.is_empty() => error.into(),
            all => self.named(&all).err().unwrap_or(error.into()),
        })?;
        Ok(gpu.with_tuning(&table)?)
    }
}

/// A mistake of the caller: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

/// A mistake of the caller, in words that name the option, the file or the line.
fn usage(message: impl Into<String>) -> anyhow::Error {
    Usage(message.into()).into()
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::new().filter_or("WGMOE_LOG", "warn")).init();
    let result = match parse().command {
        Command::Devices(options) => devices::run(&options),
        Command::Inspect(options) => inspect::run(&options),
        Command::Run(options) => run::run(&options),
        Command::Score(options) => score::run(&options),
        Command::Perplexity(options) => perplexity::run(&options),
        Command::Placement(options) => placement::run(&options),
        Command::Demo(options) => demo::run(&options),
        Command::Bench(options) => bench::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}

/// The command line, or out with what is wrong with it.
fn parse() -> Cli {
    let command = values::take_negative(Cli::command());
    let parsed = command.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| {
        let first = std::env::args_os().nth(1).unwrap_or_default();
        values::explained(error, &first.to_string_lossy()).exit()
    })
}

/// 2 where the command line or a request is at fault, 1 for everything else.
fn exit_code(error: &anyhow::Error) -> u8 {
    let request = error.downcast_ref::<wgmoe::Error>().is_some_and(|error| error.kind() == ErrorKind::Request);
    if request || error.downcast_ref::<Usage>().is_some() { 2 } else { 1 }
}

/// The reader of stdout has gone (`| head`): nothing is left to say.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
