//! `wgmoe inspect`: what a model folder holds and what each rank would read and keep of it, from headers alone.

mod report;
mod svg;
mod text;

use std::io::Write;
use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, ValueEnum};
use wgmoe::checkpoint::Checkpoint;
use wgmoe::gpu::Gpu;
use wgmoe::placement::Topology;
use wgmoe::plan::read::ScalePolicy;

use crate::devices::tiers;
use crate::ranks::RankOptions;
use crate::target::Target;
use crate::values::{folder, number, size};
use crate::{Device, Format, usage};

/// Binding limit where there is no device: what every WebGPU device has.
const DEFAULT_BINDING_BYTES: u64 = 128 << 20;

/// Show what a model folder holds, and what each rank would read, skip and keep of it
#[derive(Args)]
#[command(mut_arg("tuning", |arg| arg.hide(true)), after_help = "\
Headers alone are read, so this takes no time for a model of any size. W ranks (--tp, else --ep) form --ep
groups; a group holds its share of the experts, and its W / ep ranks share their width. With --tp all W ranks
share out the heads of attention where these divide; otherwise each has all of attention. A placement file
is a JSON list with the owners (groups, from 0) of each expert: [[0], [1], [0, 1], ...].

Exit code 1 when something does not match or does not fit; the report is still printed.

Examples:
  wgmoe inspect examples/demo/base
  wgmoe inspect examples/demo/base --tp 4 --ep 2 --all-ranks --svg ranks.svg
  wgmoe inspect model --ep 8 --rank 3 --placement round-robin --binding-limit 128MiB --memory 24GiB
  wgmoe inspect model --lora adapters/one --lora adapters/two --format json | jq '.adapters[].sites'")]
pub struct Options {
    /// Model folder: config.json and *.safetensors
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    ranks: RankOptions,
    /// The rank to show
    #[arg(long, value_name = "R", default_value_t = 0, value_parser = number(0..=Topology::MAX_RANKS - 1),
        conflicts_with = "all_ranks", help_heading = "Ranks")]
    rank: usize,
    /// Show every rank
    #[arg(long, help_heading = "Ranks")]
    all_ranks: bool,
    /// Block scales to read: those of the rank's own experts, or all
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = Scales::Owned, help_heading = "Ranks")]
    scales: Scales,
    /// Adapter folder to check against the model; give it several times for several adapters
    #[arg(long = "lora", value_name = "DIR")]
    loras: Vec<PathBuf>,
    /// A table, or one JSON object
    #[arg(long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    format: Format,
    /// Also draw what each rank reads
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Largest binding, such as 128MiB [default: that of the device, or 128MiB without one]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Device")]
    binding_limit: Option<u64>,
    /// Memory that the weights must fit into, such as 24GiB [default: not checked]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Device")]
    memory: Option<u64>,
    #[command(flatten)]
    device: Device,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scales {
    Owned,
    All,
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    if options.device.tuning.is_some() {
        return Err(usage("--tuning: nothing is run here"));
    }
    let world = options.ranks.topology(0)?.world();
    if options.rank >= world {
        return Err(usage(format!("--rank {}: expected a rank below {world}, the number of ranks", options.rank)));
    }
    let first = options.ranks.topology(options.rank)?;
    let ranks = if options.all_ranks { 0..first.world() } else { first.rank()..first.rank() + 1 };
    let topologies = ranks.map(|rank| first.at(rank)).collect::<Result<Vec<_>, _>>()?;
    let rule = options.ranks.rule()?;
    let (device, limit) = options.limit()?;
    let svg = options.svg.as_deref().map(|path| Target::reserve("--svg", path)).transpose()?;
    folder("DIR", &options.dir, "config.json")?;
    let checkpoint = Checkpoint::open(&options.dir)?;
    options.ranks.share(checkpoint.config(), first)?;
    let input = report::Input {
        checkpoint: &checkpoint,
        rule: &rule,
        placement: &options.ranks.placement,
        topologies: &topologies,
        scales: if options.scales == Scales::All { ScalePolicy::All } else { ScalePolicy::Owned },
        binding_limit: limit,
        memory: options.memory,
        device,
        loras: &options.loras,
    };
    let report = report::Report::new(&input)?;
    if let Some(svg) = svg {
        svg.write(&svg::draw(&report))?;
    }
    let mut out = std::io::stdout().lock();
    match options.format {
        Format::Json => writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?,
        Format::Table => text::write(&mut out, &report)?,
    }
    match report.problems.as_slice() {
        [] => Ok(()),
        [one] => bail!("{one}"),
        [one, more @ ..] => bail!("{one} (and {} more)", more.len()),
    }
}

impl Options {
    /// The device's name, if one decides, and the largest binding.
    fn limit(&self) -> anyhow::Result<(Option<String>, u64)> {
        if let (Some(limit), None) = (self.binding_limit, &self.device.device) {
            return Ok((None, limit));
        }
        let all = Gpu::list();
        let named = self.device.named(&all)?;
        if let (Some(info), Some(tier)) = (named, self.device.tier())
            && !info.tiers.contains(&tier)
        {
            bail!("--tier {tier}: `{}` offers {}", info.name, tiers(info, ", "));
        }
        Ok(match (named, self.binding_limit) {
            (_, Some(limit)) => (None, limit),
            (Some(info), None) => (Some(info.name.clone()), info.max_binding_bytes),
            (None, None) => (None, DEFAULT_BINDING_BYTES),
        })
    }
}
