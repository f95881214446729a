//! An inspection for people: tables, and a bar a rank.

use std::io::Write;

use super::report::{Rank, Report};
use crate::table::{bytes, cell as escaped, table};
use wgmoe::family::class::Group;

/// Ranks that get a column of their own in the table of roles.
const COLUMNS: usize = 4;
/// Characters of a bar.
const BAR: usize = 40;

pub fn write(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    let m = &report.model;
    let dtypes: Vec<_> = m.dtypes.iter().map(|(name, n)| format!("{name} {}", bytes(*n))).collect();
    writeln!(
        out,
        "{} · {} · {} in {} tensors ({})",
        escaped(&report.dir),
        m.family,
        bytes(m.bytes),
        m.tensors,
        dtypes.join(", ")
    )?;
    writeln!(
        out,
        "{} layers, {} with {} experts of width {}, {} a token · hidden {} · {} heads ({} kv) of {} · vocabulary {} · context {}",
        m.layers,
        m.moe_layers,
        m.experts,
        m.expert_width,
        m.top_k,
        m.hidden,
        m.heads,
        m.kv_heads,
        m.head_dim,
        m.vocab,
        m.context
    )?;
    let device = report.device.as_ref().map_or(String::new(), |name| format!(" ({name})"));
    let (world, ep, moe_tp) = (report.tp, report.ep, report.moe_tp);
    writeln!(
        out,
        "{} in {} of {} · placement {} · bindings up to {}{device}\n",
        plural(world, "rank"),
        plural(ep, "expert group"),
        plural(moe_tp, "rank"),
        escaped(&report.placement),
        bytes(report.binding_limit)
    )?;
    writeln!(out, "{}\n", ranks(report))?;
    writeln!(out, "{}\n", roles(report))?;
    bars(out, report)?;
    for rank in &report.ranks {
        splits(out, rank)?;
    }
    if !report.adapters.is_empty() {
        writeln!(out, "\n{}", adapters(report))?;
    }
    Ok(())
}

fn plural(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn ranks(report: &Report) -> comfy_table::Table {
    let mut table = table([
        "rank",
        "experts",
        "width",
        "heads (kv)",
        "reads",
        "skips",
        "on the device",
        "buffers",
        "largest",
        "fits",
    ]);
    for rank in &report.ranks {
        table.add_row([
            rank.rank.to_string(),
            format!("{}: {}", rank.experts.len(), ids(&rank.experts)),
            format!("{}..{}", rank.width.start, rank.width.end),
            format!("{}..{} ({}..{})", rank.heads.start, rank.heads.end, rank.kv_heads.start, rank.kv_heads.end),
            bytes(rank.read_bytes),
            bytes(rank.skipped_bytes),
            bytes(rank.resident_bytes),
            format!("{} in {}", rank.buffers, plural(rank.bindings, "binding")),
            bytes(rank.largest_buffer),
            rank.fits.map_or("-", |fits| if fits { "yes" } else { "NO" }).to_owned(),
        ]);
    }
    table
}

/// Sorted numbers, consecutive ones and ones of a constant step as a range.
fn ids(sorted: &[usize]) -> String {
    match sorted {
        [] => "none".to_owned(),
        [one] => one.to_string(),
        [first, second, .., last] if sorted.len() > 2 => {
            let step = second - first;
            if sorted.windows(2).all(|pair| pair[1] - pair[0] == step) {
                let by = if step == 1 { String::new() } else { format!(" by {step}") };
                return format!("{first}-{last}{by}");
            }
            let mut text: Vec<_> = sorted.iter().take(12).map(ToString::to_string).collect();
            if sorted.len() > 12 {
                text.push("…".to_owned());
            }
            text.join(" ")
        }
        _ => sorted.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
    }
}

fn roles(report: &Report) -> comfy_table::Table {
    let cell = |rank: &Rank, group| {
        let role = rank.roles.get(&group);
        role.map_or((0, 0, 0), |r| (r.bill.read_bytes, r.bill.skipped_bytes, r.resident_bytes))
    };
    let groups = Group::ALL.into_iter().filter(|g| report.ranks.iter().any(|r| r.roles.contains_key(g)));
    if let [one] = report.ranks.as_slice() {
        let mut table = table(["role", "reads", "skips", "on the device", "tensors read", "skipped"]);
        for group in groups {
            let (read, skipped, kept) = cell(one, group);
            let bill = one.roles.get(&group).map(|r| r.bill).unwrap_or_default();
            let tensors = [bill.read_tensors.to_string(), bill.skipped_tensors.to_string()];
            let [some, none] = tensors;
            table.add_row([group.name().to_owned(), bytes(read), bytes(skipped), bytes(kept), some, none]);
        }
        return table;
    }
    let columns = report.ranks.len() <= COLUMNS;
    let mut header = vec!["reads".to_owned(), "in the file".to_owned()];
    if columns {
        header.extend(report.ranks.iter().map(|rank| format!("rank {}", rank.rank)));
    } else {
        header.extend(["least".to_owned(), "most".to_owned()]);
    }
    let mut table = table(header);
    for group in groups {
        let all: Vec<u64> = report.ranks.iter().map(|rank| cell(rank, group).0).collect();
        let file = report.ranks.first().map_or(0, |rank| cell(rank, group).0 + cell(rank, group).1);
        let mut row = vec![group.name().to_owned(), bytes(file)];
        if columns {
            row.extend(all.into_iter().map(bytes));
        } else {
            row.extend([all.iter().min(), all.iter().max()].map(|n| bytes(n.copied().unwrap_or(0))));
        }
        table.add_row(row);
    }
    table
}

fn bars(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    let total = report.model.bytes.max(1);
    for rank in &report.ranks {
        let routed = [Group::ExpertPayload, Group::ExpertScale, Group::ExpertBias, Group::ExpertMetadata];
        let experts: u64 = routed.iter().filter_map(|g| rank.roles.get(g)).map(|r| r.bill.read_bytes).sum();
        let cells = |n: u64| (n as f64 / total as f64 * BAR as f64).round() as usize;
        let (dark, read) = (cells(experts), cells(rank.read_bytes).min(BAR));
        let dark = dark.min(read);
        let bar = format!("{}{}{}", "█".repeat(dark), "▒".repeat(read - dark), "·".repeat(BAR - read));
        let percent = rank.read_bytes as f64 * 100.0 / total as f64;
        writeln!(out, "rank {:>3} {bar} {:>10} {percent:>5.1} %", rank.rank, bytes(rank.read_bytes))?;
    }
    writeln!(out, "         █ experts  ▒ all the rest  · skipped, of {}", bytes(report.model.bytes))
}

fn splits(out: &mut impl Write, rank: &Rank) -> std::io::Result<()> {
    let Some(first) = rank.split.first() else {
        return Ok(());
    };
    let n = rank.split.len();
    let what = format!("`{}`, {} in {} bindings", first.buffer, bytes(first.bytes), first.bindings);
    let more = if n > 1 { format!(", and {} more", n - 1) } else { String::new() };
    writeln!(out, "rank {}: split under the binding limit: {what}{more}", rank.rank)
}

fn adapters(report: &Report) -> comfy_table::Table {
    let mut table = table(["adapter", "ranks", "factors", "in the file", "a rank holds"]);
    for adapter in &report.adapters {
        if let Some(error) = &adapter.error {
            table.add_row([escaped(&adapter.dir), String::new(), escaped(error), String::new(), String::new()]);
            continue;
        }
        let ranks: Vec<_> = adapter.ranks.iter().map(ToString::to_string).collect();
        let sites: Vec<_> = adapter.sites.iter().map(|(site, n)| format!("{site} {n}")).collect();
        let (least, most) = (adapter.bytes_by_rank.iter().min(), adapter.bytes_by_rank.iter().max());
        let held = match (least, most) {
            (Some(a), Some(b)) if a != b => format!("{} - {}", bytes(*a), bytes(*b)),
            (Some(a), _) => bytes(*a),
            _ => String::new(),
        };
        table.add_row([escaped(&adapter.dir), ranks.join(", "), sites.join(", "), bytes(adapter.bytes), held]);
    }
    table
}
