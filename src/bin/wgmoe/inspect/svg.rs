//! What each rank reads, as a picture: one bar a rank, as long as the file, one colour a role.

use std::fmt::Write;

use wgmoe::family::class::Group;

use super::report::Report;
use crate::table::bytes;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 92.0;
const ROW: f64 = 34.0;
const BAR: f64 = 22.0;
/// Rough width of a character of the legend.
const CHARACTER: f64 = 7.6;
/// Longest folder name in the title, in characters.
const TITLE: usize = 60;

pub fn draw(report: &Report) -> String {
    let total = report.model.bytes.max(1) as f64;
    let scale = (WIDTH - LEFT - RIGHT) / total;
    let groups: Vec<Group> = Group::ALL
        .into_iter()
        .filter(|g| report.ranks.iter().any(|r| r.roles.get(g).is_some_and(|role| role.bill.read_bytes > 0)))
        .collect();
    let bottom = TOP + ROW * report.ranks.len() as f64;
    let legend = legend(&groups);
    let legend_rows = legend.last().map_or(0, |entry| entry.row + 1);
    let height = bottom + 50.0 + 24.0 * legend_rows as f64;
    let mut svg = String::new();
    let mut line = |text: String| {
        svg.push_str(&text);
        svg.push('\n');
    };
    line(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="13" fill="#1b1f24">"##
    ));
    line(format!(r##"<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>"##));
    let m = &report.model;
    let dir = report.dir.trim_end_matches('/');
    let name = if dir.chars().count() > TITLE { dir.rsplit('/').next().unwrap_or(dir) } else { dir };
    line(format!(
        r#"<text x="24" y="34" font-size="18" font-weight="600">What each rank reads of {}</text>"#,
        escaped(name)
    ));
    line(format!(
        r##"<text x="24" y="57" fill="#57606a">{} · {} · {} experts of width {} · tp {}, ep {} · placement {}</text>"##,
        m.family,
        bytes(m.bytes),
        m.experts,
        m.expert_width,
        report.tp,
        report.ep,
        escaped(&report.placement)
    ));
    for quarter in 0..=4 {
        let x = LEFT + (WIDTH - LEFT - RIGHT) * f64::from(quarter) / 4.0;
        let label = if quarter == 0 { "0".to_owned() } else { bytes((total * f64::from(quarter) / 4.0) as u64) };
        line(format!(r##"<line x1="{x:.1}" y1="{:.1}" x2="{x:.1}" y2="{bottom:.1}" stroke="#d0d7de"/>"##, TOP - 8.0));
        line(format!(
            r##"<text x="{x:.1}" y="{:.1}" text-anchor="middle" font-size="11" fill="#57606a">{label}</text>"##,
            bottom + 16.0
        ));
    }
    for (i, rank) in report.ranks.iter().enumerate() {
        let y = TOP + ROW * i as f64;
        let middle = y + BAR / 2.0 + 4.5;
        line(format!(r#"<text x="{:.1}" y="{middle:.1}" text-anchor="end">rank {}</text>"#, LEFT - 12.0, rank.rank));
        line(format!(r##"<rect x="{LEFT}" y="{y:.1}" width="{:.2}" height="{BAR}" fill="#eef1f4"/>"##, total * scale));
        let mut x = LEFT;
        for group in &groups {
            let n = rank.roles.get(group).map_or(0, |role| role.bill.read_bytes);
            let width = n as f64 * scale;
            if n > 0 {
                line(format!(
                    r#"<rect x="{x:.2}" y="{y:.1}" width="{width:.2}" height="{BAR}" fill="{}"><title>rank {}, {}: {}</title></rect>"#,
                    colour(*group),
                    rank.rank,
                    group.name(),
                    bytes(n)
                ));
            }
            x += width;
        }
        let percent = rank.read_bytes as f64 * 100.0 / total;
        line(format!(
            r##"<text x="{:.1}" y="{middle:.1}">{} <tspan fill="#57606a">{percent:.0} %</tspan></text>"##,
            WIDTH - RIGHT + 12.0,
            bytes(rank.read_bytes)
        ));
    }
    for Entry { name, fill, x, row } in legend {
        let y = bottom + 42.0 + 24.0 * row as f64;
        line(format!(
            r##"<rect x="{x:.1}" y="{:.1}" width="12" height="12" fill="{fill}" stroke="#d0d7de" stroke-width="0.5"/>"##,
            y - 11.0
        ));
        line(format!(r#"<text x="{:.1}" y="{y:.1}">{name}</text>"#, x + 18.0));
    }
    line("</svg>".to_owned());
    svg
}

/// One colour and its meaning, and where it stands.
struct Entry {
    name: &'static str,
    fill: &'static str,
    x: f64,
    row: usize,
}

/// The legend from left to right, in as many rows as it needs; what is skipped comes last.
fn legend(groups: &[Group]) -> Vec<Entry> {
    let (mut x, mut row) = (LEFT, 0);
    let entries = groups.iter().map(|g| (g.name(), colour(*g))).chain([("skipped", "#eef1f4")]);
    entries
        .map(|(name, fill)| {
            let width = 46.0 + name.len() as f64 * CHARACTER;
            if x + width > WIDTH {
                (x, row) = (LEFT, row + 1);
            }
            let entry = Entry { name, fill, x, row };
            x += width;
            entry
        })
        .collect()
}

/// Colours that also differ for colour-blind readers (Okabe and Ito).
fn colour(group: Group) -> &'static str {
    match group {
        Group::ExpertPayload => "#0072b2",
        Group::ExpertScale => "#56b4e9",
        Group::ExpertBias => "#8ecae6",
        Group::ExpertMetadata => "#c6e2f2",
        Group::Router => "#d55e00",
        Group::SharedExpert => "#009e73",
        Group::DenseMlp => "#66c2a5",
        Group::Attention => "#e69f00",
        Group::Norm => "#333333",
        Group::Embedding => "#cc79a7",
        _ => "#999999",
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        // Characters that XML does not allow are left out.
        _ = match c {
            '&' => out.write_str("&amp;"),
            '<' => out.write_str("&lt;"),
            '>' => out.write_str("&gt;"),
            '"' => out.write_str("&quot;"),
            c if c.is_control() => Ok(()),
            c => out.write_char(c),
        };
    }
    out
}
