//! Routing on the device: ids exact against the oracle wherever they are owed, weights within the table.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use common::{ROUTE_GAP, Rng, TOL_F32, UNWRITTEN_F32, UNWRITTEN_I32, rel_err};
use gpu_run::{Output, run, upload};
use wgmoe::Gpu;
use wgmoe::kernels::route::Route;
use wgmoe::plan::matrix::DEPTH_PARTS;
use wgmoe::reference;
use wgmoe::router::{GroupScore, RouteOptions, STATUS_NON_FINITE, Score};

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

fn route_on(
    gpu: &Gpu,
    logits: &[f32],
    bias: Option<&[f32]>,
    [tokens, experts, top_k]: [usize; 3],
    options: &RouteOptions,
) -> (Vec<i32>, Vec<f32>, u32) {
    let whole = route_parts(gpu, logits, 1, bias, [tokens, experts, top_k], options);
    // In parts, of which one has the logit and the others nothing.
    let mut parts = vec![0.0; DEPTH_PARTS * logits.len()];
    logits.iter().enumerate().for_each(|(i, logit)| parts[i % DEPTH_PARTS * logits.len() + i] = *logit);
    let added = route_parts(gpu, &parts, DEPTH_PARTS, bias, [tokens, experts, top_k], options);
    assert_eq!((&whole.0, whole.2), (&added.0, added.2), "logits in parts");
    let bits = |weights: &[f32]| weights.iter().map(|w| w.to_bits()).collect::<Vec<u32>>();
    assert_eq!(bits(&whole.1), bits(&added.1), "logits in parts");
    whole
}

fn route_parts(
    gpu: &Gpu,
    logits: &[f32],
    parts: usize,
    bias: Option<&[f32]>,
    [tokens, experts, top_k]: [usize; 3],
    options: &RouteOptions,
) -> (Vec<i32>, Vec<f32>, u32) {
    let view = upload(gpu, logits);
    let bias = bias.map(|b| upload(gpu, b));
    let ids = Output::new(gpu, tokens * top_k, UNWRITTEN_I32);
    let weights = Output::new(gpu, tokens * top_k, UNWRITTEN_F32);
    let status = Output::new(gpu, 1, 0u32);
    run(gpu, |rec, pass| {
        Route {
            tokens,
            experts,
            top_k,
            options,
            logits: &view,
            parts,
            bias: bias.as_ref(),
            topk_ids: &ids.view,
            topk_weights: &weights.view,
            status: &status.view,
        }
        .record(rec, pass)
    });
    (ids.read(gpu), weights.read(gpu), status.read(gpu)[0])
}

/// Ids are owed exactly where the oracle's gap is above `gap`; few rows may be excused.
fn check(gpu: &Gpu, logits: &[f32], bias: Option<&[f32]>, shape: [usize; 3], options: &RouteOptions, gap: f32) {
    let [tokens, experts, top_k] = shape;
    let what = format!("{} {shape:?} {options:?}", gpu.tier());
    let (ids, weights, status) = route_on(gpu, logits, bias, shape, options);
    let expected = reference::route(logits, bias, tokens, experts, top_k, options);
    assert_eq!(status, expected.status, "{what}");
    let mut excused = 0;
    for t in 0..tokens {
        let row = t * top_k..(t + 1) * top_k;
        if expected.gap[t] < gap {
            excused += 1;
            continue;
        }
        assert_eq!(ids[row.clone()], expected.ids[row.clone()], "token {t}: {what}");
        let off = rel_err(&weights[row.clone()], &expected.weights[row]);
        assert!(off <= TOL_F32, "token {t}: weights are off by {off}: {what}");
    }
    assert!(excused * 4 <= tokens, "{excused} of {tokens} rows are too close to compare: {what}");
}

#[test]
fn ids_are_exact_for_any_number_of_experts_and_places() {
    for gpu in device::every_variant() {
        let mut rng = Rng::new(5);
        for (experts, top_k) in
            [(3, 1), (3, 3), (8, 2), (16, 4), (63, 8), (64, 8), (65, 8), (128, 8), (257, 5), (300, 8)]
        {
            for score in [Score::Softmax, Score::Sigmoid] {
                for renormalise in [false, true] {
                    let options = RouteOptions { score, renormalise, scale: 2.5, ..RouteOptions::default() };
                    let logits: Vec<f32> = rng.floats(5 * experts).iter().map(|v| v * 4.0).collect();
                    check(&gpu, &logits, None, [5, experts, top_k], &options, 0.0);
                }
            }
        }
        assert_eq!(route_on(&gpu, &[], None, [0, 8, 2], &RouteOptions::default()), (vec![], vec![], 0));
    }
}

#[test]
fn ties_go_to_the_lower_id_and_both_zeros_are_equal() {
    for gpu in device::every_variant() {
        let options = RouteOptions::default();
        let mut rng = Rng::new(6);
        // Few different values: almost every place is a tie.
        for experts in [4, 70, 300] {
            let logits: Vec<f32> = (0..4 * experts).map(|_| rng.below(3) as f32 - 1.0).collect();
            check(&gpu, &logits, None, [4, experts, 4], &options, 0.0);
        }
        let (ids, ..) = route_on(&gpu, &[-0.0, 0.0, -1.0, 0.0, -0.0, -2.0], None, [1, 6, 5], &options);
        assert_eq!(ids, [0, 1, 3, 4, 2]);
    }
}

#[test]
fn rows_that_are_not_finite_give_defined_ids_weights_and_status() {
    let rows: [[f32; 6]; 8] = [
        [NAN, 1.0, 0.5, NAN, -NAN, 2.0],
        [INF, 1.0, -INF, INF, 0.0, NAN],
        [-INF, NAN, -INF, 3.0, -INF, -INF],
        [-INF; 6],
        [NAN; 6],
        [f32::MAX, INF, f32::MIN, -INF, 0.0, 1.0],
        [INF; 6],
        [-INF, -INF, -INF, -INF, 1.0, 2.0],
    ];
    for gpu in device::every_variant() {
        for score in [Score::Softmax, Score::Sigmoid] {
            for renormalise in [false, true] {
                let options = RouteOptions { score, renormalise, ..RouteOptions::default() };
                for row in &rows {
                    for top_k in [1, 2, 4, 6] {
                        check(&gpu, row, None, [1, 6, top_k], &options, 0.0);
                    }
                }
                check(&gpu, rows.as_flattened(), None, [8, 6, 3], &options, 0.0);
            }
        }
        let (ids, weights, status) = route_on(&gpu, &rows[3], None, [1, 6, 2], &RouteOptions::default());
        assert_eq!((ids, weights, status), (vec![-1, -1], vec![0.0, 0.0], STATUS_NON_FINITE));
    }
}

#[test]
fn bias_and_groups_select_as_the_oracle_does() {
    for gpu in device::every_variant() {
        let mut rng = Rng::new(7);
        for score in [Score::Softmax, Score::Sigmoid] {
            for (groups, top_groups, group_score) in [
                (1, 1, GroupScore::Max),
                (4, 2, GroupScore::Max),
                (8, 3, GroupScore::TopTwo),
                (32, 8, GroupScore::TopTwo),
            ] {
                for biased in [false, true] {
                    let options = RouteOptions { score, groups, top_groups, group_score, ..RouteOptions::default() };
                    let logits: Vec<f32> = rng.floats(16 * 64).iter().map(|v| v * 3.0).collect();
                    let bias = rng.floats(64);
                    check(&gpu, &logits, biased.then_some(&bias), [16, 64, 6], &options, ROUTE_GAP);
                }
            }
        }
    }
}
