//! Sampling on the device against the oracle.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use common::{Rng, UNWRITTEN_I32};
use gpu_run::{Output, run, upload};
use wgmoe::Gpu;
use wgmoe::kernels::sample::{Pick, Sample};
use wgmoe::reference::{argmax, sample};

const SEQUENCES: usize = 40;

fn pick(row: u32, sequence: u32) -> Pick {
    Pick { row, sequence, temperature: 0.0, top_p: 1.0, top_k: 0, u: 0.0, pad0: 0, pad1: 0 }
}

/// The sampled ids, after a check that each stands at its sequence too and no other sequence was touched.
fn sample_on(gpu: &Gpu, logits: &[f32], vocab: usize, picks: &[Pick]) -> Vec<i32> {
    let (logits, picks_view) = (upload(gpu, logits), upload(gpu, picks));
    let sampled = Output::new(gpu, picks.len(), UNWRITTEN_I32);
    let last_ids = Output::new(gpu, SEQUENCES, UNWRITTEN_I32);
    run(gpu, |rec, pass| {
        Sample {
            rows: picks.len(),
            vocab,
            logits: &logits,
            picks: &picks_view,
            sampled: &sampled.view,
            last_ids: &last_ids.view,
        }
        .record(rec, pass)
    });
    let ids = sampled.read(gpu);
    let mut expected = vec![UNWRITTEN_I32; SEQUENCES];
    for (pick, id) in picks.iter().zip(&ids) {
        expected[pick.sequence as usize] = *id;
    }
    assert_eq!(last_ids.read(gpu), expected);
    ids
}

#[test]
fn greedy_takes_the_largest_logit_and_the_lower_id_of_equals() {
    for gpu in device::every_variant() {
        let mut rng = Rng::new(51);
        for vocab in [1, 2, 63, 64, 65, 257] {
            // Few values, so that most rows have ties.
            let logits: Vec<f32> = (0..8 * vocab).map(|_| rng.below(4) as f32 - 2.0).collect();
            let picks: Vec<Pick> = (0..7).map(|i| pick((i * 3) % 8, 30 - i)).collect();
            let expected: Vec<i32> =
                picks.iter().map(|p| argmax(&logits[p.row as usize * vocab..][..vocab]) as i32).collect();
            assert_eq!(sample_on(&gpu, &logits, vocab, &picks), expected, "{vocab}");
        }
        assert!(sample_on(&gpu, &[1.0], 1, &[]).is_empty());
    }
}

#[test]
fn a_row_without_a_finite_logit_gives_minus_one_and_infinities_are_ordered() {
    const INF: f32 = f32::INFINITY;
    const NAN: f32 = f32::NAN;
    let rows = [[NAN; 4], [-INF; 4], [NAN, -INF, -3.0, NAN], [0.0, INF, f32::MAX, INF], [-0.0, 0.0, -1.0, NAN]];
    for gpu in device::every_variant() {
        for temperature in [0.0, 0.5] {
            for (top_k, top_p) in [(0, 1.0), (2, 1.0), (0, 0.5), (1, 0.0)] {
                let picks: Vec<Pick> = (0..5).map(|i| Pick { temperature, top_k, top_p, ..pick(i, i) }).collect();
                let got = sample_on(&gpu, rows.as_flattened(), 4, &picks);
                assert_eq!(got, [-1, -1, 2, 1, 0], "temperature {temperature} top_k {top_k} top_p {top_p}");
            }
        }
    }
}

/// The oracle's answer where it does not hang on the last bits of u or of the mass at top_p.
fn clear(row: &[f32], p: &Pick) -> Option<usize> {
    let at = |u: f32, top_p: f32| sample(row, p.temperature, p.top_k as usize, top_p, f64::from(u));
    let first = at(p.u, p.top_p);
    let firm = [-1e-4f32, 1e-4].iter().all(|d| {
        let top_p = if p.top_p < 1.0 { p.top_p + d } else { 1.0 };
        at((p.u + d).clamp(0.0, 0.9999), top_p) == first
    });
    firm.then_some(first)
}

#[test]
fn temperature_top_k_and_top_p_draw_as_the_oracle_does() {
    for gpu in device::every_variant() {
        let mut rng = Rng::new(52);
        let mut compared = 0;
        for vocab in [5, 64, 100, 300] {
            let logits: Vec<f32> = rng.floats(8 * vocab).iter().map(|v| v * 5.0).collect();
            for (top_k, top_p) in [(0, 1.0), (1, 1.0), (3, 1.0), (40, 0.9), (0, 0.5), (0, 0.95), (400, 0.0), (7, 0.7)] {
                for temperature in [0.3, 1.0, 2.5] {
                    let picks: Vec<Pick> = (0..12)
                        .map(|i| Pick { temperature, top_p, top_k, u: rng.unit() as f32 * 0.999, ..pick(i % 8, i) })
                        .collect();
                    let got = sample_on(&gpu, &logits, vocab, &picks);
                    for (p, id) in picks.iter().zip(got) {
                        if let Some(expected) = clear(&logits[p.row as usize * vocab..][..vocab], p) {
                            assert_eq!(id, expected as i32, "{} vocab {vocab} {p:?}", gpu.tier());
                            compared += 1;
                        }
                    }
                }
            }
        }
        // 1,152 draws; close calls are few.
        assert!(compared > 1000, "only {compared} draws could be compared");
    }
}

#[test]
fn equal_logits_at_a_threshold_all_stay() {
    let row = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0];
    for gpu in device::every_variant() {
        for (top_k, top_p) in [(2, 1.0), (0, 0.6)] {
            let draw = |u: f32| {
                let p = Pick { temperature: 1.0, top_k, top_p, u, ..pick(0, 0) };
                let expected = sample(&row, 1.0, top_k as usize, top_p, f64::from(u)) as i32;
                (sample_on(&gpu, &row, 6, &[p])[0], expected)
            };
            let drawn: Vec<(i32, i32)> = [0.01, 0.4, 0.6, 0.75, 0.99].into_iter().map(draw).collect();
            assert!(drawn.iter().all(|(got, expected)| got == expected), "{drawn:?}");
            assert!(drawn.iter().any(|(got, _)| *got == 4), "{drawn:?}");
        }
    }
}
