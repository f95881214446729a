//! The thresholds between two ways to do the same work.

use serde::Serialize;
use wgmoe::gpu::Gpu;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::tuning::{FIELDS, Field, Tuning};

use crate::bench::measure::Bench;
use crate::bench::tune::{NOISE, is_limit, kinds, listed, mean, race, spread};
use crate::session::bar;
use crate::table::table;

/// Values that are tried, over the present one.
const FACTORS: [f64; 7] = [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0];
/// Batches of a field with as many adapters at most.
const BATCHES: usize = 4;
/// Tokens of a batch at most.
const MOST_TOKENS: usize = 4096;
const MOST_TOKENS_SOFTWARE: usize = 256;

/// What a search found.
#[derive(Debug, Serialize)]
pub struct Thresholds {
    /// Fields that decide something.
    fields: Vec<Row>,
    /// Those that decide nothing here.
    not_measured: Vec<&'static str>,
    /// The entry of the tier with what is proposed.
    pub tuning: Tuning,
}

/// One field.
#[derive(Debug, Serialize)]
struct Row {
    field: &'static str,
    present: f64,
    proposed: f64,
    /// Geometric means over the batches that are sent another way, or over all where nothing is proposed.
    us_present: f64,
    us_proposed: f64,
    /// What was measured.
    batches: Vec<Tried>,
}

/// A batch with the time at each value that was tried, in microseconds.
#[derive(Debug, Serialize)]
struct Tried {
    tokens: usize,
    adapters: usize,
    values: Vec<f64>,
    us: Vec<f64>,
    /// Values with the same number are the same way.
    ways: Vec<usize>,
}

/// Tries every field, with and without `adapters`.
pub fn search(bench: &Bench<'_>, adapters: usize) -> anyhow::Result<Thresholds> {
    let search = Search { bench, adapters };
    let tuning = bench.gpu.capabilities().tuning;
    let mut found = Thresholds { fields: Vec::new(), not_measured: Vec::new(), tuning };
    let bar = bar(FIELDS.len(), "fields");
    for field in &FIELDS {
        bar.set_message(field.name);
        // Around what has been found for the fields before.
        match search.field(field, &found.tuning)? {
            Some(row) => {
                found.tuning = field.with(&found.tuning, row.proposed).unwrap_or(found.tuning);
                found.fields.push(row);
            }
            None => found.not_measured.push(field.name),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(found)
}

struct Search<'a> {
    bench: &'a Bench<'a>,
    adapters: usize,
}

impl Search<'_> {
    fn gpu(&self, tuning: Tuning) -> Gpu {
        let gpu = self.bench.gpu;
        gpu.with_capabilities(Capabilities { tuning, ..gpu.capabilities().clone() })
    }

    /// Tries the values of a field; `None` where it decides nothing.
    fn field(&self, field: &Field, tuning: &Tuning) -> anyhow::Result<Option<Row>> {
        let values = candidates(field, tuning);
        let gpus: Vec<(f64, Gpu)> = values.iter().map(|(value, tuning)| (*value, self.gpu(*tuning))).collect();
        let mut tried = Vec::new();
        for adapters in kinds(self.adapters) {
            for tokens in self.decided(&gpus, adapters)? {
                tried.push(self.measure(&gpus, tokens, adapters)?);
            }
        }
        let present = (field.get)(tuning);
        Ok(propose(present, &tried).map(|(proposed, [us_present, us_proposed])| Row {
            field: field.name,
            present,
            proposed,
            us_present,
            us_proposed,
            batches: tried,
        }))
    }

    /// Numbers of tokens that the lowest and the highest value send different ways, evenly chosen.
    fn decided(&self, gpus: &[(f64, Gpu)], adapters: usize) -> anyhow::Result<Vec<usize>> {
        let [(_, lowest), .., (_, highest)] = gpus else { return Ok(Vec::new()) };
        let most = if lowest.info().software { MOST_TOKENS_SOFTWARE } else { MOST_TOKENS };
        // One and a half between neighbours.
        let steps = (0..).map(|i: usize| ((2 + i % 2) << (i / 2)) / 2);
        let mut all = Vec::new();
        for tokens in steps.take_while(|tokens| *tokens <= most) {
            let ways = |gpu: &Gpu| self.bench.ways(gpu, tokens, adapters);
            match (ways(lowest), ways(highest)) {
                (Ok(low), Ok(high)) if low == high => {}
                (Ok(_), Ok(_)) => all.push(tokens),
                // More tokens need no less room.
                (Err(error), _) | (_, Err(error)) if is_limit(&error) => break,
                (Err(error), _) | (_, Err(error)) => return Err(error),
            }
        }
        all.dedup();
        Ok(spread(&all, BATCHES))
    }

    /// The time of a batch at each value.
    fn measure(&self, values: &[(f64, Gpu)], tokens: usize, adapters: usize) -> anyhow::Result<Tried> {
        let batch = self.bench.batch(tokens, adapters)?;
        let mut distinct: Vec<(Vec<String>, &Gpu)> = Vec::new();
        let mut ways = Vec::new();
        for (_, gpu) in values {
            let way = self.bench.ways(gpu, tokens, adapters)?;
            let known = distinct.iter().position(|(known, _)| *known == way);
            ways.push(known.unwrap_or(distinct.len()));
            if known.is_none() {
                distinct.push((way, gpu));
            }
        }
        let gpus: Vec<&Gpu> = distinct.into_iter().map(|(_, gpu)| gpu).collect();
        let times = race(self.bench, &batch, &gpus)?;
        let us = ways.iter().map(|way| times[*way]).collect();
        Ok(Tried { tokens, adapters, values: values.iter().map(|(value, _)| *value).collect(), us, ways })
    }
}

/// Values around the present one in ascending order, itself among them, with the tunings that have them.
fn candidates(field: &Field, tuning: &Tuning) -> Vec<(f64, Tuning)> {
    let present = (field.get)(tuning);
    let of = |factor: f64| if field.whole { (present * factor).round() } else { present * factor };
    let mut all: Vec<(f64, Tuning)> =
        FACTORS.iter().filter_map(|factor| Some((of(*factor), field.with(tuning, of(*factor))?))).collect();
    all.dedup_by(|a, b| a.0 == b.0);
    all
}

/// The best value, and the times at the present one and at that: geometric means over the batches that the best value sends
/// another way, or over all. `None` where nothing was tried.
fn propose(present: f64, tried: &[Tried]) -> Option<(f64, [f64; 2])> {
    let values = &tried.first()?.values;
    let at = values.iter().position(|value| *value == present)?;
    let mean = |i: usize, among: &[&Tried]| mean(among.iter().map(|t| t.us[i]));
    let all: Vec<&Tried> = tried.iter().collect();
    let mut best = (present, [mean(at, &all); 2], mean(at, &all));
    // The nearest first: of values that do the same, it stays.
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| (values[*a] / present).ln().abs().total_cmp(&(values[*b] / present).ln().abs()));
    for i in order {
        let changed: Vec<&Tried> = tried.iter().filter(|t| t.ways[i] != t.ways[at]).collect();
        let times = [mean(at, &changed), mean(i, &changed)];
        if !changed.is_empty() && times[1] < times[0] * (1.0 - NOISE) && mean(i, &all) < best.2 {
            best = (values[i], times, mean(i, &all));
        }
    }
    Some((best.0, best.1))
}

impl Thresholds {
    /// For people.
    pub fn text(&self) -> String {
        let mut rows = table(["field", "present", "proposed", "us present", "us proposed", "T"]);
        for row in &self.fields {
            rows.add_row([
                row.field.to_owned(),
                row.present.to_string(),
                row.proposed.to_string(),
                format!("{:.1}", row.us_present),
                format!("{:.1}", row.us_proposed),
                listed(row.batches.iter().map(|batch| batch.tokens).collect()),
            ]);
        }
        let mut out = rows.to_string();
        if !self.not_measured.is_empty() {
            out += &format!("\ndecide nothing in this layer: {}", self.not_measured.join(", "));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_keep_order_and_range() {
        let tuning = wgmoe::plan::tuning::TuningTable::built_in().unwrap().matrix;
        for field in &FIELDS {
            let all = candidates(field, &tuning);
            assert!(all.is_sorted_by(|a, b| a.0 < b.0), "{}", field.name);
            assert!(
                all.iter().any(|(value, same)| *value == (field.get)(&tuning) && *same == tuning),
                "{}",
                field.name
            );
            assert!(all.iter().all(|(value, changed)| (field.get)(changed) == *value), "{}", field.name);
        }
        let few = Tuning { few_pairs: 1, ..tuning };
        let field = FIELDS.iter().find(|field| field.name == "few_pairs").unwrap();
        assert_eq!(candidates(field, &few).iter().map(|(value, _)| *value).collect::<Vec<_>>(), [1.0, 2.0, 4.0]);
    }

    #[test]
    fn a_value_is_proposed_where_it_gains_more_than_the_noise() {
        // Values 1, 2 and 4; a batch that the first sends another way, and one that the last does.
        let tried = |low: f64, high: f64| {
            let batch = |us: [f64; 3], ways: [usize; 3]| Tried {
                tokens: 1,
                adapters: 0,
                values: vec![1.0, 2.0, 4.0],
                us: us.to_vec(),
                ways: ways.to_vec(),
            };
            [batch([low, 100.0, 100.0], [0, 1, 1]), batch([100.0, 100.0, high], [0, 0, 1])]
        };
        let propose = |low, high| propose(2.0, &tried(low, high)).unwrap();
        let near = |got: (f64, [f64; 2]), value: f64, us: [f64; 2]| {
            got.0 == value && got.1.iter().zip(us).all(|(a, b)| (a - b).abs() < 1e-9)
        };
        assert!(near(propose(100.0, 100.0), 2.0, [100.0, 100.0]));
        assert!(near(propose(99.0, 101.0), 2.0, [100.0, 100.0]), "that is noise");
        assert!(near(propose(90.0, 101.0), 1.0, [100.0, 90.0]));
        assert!(near(propose(120.0, 90.0), 4.0, [100.0, 90.0]));
        assert!(near(propose(90.0, 80.0), 4.0, [100.0, 80.0]), "the better of two");
        assert_eq!(super::propose(2.0, &[]), None);
    }
}
