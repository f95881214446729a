//! The roofline: what each row reached of what memory and arithmetic allow at its intensity.

use crate::bench::report::{Report, Row};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 40.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 64.0;
const PLAIN: &str = "#0969da";
const ADAPTED: &str = "#bf3989";

/// Decades of both axes.
struct Axes {
    x: [f64; 2],
    y: [f64; 2],
}

impl Axes {
    fn x(&self, v: f64) -> f64 {
        LEFT + (v.log10() - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, v: f64) -> f64 {
        HEIGHT - BOTTOM - (v.log10() - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)
    }
}

fn intensity(row: &Row) -> f64 {
    2.0 * row.macs / row.bytes
}

/// Whole decades around `values`.
fn decades(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
    [low.max(1e-9).log10().floor(), high.max(1e-9).log10().ceil()]
}

pub fn draw(report: &Report) -> String {
    let limits = &report.limits;
    // Where memory and arithmetic allow the same, in operations a byte.
    let ridge = limits.tflops * 1e3 / limits.copy_gb_s;
    let axes = Axes {
        x: decades(report.rows.iter().map(intensity).chain([ridge])),
        y: decades(report.rows.iter().map(Row::tflops).chain([limits.tflops])),
    };
    let mut svg = String::new();
    let mut line = |text: String| {
        svg.push_str(&text);
        svg.push('\n');
    };
    line(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="13" fill="#1b1f24">"##
    ));
    line(format!(r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>"##));
    line(format!(
        r#"<text x="24" y="32" font-size="18" font-weight="600">One layer of {} in {}</text>"#,
        escaped(&report.shape),
        report.dtype
    ));
    line(format!(
        r##"<text x="24" y="55" fill="#57606a">{} · {} tier · copies {:.0} GB/s · computes {:.1} TFLOP/s</text>"##,
        escaped(&report.device),
        report.tier,
        limits.copy_gb_s,
        limits.tflops
    ));
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    for decade in axes.x[0] as i32..=axes.x[1] as i32 {
        let x = axes.x(10f64.powi(decade));
        line(format!(r##"<line x1="{x:.1}" y1="{TOP}" x2="{x:.1}" y2="{bottom}" stroke="#d8dee4"/>"##));
        line(format!(
            r##"<text x="{x:.1}" y="{:.1}" text-anchor="middle" fill="#57606a">{}</text>"##,
            bottom + 18.0,
            number(decade)
        ));
    }
    for decade in axes.y[0] as i32..=axes.y[1] as i32 {
        let y = axes.y(10f64.powi(decade));
        line(format!(r##"<line x1="{LEFT}" y1="{y:.1}" x2="{right}" y2="{y:.1}" stroke="#d8dee4"/>"##));
        line(format!(
            r##"<text x="{:.1}" y="{:.1}" text-anchor="end" fill="#57606a">{}</text>"##,
            LEFT - 8.0,
            y + 4.5,
            number(decade)
        ));
    }
    line(format!(
        r##"<text x="{:.1}" y="{:.1}" text-anchor="middle" fill="#57606a">operations for each byte that has to move</text>"##,
        (LEFT + right) / 2.0,
        bottom + 42.0
    ));
    line(format!(
        r##"<text transform="translate(22 {:.1}) rotate(-90)" text-anchor="middle" fill="#57606a">TFLOP/s</text>"##,
        (TOP + bottom) / 2.0
    ));
    let low = 10f64.powf(axes.x[0]);
    let roof = [
        (axes.x(low), axes.y((low * limits.copy_gb_s / 1e3).max(10f64.powf(axes.y[0])))),
        (axes.x(ridge), axes.y(limits.tflops)),
        (right, axes.y(limits.tflops)),
    ];
    let points: Vec<String> = roof.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    line(format!(r##"<polyline points="{}" fill="none" stroke="#1b1f24" stroke-width="2"/>"##, points.join(" ")));
    for row in &report.rows {
        let (x, y) = (axes.x(intensity(row)), axes.y(row.tflops()));
        let (colour, above) = if row.adapters == 0 { (PLAIN, true) } else { (ADAPTED, false) };
        let share = 100.0 * row.least_us / row.us;
        line(format!(
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="4.5" fill="{colour}"><title>T = {}: {:.1} us, {share:.0} % of the limit</title></circle>"#,
            row.tokens, row.us
        ));
        let (dx, dy, anchor) = if above { (-8.0, -7.0, "end") } else { (8.0, 16.0, "start") };
        line(format!(
            r#"<text x="{:.1}" y="{:.1}" text-anchor="{anchor}" font-size="11" fill="{colour}">{} · {share:.0} %</text>"#,
            x + dx,
            y + dy,
            row.tokens
        ));
    }
    for (i, (colour, text)) in [(PLAIN, "without adapters"), (ADAPTED, "with adapters")].into_iter().enumerate() {
        let x = right - 300.0 + 150.0 * i as f64;
        line(format!(r#"<circle cx="{x:.1}" cy="{:.1}" r="4.5" fill="{colour}"/>"#, TOP - 12.0));
        line(format!(r#"<text x="{:.1}" y="{:.1}">{text}</text>"#, x + 10.0, TOP - 7.5));
    }
    line("</svg>".to_owned());
    svg
}

/// A power of ten as people write it.
fn number(decade: i32) -> String {
    if decade >= 0 {
        format!("{}", 10f64.powi(decade))
    } else {
        format!("{:.*}", decade.unsigned_abs() as usize, 10f64.powi(decade))
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
