//! What a benchmark says: rows for people, and JSON.

use serde::Serialize;

use crate::bench::limits::Limits;
use crate::table::table;

/// A benchmark of one layer.
#[derive(Debug, Serialize)]
pub struct Report {
    pub device: String,
    pub driver: String,
    pub tier: String,
    pub shape: String,
    pub dtype: String,
    pub routing: String,
    pub limits: Limits,
    pub rows: Vec<Row>,
}

/// One number of tokens, with or without adapters.
#[derive(Debug, Serialize)]
pub struct Row {
    pub tokens: usize,
    /// Adapters in the batch.
    pub adapters: usize,
    /// Their ranks, each once.
    pub ranks: Vec<usize>,
    /// Median time of the layer.
    pub us: f64,
    /// Experts with a pair; most pairs of one.
    pub experts: usize,
    pub most_pairs: usize,
    /// Bytes that have to be read and written at least.
    pub bytes: f64,
    /// Multiply-accumulates.
    pub macs: f64,
    /// Rows of tiles for each pair: what is computed for nothing, and 1 where there are no tiles.
    pub tile_rows_a_pair: f64,
    /// What these take at least, and which of them decides.
    pub least_us: f64,
    pub bound: &'static str,
    /// Difference to the CPU over the largest value of its output, for tokens that were compared; and to f32 arithmetic on
    /// the device, for all.
    pub off_cpu: f32,
    pub off_f32: f32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<Stage>,
}

/// One dispatch.
#[derive(Debug, Serialize)]
pub struct Stage {
    pub stage: String,
    pub us: f64,
}

impl Row {
    /// GB a second.
    pub fn gb_s(&self) -> f64 {
        self.bytes / self.us / 1e3
    }

    /// TFLOP a second.
    pub fn tflops(&self) -> f64 {
        2.0 * self.macs / self.us / 1e6
    }
}

impl Report {
    pub fn text(&self) -> String {
        let mut out = format!(
            "{}, {}, {} tier\n{} in {}, routing {}\nthe device copies {:.0} GB/s and computes {:.1} TFLOP/s\n",
            self.device,
            self.driver,
            self.tier,
            self.shape,
            self.dtype,
            self.routing,
            self.limits.copy_gb_s,
            self.limits.tflops
        );
        let header =
            ["T", "adapters", "us", "least us", "share", "bound", "GB/s", "TFLOP/s", "experts", "rows/pair", "off"];
        let mut rows = table(header);
        for row in &self.rows {
            let ranks: Vec<String> = row.ranks.iter().map(ToString::to_string).collect();
            let adapters =
                if row.adapters == 0 { "-".into() } else { format!("{} (r {})", row.adapters, ranks.join(", ")) };
            rows.add_row([
                row.tokens.to_string(),
                adapters,
                format!("{:.1}", row.us),
                format!("{:.1}", row.least_us),
                format!("{:.0} %", 100.0 * row.least_us / row.us),
                row.bound.to_owned(),
                format!("{:.0}", row.gb_s()),
                format!("{:.2}", row.tflops()),
                row.experts.to_string(),
                format!("{:.2}", row.tile_rows_a_pair),
                format!("{:.0e}", row.off_cpu.max(row.off_f32)),
            ]);
        }
        out += &rows.to_string();
        for row in self.rows.iter().filter(|row| !row.stages.is_empty()) {
            let with = if row.adapters == 0 { String::new() } else { format!(", {} adapters", row.adapters) };
            out += &format!("\nT = {}{with}, us a dispatch (each waits for the one before):\n", row.tokens);
            let stages: Vec<String> =
                row.stages.iter().map(|stage| format!("  {:>9.1}  {}", stage.us, stage.stage)).collect();
            out += &stages.join("\n");
        }
        out
    }
}
