//! `wgmoe bench layer`: one mixture-of-experts layer, router to weighted sum, by the device's clock.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use wgmoe::adapter::MAX_RANK;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::matrix;
use wgmoe::plan::rows::{self, Few};
use wgmoe::shape::MoeShape;

use crate::bench::limits::Limits;
use crate::bench::measure::{Bench, Effort, Measured, seed, slot};
use crate::bench::report::{Report, Row};
use crate::bench::routing::{self, touched};
use crate::bench::shape::{Routing, Shape, Stored};
use crate::bench::synthetic::Synthetic;
use crate::bench::{oracle, roofline, timing};
use crate::devices::driver;
use crate::target::Target;
use crate::values::{number, numbers};
use crate::{Device, Format};

/// Time one mixture-of-experts layer: router, experts with adapters, weighted sum
#[derive(Args)]
#[command(after_help = "\
Weights are random and made on the device. Each time is the median of many runs by the device's clock, over
rotating tokens, of all that a layer does from the router to the sum; tokens are sorted by adapter before, which
a model does once for all its layers. `least` is what its bytes and multiplications take at the speed of memory
and of arithmetic that the same command measured, `share` how much of that was reached. `off` compares with the
CPU (two tokens) and with f32 arithmetic on the device (all tokens); more than the tier's tolerance is an error.

Examples:
  wgmoe bench layer
  wgmoe bench layer --tokens 1,64,4096 --adapters 0,8 --profile
  wgmoe bench layer --tokens 256 --adapters 4 --rank 8,32,128 --loaded 64 --routing zipf:1.2
  wgmoe bench layer --shape mixtral-8x7b --svg roofline.svg --format json")]
pub struct Options {
    /// Sizes: qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b, tiny, or a folder with config.json [default: qwen3-30b-a3b, tiny on a
    /// software device]
    #[arg(long, value_name = "NAME|DIR")]
    shape: Option<String>,
    /// Tokens of a batch
    #[arg(long, value_name = "T,...", value_delimiter = ',', value_parser = numbers(1..=MOST),
        default_value = "1,4,16,64,256,1024,4096")]
    tokens: Vec<usize>,
    /// Adapters mixed over the tokens, 0 for none
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = numbers(0..=MOST), default_value = "0,8")]
    adapters: Vec<usize>,
    /// Ranks that the adapters take in turn
    #[arg(long, value_name = "R,...", value_delimiter = ',', value_parser = numbers(1..=MAX_RANK), default_value = "16")]
    rank: Vec<usize>,
    /// Adapters that are resident, also where fewer are in the batch [default: as many as are used]
    #[arg(long, value_name = "N", value_parser = number(0..=MOST))]
    loaded: Option<usize>,
    /// How tokens are spread over experts: uniform, zipf:S or one-expert
    #[arg(long, value_name = "MIX", default_value_t = Routing::Uniform)]
    routing: Routing,
    /// Storage type of the weights
    #[arg(long, value_enum, default_value_t = Stored::Bf16, value_name = "TYPE")]
    dtype: Stored,
    /// Also show the time of every dispatch
    #[arg(long)]
    profile: bool,
    /// A table, or one JSON object
    #[arg(long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    format: Format,
    /// Also draw the roofline
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    device: Device,
}

/// Tokens and adapters at most.
const MOST: usize = 1 << 16;
const EFFORT: Effort = Effort { runs: 21, warm_up: timing::WARM_UP, profile: false };
/// Tokens that the CPU computes, too.
const COMPARED: usize = 2;
/// Tolerance of the output over its largest value: products in f32, and products with f16 operands.
const F32_TOLERANCE: f32 = 1e-4;
const F16_TOLERANCE: f32 = 2e-3;

pub fn run(options: &Options) -> anyhow::Result<()> {
    // Before minutes of work, not after them.
    let svg = options.svg.as_deref().map(|path| Target::reserve("--svg", path)).transpose()?;
    let gpu = timing::open(&options.device)?;
    let inside = gpu.device().features().contains(wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES);
    if options.profile && !inside {
        anyhow::bail!("--profile: device `{}` has no timestamps inside passes", gpu.info().name);
    }
    let shape = Shape::of(options.shape.as_deref(), &gpu)?;
    let dtype = options.dtype.dtype();
    let most = options.adapters.iter().copied().max().unwrap_or(0);
    let ranks: Vec<usize> =
        (0..most.max(options.loaded.unwrap_or(0))).map(|i| options.rank[i % options.rank.len()]).collect();
    let layer = Synthetic::new(&gpu, &shape, dtype, options.routing, &ranks)?;
    let bench = Bench { gpu: &gpu, layer: &layer, ranks: &ranks };
    let mut report = Report {
        device: gpu.info().name.clone(),
        driver: driver(gpu.info()),
        tier: gpu.tier().to_string(),
        shape: shape.name.clone(),
        dtype: dtype.name().to_owned(),
        routing: options.routing.to_string(),
        limits: Limits::measure(&gpu)?,
        rows: Vec::new(),
    };
    let mut outputs = Vec::new();
    for &tokens in &options.tokens {
        for &adapters in &options.adapters {
            let (row, out) = bench.row(tokens, adapters, options.profile, &report.limits)?;
            report.rows.push(row);
            outputs.push(out);
        }
    }
    // Last: a device that idles meanwhile lowers its clock.
    for (row, out) in report.rows.iter_mut().zip(&outputs) {
        row.off_cpu = bench.compare(out, row.tokens, row.adapters)?;
    }
    if let Some(svg) = svg {
        svg.write(&roofline::draw(&report))?;
    }
    let mut out = std::io::stdout().lock();
    match options.format {
        Format::Json => writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?,
        Format::Table => writeln!(out, "{}", report.text())?,
    }
    let allowed = if gpu.capabilities().matrix { F16_TOLERANCE } else { F32_TOLERANCE };
    match report.rows.iter().find(|row| row.off_cpu.max(row.off_f32) > allowed) {
        Some(row) => anyhow::bail!(
            "{} tokens, {} adapters: the output is off by {:.1e} of its largest value, expected {allowed:.0e} or less",
            row.tokens,
            row.adapters,
            row.off_cpu.max(row.off_f32)
        ),
        None => Ok(()),
    }
}

impl Bench<'_> {
    /// The measurements of one row, not yet compared with the CPU, and the output `[T, D]`.
    fn row(&self, tokens: usize, adapters: usize, profile: bool, limits: &Limits) -> anyhow::Result<(Row, Vec<f32>)> {
        let MoeShape { experts, top_k, hidden: d, expert_width: f } = self.layer.layer.shape;
        let batch = self.batch(tokens, adapters)?;
        let measured = self.measure(self.gpu, &batch, EFFORT)?;
        let profiled = Effort { profile: true, ..EFFORT };
        let stages = if profile { self.measure(self.gpu, &batch, profiled)?.stages } else { Vec::new() };
        let caps = self.gpu.capabilities();
        let off_f32 = if caps.matrix {
            // The same layer in f32 arithmetic.
            let gpu = self.gpu.with_capabilities(Capabilities { matrix: false, ..caps.clone() });
            self.difference_in_f32(&measured, &self.measure(&gpu, &batch, Effort { runs: 0, ..EFFORT })?, tokens)
        } else {
            0.0
        };

        let slots: Vec<Option<usize>> = (0..tokens).map(|t| slot(t, 0, adapters)).collect();
        let t = touched(&measured.ids, top_k, &slots, self.ranks);
        let pairs = tokens * top_k;
        let size = self.layer.gate_up.dtype.size();
        // A projection of one expert has 3·D·F weights, an adapter of rank R 3·R·(D + F), stored in two bytes each.
        let factor = 3 * (d + f);
        let bytes = t.experts * 3 * d * f * size + experts * d * 2 + tokens * d * 8 + t.adapter_ranks * factor * 2;
        let macs = pairs * 3 * d * f + tokens * experts * d + t.pair_ranks * factor;
        let (least_us, memory) = limits.least(bytes as f64, macs as f64);
        let tile = match rows::few(caps, tokens, top_k, experts) {
            Some(Few::Single) => None,
            Some(Few::Tiles(tile)) => Some(tile),
            None if caps.matrix => matrix::tile(caps, pairs, experts),
            None => rows::tile(caps, pairs, experts),
        };
        let tile_rows_a_pair = match tile {
            Some(tile) => {
                let mut counts = vec![0usize; experts];
                measured.ids.iter().filter(|id| **id >= 0).for_each(|id| counts[*id as usize] += 1);
                counts.iter().map(|n| n.next_multiple_of(tile)).sum::<usize>() as f64 / pairs as f64
            }
            None => 1.0,
        };
        let mut used: Vec<usize> = self.ranks.iter().take(adapters).copied().collect();
        used.sort_unstable();
        used.dedup();
        let row = Row {
            tokens,
            adapters,
            ranks: used,
            us: measured.us,
            experts: t.experts,
            most_pairs: t.most_pairs,
            bytes: bytes as f64,
            macs: macs as f64,
            tile_rows_a_pair,
            least_us,
            bound: if memory { "memory" } else { "arithmetic" },
            off_cpu: f32::INFINITY,
            off_f32,
            stages,
        };
        Ok((row, measured.out))
    }

    /// The largest difference to f32 arithmetic, over the largest value. Tokens whose choice of experts is close may have been
    /// routed otherwise there: those are left out.
    fn difference_in_f32(&self, got: &Measured, expected: &Measured, tokens: usize) -> f32 {
        let MoeShape { hidden: d, top_k: a, .. } = self.layer.layer.shape;
        let x = routing::tokens(tokens, d, seed(0));
        let alike = |t: &usize| {
            let [mut ours, mut theirs] = [got, expected].map(|m| m.ids[t * a..(t + 1) * a].to_vec());
            ours.sort_unstable();
            theirs.sort_unstable();
            ours == theirs || oracle::clear(self.layer, &x[t * d..][..d]).is_some()
        };
        let kept: Vec<usize> = (0..tokens).filter(alike).collect();
        let [ours, theirs] = [got, expected]
            .map(|m| kept.iter().flat_map(|t| &m.out[t * d..(t + 1) * d]).copied().collect::<Vec<f32>>());
        difference(&ours, &theirs)
    }

    /// The largest difference to the CPU for a few tokens, over the largest value.
    fn compare(&self, out: &[f32], tokens: usize, adapters: usize) -> anyhow::Result<f32> {
        let d = self.layer.layer.shape.hidden;
        let x = routing::tokens(tokens, d, seed(0));
        // From both ends, so that a tile's padding is near.
        let order = (0..tokens).flat_map(|i| [i, tokens - 1 - i]).take(tokens);
        let clear = order.filter_map(|t| Some((t, oracle::token(self.layer, &x[t * d..][..d], slot(t, 0, adapters))?)));
        let off = clear.take(COMPARED.min(tokens)).map(|(t, expected)| difference(&out[t * d..][..d], &expected));
        off.reduce(f32::max).context("no token chooses its experts clearly enough to be compared")
    }
}

/// Largest difference over the largest value expected; infinite where there is none, or a NaN.
fn difference(got: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    let off = |(g, e): (&f32, &f32)| if (g - e).is_nan() { f32::INFINITY } else { (g - e).abs() };
    let most = got.iter().zip(expected).map(off).fold(0f32, f32::max);
    if largest > 0.0 { most / largest } else { f32::INFINITY }
}
