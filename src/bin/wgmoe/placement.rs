//! `wgmoe placement`: a table of owners from recorded choices, and how even it makes the ranks.

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use wgmoe::placement::{Placement, RoutingCounts, Topology, balance};

use crate::table::{cell, table};
use crate::target::Target;
use crate::values::{file, number};
use crate::{Format, usage};

/// Propose which rank holds which experts, from what a run recorded
#[derive(Args)]
#[command(after_help = "\
`wgmoe run`, `score` and `perplexity` record with --trace-routing FILE how often each
expert of each layer was chosen:
  {\"model_type\": \"qwen3_moe\", \"experts\": 8, \"top_k\": 2, \"tokens\": 31, \"layers\": [[5, 9, ...], ...]}

The experts asked for most get copies, and experts are shared out so that the
slowest group of each layer has little more to do than the others. One table
serves all layers. The answer is the balance that these counts give: the load of
the slowest group over the mean, 1 where all have the same; for all layers, the
sum of the slowest over the sum of the means. Loads are pairs of a token and an
expert, as if all that was recorded were one step.

The file that --out names is what --placement takes: a JSON list with the owners
(expert groups, from 0) of each expert.

Example:
  wgmoe run --model base --prompts prompts.jsonl --trace-routing trace.json
  wgmoe placement --from-trace trace.json --ep 8 --copies 16 --out table.json
  wgmoe run --model base --prompts prompts.jsonl --ep 8 --placement table.json")]
pub struct Options {
    /// What a run recorded
    #[arg(long, value_name = "FILE")]
    from_trace: PathBuf,
    /// Number of expert groups
    #[arg(long, value_name = "N", value_parser = number(1..=Topology::MAX_RANKS))]
    ep: usize,
    /// Copies of experts beyond the first of each, all groups together; each costs the memory of an expert in every layer
    /// [default: one a group]
    #[arg(long, value_name = "N", value_parser = number(0..=1_usize << 24))]
    copies: Option<usize>,
    /// Write the table for --placement to this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// A table, or one JSON object
    #[arg(long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    format: Format,
}

/// Loads of every layer's groups under one way to share out.
struct Shared {
    name: &'static str,
    loads: Vec<Vec<u64>>,
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    file("--from-trace", &options.from_trace, "a file as --trace-routing writes it")?;
    let counts = RoutingCounts::from_json(&options.from_trace).map_err(|e| e.within("--from-trace"))?;
    let (experts, groups) = (counts.experts, options.ep);
    // Whatever does not fit is the option's fault.
    let linear = owners(Placement::linear(experts, groups, 0).map_err(|e| usage(format!("--ep: {e}")))?);
    let copies = options.copies.unwrap_or(groups.min(experts * (groups - 1)));
    let proposed = balance::propose(&counts, groups, copies).map_err(|e| usage(format!("--copies: {e}")))?;
    if let Some(out) = &options.out {
        Target::reserve("--out", out)?.write(&text(&proposed))?;
    }
    let robin = owners(Placement::round_robin(experts, groups, 0)?);
    let shared = [("linear", linear), ("round-robin", robin), ("proposed", proposed.clone())]
        .into_iter()
        .map(|(name, owners)| Ok(Shared { name, loads: balance::loads(&counts, &owners, groups)? }))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let added = proposed.iter().map(Vec::len).sum::<usize>() - experts;
    let most = (0..groups).map(|g| proposed.iter().filter(|list| list.contains(&g)).count()).max().unwrap_or(0);

    let mut stdout = std::io::stdout().lock();
    if options.format == Format::Json {
        let balance = |shared: &Shared| {
            // Nothing for a layer without experts.
            let of_layer = |l: usize| (!shared.loads[l].is_empty()).then(|| balance::imbalance(&shared.loads[l..=l]));
            let layers: Vec<_> = (0..shared.loads.len()).map(of_layer).collect();
            (shared.name.to_owned(), json!({ "layers": layers, "all": balance::imbalance(&shared.loads) }))
        };
        let balance: serde_json::Map<_, _> = shared.iter().map(balance).collect();
        let line = json!({
            "experts": experts,
            "groups": groups,
            "copies": added,
            "experts_per_group": most,
            "tokens": counts.tokens,
            "balance": balance,
            "owners": proposed,
        });
        writeln!(stdout, "{line}")?;
        return Ok(());
    }
    writeln!(
        stdout,
        "{} · {} tokens · {experts} experts and {added} copies on {groups} groups, {most} or fewer on each, the same in every layer",
        cell(&counts.model_type),
        counts.tokens
    )?;
    let mut rows = table(std::iter::once("slowest / mean").chain(shared.iter().map(|s| s.name)));
    for layer in (0..counts.layers.len()).filter(|layer| !counts.layers[*layer].is_empty()) {
        let cells = shared.iter().map(|s| format!("{:.3}", balance::imbalance(&s.loads[layer..=layer])));
        rows.add_row(std::iter::once(format!("layer {layer}")).chain(cells));
    }
    let cells = shared.iter().map(|s| format!("{:.3}", balance::imbalance(&s.loads)));
    rows.add_row(std::iter::once("all layers".to_owned()).chain(cells));
    writeln!(stdout, "{rows}")?;
    if let Some(out) = &options.out {
        eprintln!("wrote {}", out.display());
    }
    Ok(())
}

fn owners(placement: Placement) -> Vec<Vec<usize>> {
    (0..placement.experts()).map(|expert| placement.holders(expert).to_vec()).collect()
}

/// The table as a file, an expert a line.
fn text(owners: &[Vec<usize>]) -> String {
    let mut text = String::from("[\n");
    for (expert, list) in owners.iter().enumerate() {
        // Writing to a string does not fail.
        let _ = writeln!(text, "  {list:?}{}", if expert + 1 < owners.len() { "," } else { "" });
    }
    text.push_str("]\n");
    text
}
