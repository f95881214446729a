//! `wgmoe bench tune`: where one way to do the work of a layer becomes better than another, and how its products are best cut, on
//! this device.

mod cuts;
mod thresholds;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use wgmoe::ErrorKind;
use wgmoe::gpu::Gpu;
use wgmoe::plan::tuning::TuningTable;

use crate::bench::measure::{Batch, Bench, Effort};
use crate::bench::shape::{Routing, Shape, Stored};
use crate::bench::synthetic::Synthetic;
use crate::bench::timing;
use crate::devices::driver;
use crate::target::Target;
use crate::values::{number, numbers};
use crate::{Device, Format};

/// Measure the thresholds between two ways to do the same work, or the cuts of products, and propose better ones for this device
#[derive(Args)]
#[command(after_help = "\
Each threshold is tried from a quarter to four times its present value, on batches that it sends one way or
another, with and without adapters; times are those of the whole layer by the device's clock, the lower of two
medians. A value is proposed where it is faster by more than 2 % on the batches that it sends another way. Shown
are the geometric means over these batches, or over all where the present value stays.

Fields that decide nothing in a layer of this shape on this tier stay as they are: those of attention's and other
dense products are among them. `--write` writes the whole table, the present one but for what was searched;
`--tuning` runs any command with it, and `--tuning FILE --write FILE` goes on from it.

With `--cuts` it is how the experts' products on cooperative matrices are cut that is searched: columns of tiles,
steps, what one subgroup holds, and how far loads run ahead. From each present cut the search goes to the best of its
neighbours as long as that is faster by more than 2 % on the batches that take it. Before a cut is timed, what the
layer computes with it is compared with the present cut's output; cuts that differ, or that the driver refuses, are
left out. Heights stay: they decide which batches take which cut.

Examples:
  wgmoe bench tune
  wgmoe bench tune --shape mixtral-8x7b --adapters 4 --write tuning.json
  wgmoe bench tune --cuts --tokens 1024,4096 --tuning tuning.json --write tuning.json
  wgmoe bench layer --tuning tuning.json")]
pub struct Options {
    /// Sizes: qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b, tiny, or a folder with config.json [default: qwen3-30b-a3b, tiny on a
    /// software device]
    #[arg(long, value_name = "NAME|DIR")]
    shape: Option<String>,
    /// Storage type of the weights
    #[arg(long, value_enum, default_value_t = Stored::Bf16, value_name = "TYPE")]
    dtype: Stored,
    /// Adapters of rank 16 mixed over the tokens of half of the batches, 0 for none
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = number(0..=MOST_ADAPTERS))]
    adapters: usize,
    /// Search the cuts of products on cooperative matrices instead of thresholds
    #[arg(long)]
    cuts: bool,
    /// Tokens of the batches that cuts are searched for [default: for each cut two of the batches that take it]
    #[arg(long, value_name = "T[,T]", value_delimiter = ',', requires = "cuts", value_parser = numbers(1..=MOST_TOKENS))]
    tokens: Vec<usize>,
    /// Write the table with what is proposed to this file
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// A table, or one JSON object
    #[arg(long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    format: Format,
    #[command(flatten)]
    device: Device,
}

const RANK: usize = 16;
/// Adapters at most.
const MOST_ADAPTERS: usize = 1 << 16;
/// Tokens of a batch at most.
const MOST_TOKENS: usize = 1 << 15;
const EFFORT: Effort = Effort { runs: 9, warm_up: Duration::from_millis(20), profile: false };
/// Before the ways of a batch are measured: the device has idled while it was made.
const WARM_UP: Effort = Effort { runs: 1, warm_up: Duration::from_millis(300), ..EFFORT };
/// Times that the ways of a batch are measured in turn: a clock that changes meanwhile meets all of them.
const ROUNDS: usize = 2;
/// What a change must gain: times of the same work differ by about as much.
const NOISE: f64 = 0.02;

/// A search on one tier of one device.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    driver: String,
    tier: String,
    shape: String,
    dtype: String,
    adapters: usize,
    #[serde(flatten)]
    found: Found,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Found {
    Thresholds(thresholds::Thresholds),
    Cuts(cuts::Searched),
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    // Before minutes of work, not after them.
    let target = options.write.as_deref().map(|path| Target::reserve("--write", path)).transpose()?;
    let table = options.device.table()?;
    let gpu = timing::open(&options.device)?;
    if options.cuts && !gpu.capabilities().matrix {
        anyhow::bail!(
            "--cuts: expected a device with cooperative matrices, got the {} tier of {}",
            gpu.tier(),
            gpu.info().name
        );
    }
    let shape = Shape::of(options.shape.as_deref(), &gpu)?;
    let dtype = options.dtype.dtype();
    let ranks = vec![RANK; options.adapters];
    let layer = Synthetic::new(&gpu, &shape, dtype, Routing::Uniform, &ranks)?;
    let bench = Bench { gpu: &gpu, layer: &layer, ranks: &ranks };
    let found = if options.cuts {
        Found::Cuts(cuts::search(&bench, options.adapters, &options.tokens)?)
    } else {
        Found::Thresholds(thresholds::search(&bench, options.adapters)?)
    };
    let report = Report {
        device: gpu.info().name.clone(),
        driver: driver(gpu.info()),
        tier: gpu.tier().to_string(),
        shape: shape.name.clone(),
        dtype: dtype.name().to_owned(),
        adapters: options.adapters,
        found,
    };
    let mut out = std::io::stdout().lock();
    match options.format {
        Format::Json => writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?,
        Format::Table => writeln!(out, "{}", report.text())?,
    }
    if let (Some(target), Some(path)) = (target, &options.write) {
        target.write(&report.found.within(table, &gpu).json()?)?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

impl Found {
    /// `table` with what is proposed.
    fn within(&self, table: TuningTable, gpu: &Gpu) -> TuningTable {
        match self {
            Self::Thresholds(found) => table.with(gpu.tier(), found.tuning),
            Self::Cuts(found) => {
                TuningTable { cuts: table.cuts.with(gpu.capabilities().edge, found.proposed.clone()), ..table }
            }
        }
    }
}

impl Report {
    fn text(&self) -> String {
        let Self { device, driver, tier, shape, dtype, adapters, found } = self;
        let found = match found {
            Found::Thresholds(found) => found.text(),
            Found::Cuts(found) => found.text(),
        };
        format!("{device}, {driver}, {tier} tier\n{shape} in {dtype}, {adapters} adapters\n{found}")
    }
}

/// With how many adapters batches are measured.
fn kinds(adapters: usize) -> Vec<usize> {
    if adapters > 0 { vec![0, adapters] } else { vec![0] }
}

/// A batch of that many tokens is more than the device has room for.
fn is_limit(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<wgmoe::Error>().map(wgmoe::Error::kind);
    matches!(kind, Some(ErrorKind::Limit | ErrorKind::OutOfMemory))
}

/// The time of a batch on each of some devices that decide differently, in microseconds: they take turns.
fn race(bench: &Bench<'_>, batch: &Batch, gpus: &[&Gpu]) -> anyhow::Result<Vec<f64>> {
    if let Some(gpu) = gpus.first() {
        bench.measure(gpu, batch, WARM_UP)?;
    }
    let mut times = vec![f64::INFINITY; gpus.len()];
    for round in 0..ROUNDS {
        // There and back: who was first is last.
        let order: Vec<usize> =
            if round % 2 == 0 { (0..gpus.len()).collect() } else { (0..gpus.len()).rev().collect() };
        for i in order {
            times[i] = times[i].min(bench.measure(gpus[i], batch, EFFORT)?.us);
        }
    }
    Ok(times)
}

/// Up to `most` of `all`, the ends among them.
fn spread(all: &[usize], most: usize) -> Vec<usize> {
    if all.len() <= most {
        return all.to_vec();
    }
    (0..most).map(|i| all[i * (all.len() - 1) / (most - 1)]).collect()
}

/// The geometric mean.
fn mean(times: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, n) = times.into_iter().fold((0.0, 0), |(sum, n), us: f64| (sum + us.ln(), n + 1));
    (sum / f64::from(n.max(1))).exp()
}

/// Numbers as a cell of a table, in ascending order and each once.
fn listed(mut numbers: Vec<usize>) -> String {
    numbers.sort_unstable();
    numbers.dedup();
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_spread_over_their_range() {
        assert_eq!(spread(&[1, 2, 3], 4), [1, 2, 3]);
        assert_eq!(spread(&[1, 2, 3, 4, 6, 8, 12], 4), [1, 3, 6, 12]);
    }

    #[test]
    fn a_mean_is_that_of_ratios() {
        assert!((mean([1.0, 4.0]) - 2.0).abs() < 1e-12 && (mean([3.0]) - 3.0).abs() < 1e-12);
        assert_eq!(listed(vec![8, 1, 8, 2]), "1 2 8");
    }
}
