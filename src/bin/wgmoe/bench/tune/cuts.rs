//! How the experts' products on cooperative matrices are cut.

use std::sync::Arc;

use anyhow::Context;
use serde::Serialize;
use wgmoe::gpu::Gpu;
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::matrix::{Cuts, EDGE, MatrixTile};

use crate::bench::measure::{Batch, Bench, Effort};
use crate::bench::tune::{EFFORT, NOISE, is_limit, kinds, listed, mean, race, spread};
use crate::session::bar;
use crate::table::table;

/// Columns and depths that are tried.
const COLUMNS: [u32; 8] = [32, 64, 96, 128, 160, 192, 256, 320];
const DEPTHS: [u32; 5] = [16, 32, 64, 96, 128];
/// Steps from the present cut at most.
const MOST_STEPS: usize = 12;
/// Batches of a cut with as many adapters.
const BATCHES: usize = 2;
/// Tokens of the batches that are tried where none are asked for: powers of two.
const MOST_DOUBLINGS: u32 = 12;
/// What the output of one cut may differ from that of another, over the largest value: sums in another order, of the same products.
const TOLERANCE: f32 = 1e-3;

/// What a search found.
#[derive(Debug, Serialize)]
pub struct Searched {
    /// Rows and columns of the device's matrices.
    edge: u32,
    /// Cuts that a batch takes.
    cuts: Vec<Row>,
    /// Heights of those that none takes.
    not_measured: Vec<u32>,
    /// All cuts with what is proposed.
    pub proposed: Cuts,
}

/// One cut.
#[derive(Debug, Serialize)]
struct Row {
    present: MatrixTile,
    proposed: MatrixTile,
    /// Geometric means over the batches.
    us_present: f64,
    us_proposed: f64,
    batches: Vec<Taken>,
    /// What was timed on the way, with the mean over the batches.
    tried: Vec<(MatrixTile, f64)>,
    /// What was not: the reason.
    left_out: Vec<(MatrixTile, String)>,
}

/// A batch that takes a cut.
#[derive(Debug, Clone, Copy, Serialize)]
struct Taken {
    tokens: usize,
    adapters: usize,
}

/// Goes from each cut that one of the batches takes to better ones.
pub fn search(bench: &Bench<'_>, adapters: usize, tokens: &[usize]) -> anyhow::Result<Searched> {
    let caps = bench.gpu.capabilities();
    let present = (*caps.cuts).clone();
    let mut found = Searched { edge: caps.edge, cuts: Vec::new(), not_measured: Vec::new(), proposed: present.clone() };
    let bar = bar(present.experts.len(), "cuts");
    for (at, cut) in present.experts.iter().enumerate() {
        bar.set_message(words(cut));
        let place = Place { bench, cuts: &found.proposed, at };
        let batches = place.batches(adapters, tokens)?;
        if batches.is_empty() {
            found.not_measured.push(cut.height);
        } else {
            let row = place.row(batches)?;
            found.proposed.experts[at] = row.proposed;
            found.cuts.push(row);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(found)
}

/// A cut of the list.
struct Place<'a> {
    bench: &'a Bench<'a>,
    cuts: &'a Cuts,
    at: usize,
}

impl Place<'_> {
    fn present(&self) -> MatrixTile {
        self.cuts.experts[self.at]
    }

    /// The list with another cut here, if there can be such a list.
    fn with(&self, cut: MatrixTile) -> Option<Cuts> {
        let mut cuts = self.cuts.clone();
        cuts.experts[self.at] = cut;
        cuts.check(self.bench.gpu.capabilities().edge).is_ok().then_some(cuts)
    }

    /// A device that has `cut` here.
    fn gpu(&self, cut: MatrixTile) -> Option<Gpu> {
        let gpu = self.bench.gpu;
        let cuts = Arc::new(self.with(cut)?);
        Some(gpu.with_capabilities(Capabilities { cuts, ..gpu.capabilities().clone() }))
    }

    fn neighbours(&self, cut: &MatrixTile) -> Vec<MatrixTile> {
        neighbours(cut).into_iter().filter(|cut| self.with(*cut).is_some()).collect()
    }

    /// Batches that take the present cut: of the number of tokens asked for, or a few.
    fn batches(&self, adapters: usize, tokens: &[usize]) -> anyhow::Result<Vec<Taken>> {
        let own = self.gpu(self.present()).context("the present cuts")?;
        let powers: Vec<usize> = (0..=MOST_DOUBLINGS).map(|n| 1 << n).collect();
        let (tokens_open, mut all) = (tokens.is_empty(), Vec::new());
        let asked = if tokens_open { &powers } else { tokens };
        for adapters in kinds(adapters) {
            let mut taken = Vec::new();
            for tokens in asked {
                match self.bench.ways(&own, *tokens, adapters) {
                    Ok(ways) if ways.iter().any(|label| takes(label, &self.present())) => taken.push(*tokens),
                    Ok(_) => {}
                    // More tokens need no less room.
                    Err(error) if tokens_open && is_limit(&error) => break,
                    Err(error) => return Err(error),
                }
            }
            let taken = if tokens_open { spread(&taken, BATCHES) } else { taken };
            all.extend(taken.into_iter().map(|tokens| Taken { tokens, adapters }));
        }
        Ok(all)
    }

    /// Searches this cut on some batches.
    fn row(&self, batches: Vec<Taken>) -> anyhow::Result<Row> {
        let mut entries = Vec::new();
        let own = self.gpu(self.present()).context("the present cuts")?;
        for Taken { tokens, adapters } in &batches {
            let batch = self.bench.batch(*tokens, *adapters)?;
            let out = self.bench.measure(&own, &batch, Effort { runs: 0, ..EFFORT })?.out;
            entries.push((batch, out));
        }
        let mut left_out = Vec::new();
        let time = |cuts: &[MatrixTile]| -> anyhow::Result<Vec<Option<f64>>> {
            let mut gpus = Vec::new();
            for cut in cuts {
                let gpu = self.gpu(*cut).context("a cut that was checked")?;
                match self.differs(&gpu, &entries) {
                    Ok(None) => gpus.push(Some(gpu)),
                    Ok(Some(by)) => {
                        left_out.push((*cut, format!("differs by {by:.1e} of the largest value")));
                        gpus.push(None);
                    }
                    // Nothing is found on a device that is lost, nor beside a present cut that fails.
                    Err(error) if *cut == cuts[0] => return Err(error),
                    // What a driver refuses, or has no room for.
                    Err(error) => {
                        self.bench.gpu.check()?;
                        left_out.push((*cut, format!("{error:#}")));
                        gpus.push(None);
                    }
                }
            }
            let racing: Vec<&Gpu> = gpus.iter().flatten().collect();
            let mut times = vec![Vec::new(); racing.len()];
            for (batch, _) in &entries {
                race(self.bench, batch, &racing)?.into_iter().zip(&mut times).for_each(|(us, of)| of.push(us));
            }
            let mut means = times.into_iter().map(mean);
            Ok(gpus.iter().map(|gpu| gpu.as_ref().and_then(|_| means.next())).collect())
        };
        let Climbed { best, us, tried } = climb(self.present(), |cut| self.neighbours(cut), time)?;
        let [us_present, us_proposed] = us;
        Ok(Row { present: self.present(), proposed: best, us_present, us_proposed, batches, tried, left_out })
    }

    /// How far the output of some batches on `gpu` is from what it was, if too far.
    fn differs(&self, gpu: &Gpu, entries: &[(Batch, Vec<f32>)]) -> anyhow::Result<Option<f32>> {
        for (batch, expected) in entries {
            let got = self.bench.measure(gpu, batch, Effort { runs: 0, ..EFFORT })?.out;
            let by = difference(&got, expected);
            if by.is_nan() || by > TOLERANCE {
                return Ok(Some(by));
            }
        }
        Ok(None)
    }
}

/// The largest difference of two outputs over the largest value; NaN where one of them holds what is no number.
fn difference(got: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(0f32, |most, v| most.max(v.abs()));
    let most = |most: f32, (a, b): (&f32, &f32)| if (a - b).is_finite() { most.max((a - b).abs()) } else { f32::NAN };
    let off = got.iter().zip(expected).try_fold(0f32, |so_far, pair| Some(most(so_far, pair)).filter(|v| !v.is_nan()));
    off.map_or(f32::NAN, |off| off / largest.max(f32::MIN_POSITIVE))
}

/// Where a climb ended.
struct Climbed {
    best: MatrixTile,
    /// At the beginning and at the end, of one race.
    us: [f64; 2],
    tried: Vec<(MatrixTile, f64)>,
}

/// From `present` to the fastest of its neighbours, as long as that gains more than the noise.
fn climb(
    present: MatrixTile,
    neighbours: impl Fn(&MatrixTile) -> Vec<MatrixTile>,
    mut time: impl FnMut(&[MatrixTile]) -> anyhow::Result<Vec<Option<f64>>>,
) -> anyhow::Result<Climbed> {
    let (mut best, mut tried): (MatrixTile, Vec<(MatrixTile, f64)>) = (present, Vec::new());
    let mut seen = vec![present];
    for _ in 0..MOST_STEPS {
        let new: Vec<MatrixTile> = neighbours(&best).into_iter().filter(|cut| !seen.contains(cut)).collect();
        seen.extend(&new);
        // Beside the one they should be better than.
        let all: Vec<MatrixTile> = std::iter::once(best).chain(new).collect();
        let times = time(&all)?;
        let timed: Vec<(MatrixTile, f64)> =
            all.into_iter().zip(times).filter_map(|(cut, us)| Some((cut, us?))).collect();
        let own = timed.iter().find(|(cut, _)| *cut == best).map(|(_, us)| *us);
        let own = own.context("the best cut so far computes something else than before")?;
        let fastest = timed.iter().min_by(|a, b| a.1.total_cmp(&b.1)).copied();
        let known: Vec<MatrixTile> = tried.iter().map(|(cut, _)| *cut).collect();
        tried.extend(timed.into_iter().filter(|(cut, _)| !known.contains(cut)));
        match fastest {
            Some((cut, us)) if us < own * (1.0 - NOISE) => best = cut,
            _ => break,
        }
    }
    if best == present {
        let us = tried.first().map_or(0.0, |(_, us)| *us);
        return Ok(Climbed { best, us: [us; 2], tried });
    }
    // Both at once: what was gained in steps may have been noise.
    let last: Vec<f64> = time(&[present, best])?.into_iter().flatten().collect();
    let [us_present, us_best] = last[..] else { anyhow::bail!("the present cut computes something else than before") };
    if us_best < us_present * (1.0 - NOISE) {
        return Ok(Climbed { best, us: [us_present, us_best], tried });
    }
    Ok(Climbed { best: present, us: [us_present; 2], tried })
}

/// Cuts of the same height that differ from `cut` in one thing, or in two that belong together; some of them cannot be.
fn neighbours(cut: &MatrixTile) -> Vec<MatrixTile> {
    let own = *cut;
    let mut all = Vec::new();
    // The next smaller and larger of some numbers.
    let beside = |numbers: &[u32], of: u32| -> Vec<u32> {
        let (below, above) = (numbers.iter().filter(|n| **n < of).max(), numbers.iter().filter(|n| **n > of).min());
        below.into_iter().chain(above).copied().collect()
    };
    // Parts of a length in whole blocks.
    let parts = |length: u32| -> Vec<u32> {
        (1..=length / EDGE).map(|n| n * EDGE).filter(|n| length.is_multiple_of(*n)).collect()
    };

    for columns in beside(&COLUMNS, own.columns) {
        all.push(MatrixTile { columns, ..own });
    }
    for (columns, sub_columns) in [(own.columns * 2, own.sub_columns * 2), (own.columns / 2, own.sub_columns / 2)] {
        all.push(MatrixTile { columns, sub_columns, ..own });
    }
    for depth in beside(&DEPTHS, own.depth) {
        // In a direct cut blocks are loaded ahead within a step.
        let fits = |x_ahead: &u32| !own.direct || (depth / EDGE).is_multiple_of(*x_ahead);
        all.extend((1..=own.x_ahead).rev().find(fits).map(|x_ahead| MatrixTile { depth, x_ahead, ..own }));
    }
    for ahead in [own.ahead.saturating_sub(1), own.ahead + 1] {
        let x_ahead = if own.x_ahead == own.ahead { ahead } else { 1 };
        all.push(MatrixTile { ahead, x_ahead, ..own });
    }
    let round = if own.direct { own.depth / EDGE } else { own.ahead };
    all.extend((1..=round).filter(|n| round.is_multiple_of(*n)).map(|x_ahead| MatrixTile { x_ahead, ..own }));
    let (rows, columns) = (beside(&parts(own.height), own.sub_rows), beside(&parts(own.columns), own.sub_columns));
    all.extend(rows.iter().map(|sub_rows| MatrixTile { sub_rows: *sub_rows, ..own }));
    all.extend(columns.iter().map(|sub_columns| MatrixTile { sub_columns: *sub_columns, ..own }));
    // As many subgroups, of another shape.
    for sub_rows in rows {
        all.extend(columns.iter().map(|sub_columns| MatrixTile { sub_rows, sub_columns: *sub_columns, ..own }));
    }
    all.push(MatrixTile { rests: !own.rests, ..own });
    all.push(MatrixTile { kept: !own.kept, ..own });
    let mut once: Vec<MatrixTile> = Vec::new();
    for cut in all {
        if cut != own && !once.contains(&cut) {
            once.push(cut);
        }
    }
    once
}

/// Whether the dispatch with this label is a product of the experts in this cut, whose height no other has.
fn takes(label: &str, cut: &MatrixTile) -> bool {
    let stem = if cut.direct { "expert_gemm_direct[" } else { "expert_gemm_matrix[" };
    label.starts_with(stem) && label.contains(&format!(" tiles {} ", cut.height))
}

/// A cut for people.
fn words(cut: &MatrixTile) -> String {
    let MatrixTile { height, columns, depth, ahead, x_ahead, sub_rows, sub_columns, rests, kept, direct } = cut;
    let mut out = format!(
        "{height} x {columns}, steps of {depth}, subgroups of {sub_rows} x {sub_columns}, ahead {ahead} and {x_ahead}"
    );
    for (word, said) in [("rests", rests), ("kept", kept), ("direct", direct)] {
        if *said {
            out += &format!(", {word}");
        }
    }
    out
}

impl Searched {
    /// For people.
    pub fn text(&self) -> String {
        let mut rows = table(["present", "proposed", "us present", "us proposed", "tried", "left out", "T"]);
        for row in &self.cuts {
            let proposed = if row.proposed == row.present { "the same".to_owned() } else { words(&row.proposed) };
            rows.add_row([
                words(&row.present),
                proposed,
                format!("{:.1}", row.us_present),
                format!("{:.1}", row.us_proposed),
                row.tried.len().to_string(),
                row.left_out.len().to_string(),
                listed(row.batches.iter().map(|batch| batch.tokens).collect()),
            ]);
        }
        let mut out = format!("cuts for matrices of {} x {}\n{rows}", self.edge, self.edge);
        if !self.not_measured.is_empty() {
            let heights = self.not_measured.iter().map(|height| *height as usize).collect();
            out += &format!("\nno batch takes cuts of height: {}", listed(heights));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wgmoe::dtype::DType;
    use wgmoe::kernels::expert_gemm_variant::{Flags, Sizes, variant};
    use wgmoe::plan::tuning::TuningTable;

    fn table_cuts() -> Cuts {
        TuningTable::built_in().unwrap().cuts.of_16
    }

    #[test]
    fn neighbours_lead_from_cut_to_cut() {
        for cut in table_cuts().experts {
            let all: Vec<MatrixTile> =
                neighbours(&cut).into_iter().filter(|cut| cut.check(16, false).is_ok()).collect();
            assert!(all.len() >= 4 && !all.contains(&cut), "{}: {}", words(&cut), all.len());
            assert!((1..all.len()).all(|i| !all[..i].contains(&all[i])), "{}: each once", words(&cut));
            assert!(all.iter().all(|other| other.direct == cut.direct), "the kind stays");
            assert!(all.iter().all(|other| other.height == cut.height), "who takes a cut takes the other, too");
            assert!(all.iter().any(|other| other.depth != cut.depth), "{}: steps", words(&cut));
            // There is a way back.
            let back = all.iter().filter(|other| neighbours(other).contains(&cut)).count();
            assert!(2 * back > all.len(), "{}: {back} of {}", words(&cut), all.len());
        }
    }

    #[test]
    fn a_climb_ends_at_the_best_and_is_not_moved_by_noise() {
        let start = table_cuts().experts[0];
        let legal = |cut: &MatrixTile| -> Vec<MatrixTile> {
            neighbours(cut)
                .into_iter()
                .filter(|cut| cut.height == start.height && cut.check(16, false).is_ok())
                .collect()
        };
        // The best has wide tiles and loads far ahead.
        let cost = |cut: &MatrixTile| 100.0 + f64::from(cut.columns.abs_diff(128)) - 5.0 * f64::from(cut.ahead.min(4));
        let timed = |cuts: &[MatrixTile]| Ok(cuts.iter().map(|cut| Some(cost(cut))).collect());
        let Climbed { best, us, tried } = climb(start, legal, timed).unwrap();
        assert_eq!((best.columns, best.ahead), (128, 4));
        assert_eq!(us, [cost(&start), cost(&best)]);
        assert!(tried.len() > 10);

        let noise =
            |cuts: &[MatrixTile]| Ok((0..cuts.len()).map(|i| Some(if i == 0 { 100.0 } else { 98.5 })).collect());
        let Climbed { best, us, .. } = climb(start, legal, noise).unwrap();
        assert_eq!((best, us), (start, [100.0; 2]));

        // What seems to gain at every step, and does not in the end.
        let mut calls = 0;
        let drift = |cuts: &[MatrixTile]| {
            calls += 1;
            let last = cuts.len() == 2 && cuts[0] == start;
            Ok((0..cuts.len()).map(|i| Some(if i == 0 || last { 100.0 } else { 90.0 })).collect())
        };
        let Climbed { best, us, .. } = climb(start, legal, drift).unwrap();
        assert_eq!((best, us), (start, [100.0; 2]));
        assert!(calls > 2);

        // Others that fail are passed over; the present one must not.
        let alone = |cuts: &[MatrixTile]| Ok((0..cuts.len()).map(|i| (i == 0).then_some(7.0)).collect());
        assert_eq!(climb(start, legal, alone).unwrap().us, [7.0; 2]);
        assert!(climb(start, legal, |cuts| Ok(vec![None; cuts.len()])).is_err());
    }

    #[test]
    fn products_are_known_by_their_labels() {
        let caps = wgmoe::plan::classes::classes().into_iter().find(|caps| caps.matrix && caps.edge == 16).unwrap();
        let label = |rows: &'static str, cut: &MatrixTile| {
            let (flags, sizes) = (Flags { lora: true, ..Flags::default() }, Sizes::default());
            let (kernel, vars) = variant(&caps, DType::Bf16, rows, *cut, flags, &sizes);
            wgmoe::kernels::linker::label(kernel, &vars)
        };
        let all = &caps.cuts.experts;
        for (i, cut) in all.iter().enumerate() {
            let taken: Vec<usize> = (0..all.len()).filter(|j| takes(&label("tiles", cut), &all[*j])).collect();
            assert_eq!(taken, [i]);
            assert!(!takes(&label("dense", cut), cut));
        }
    }

    #[test]
    fn outputs_that_differ_are_told() {
        assert_eq!(difference(&[1.0, -4.0], &[1.0, -4.0]), 0.0);
        assert_eq!(difference(&[1.0, -3.0], &[1.0, -4.0]), 0.25);
        assert!(difference(&[f32::NAN, 0.0], &[1.0, 0.0]).is_nan());
        assert!(difference(&[f32::INFINITY], &[1.0]).is_nan());
    }
}
