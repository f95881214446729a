//! The stages that work row by row on the device against the oracle: activation, combine, norm, embed.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use common::{Rng, TOL_F32, UNWRITTEN_F32, each_case, rel_err};
use gpu_run::{Output, run, upload, weights};
use wgmoe::Gpu;
use wgmoe::activation::Activation;
use wgmoe::dtype::DType;
use wgmoe::kernels::activation::Activate;
use wgmoe::kernels::combine::Combine;
use wgmoe::kernels::embed::Embed;
use wgmoe::kernels::norm::Norm;
use wgmoe::reference;

const KINDS: [Activation; 4] = [
    Activation::Silu,
    Activation::Gelu,
    Activation::SwigluClamped { alpha: 1.702, limit: 7.0 },
    Activation::ReluSquared,
];

fn close(got: &[f32], expected: &[f32]) -> Result<(), String> {
    let off = rel_err(got, expected);
    if off > TOL_F32 { Err(format!("off by {off}")) } else { Ok(()) }
}

fn activate(gpu: &Gpu, kind: Activation, width: usize, gate_up: &[f32], ids: Option<&[i32]>) -> Vec<f32> {
    let rows = gate_up.len() / kind.input_columns(width);
    let input = upload(gpu, gate_up);
    let ids = ids.map(|ids| upload(gpu, ids));
    let h = Output::new(gpu, rows * width, UNWRITTEN_F32);
    run(gpu, |rec, pass| {
        Activate { rows, width, kind, gate_up: &input, ids: ids.as_ref(), h: &h.view }.record(rec, pass)
    });
    h.read(gpu)
}

#[test]
fn every_activation_equals_the_oracle_and_leaves_rows_without_expert_alone() {
    let mut cases = Vec::new();
    for kind in KINDS {
        for (rows, width) in [(0, 8), (1, 4), (3, 20), (7, 64), (67, 12)] {
            cases.push((kind, rows, width));
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |(kind, rows, width)| {
            let columns = kind.input_columns(*width);
            let mut gate_up: Vec<f32> = Rng::new(31).floats(rows * columns).iter().map(|v| v * 10.0).collect();
            let ids: Vec<i32> = (0..*rows).map(|p| if p % 5 == 2 { [-1, i32::MIN][p % 2] } else { 3 }).collect();
            let dense = activate(&gpu, *kind, *width, &gate_up, None);
            let mut expected = vec![UNWRITTEN_F32; rows * width];
            reference::activation(&gate_up, &vec![0; *rows], *width, *kind, &mut expected);
            close(&dense, &expected)?;
            for p in (0..*rows).filter(|p| ids[*p] < 0) {
                gate_up[p * columns..(p + 1) * columns].fill(f32::NAN);
            }
            let got = activate(&gpu, *kind, *width, &gate_up, Some(&ids));
            for (p, id) in ids.iter().enumerate() {
                let row = p * width..(p + 1) * width;
                if *id < 0 {
                    if got[row].iter().any(|v| v.to_bits() != UNWRITTEN_F32.to_bits()) {
                        return Err(format!("row {p} was written"));
                    }
                } else if got[row.clone()] != dense[row] {
                    return Err(format!("row {p} differs from the dense one"));
                }
            }
            Ok(())
        });
    }
}

#[test]
fn activations_of_large_inputs_are_finite_and_right() {
    let values = [1e6, -1e6, 100.0, -100.0, 89.0, -89.0, 7.5, -7.5, 1e-20, -1e-20, 0.0, -0.0];
    for gpu in device::every_variant() {
        for kind in KINDS {
            for gate in values {
                let (f, columns) = (12, kind.input_columns(12));
                let gate_up: Vec<f32> = match kind {
                    Activation::SwigluClamped { .. } => {
                        (0..columns).map(|i| if i % 2 == 0 { gate } else { values[i / 2] }).collect()
                    }
                    Activation::ReluSquared => vec![gate; f],
                    _ => [vec![gate; f], values.to_vec()].concat(),
                };
                let got = activate(&gpu, kind, f, &gate_up, None);
                let mut expected = vec![0.0; f];
                reference::activation(&gate_up, &[0], f, kind, &mut expected);
                for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
                    let near = (g - e).abs() <= e.abs() * TOL_F32 + 1e-18;
                    assert!(g.is_finite() && near, "{kind:?} gate {gate} column {i}: {g}, expected {e}");
                }
            }
        }
    }
}

#[test]
fn rows_of_pairs_without_expert_never_reach_an_output() {
    let mut cases = Vec::new();
    for (tokens, top_k, hidden) in [(0, 2, 8), (1, 1, 4), (5, 2, 20), (13, 4, 64), (67, 8, 12)] {
        for accumulate in [false, true] {
            cases.push((tokens, top_k, hidden, accumulate));
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |(tokens, top_k, hidden, accumulate)| {
            let (pairs, mut rng) = (tokens * top_k, Rng::new(32));
            let (mut y, mut w) = (rng.floats(pairs * hidden), rng.floats(pairs));
            // Token 1 has no expert here at all.
            let ids: Vec<i32> =
                (0..pairs).map(|p| if p % 3 == 1 || p / top_k == 1 { [-1, -8, i32::MIN][p % 3] } else { 0 }).collect();
            for p in (0..pairs).filter(|p| ids[*p] < 0) {
                y[p * hidden..(p + 1) * hidden].fill(f32::NAN);
                w[p] = f32::NAN;
            }
            let before = if *accumulate { rng.floats(tokens * hidden) } else { vec![UNWRITTEN_F32; tokens * hidden] };
            let out = Output::of(&gpu, &before, UNWRITTEN_F32);
            let (y_view, w_view, ids_view) = (upload(&gpu, &y), upload(&gpu, &w), upload(&gpu, &ids));
            run(&gpu, |rec, pass| {
                Combine {
                    tokens: *tokens,
                    top_k: *top_k,
                    hidden: *hidden,
                    y: &y_view,
                    topk_weights: &w_view,
                    ids: &ids_view,
                    out: &out.view,
                    accumulate: *accumulate,
                }
                .record(rec, pass)
            });
            let mut expected = before;
            reference::combine(&y, &w, &ids, *top_k, *hidden, &mut expected, *accumulate);
            close(&out.read(&gpu), &expected)
        });
    }
}

#[test]
fn norm_equals_the_oracle_on_any_width_and_gathers_rows() {
    let cases =
        [(0, 8), (1, 4), (3, 28), (7, 32), (5, 256), (2, 260), (31, 36), (2, 1028), (2, 4000), (3, 4100), (1, 8196)];
    for gpu in device::every_variant() {
        each_case(&cases, |(rows, width)| {
            let mut rng = Rng::new(33);
            let mut x = rng.floats(40 * width);
            x[..*width].fill(0.0);
            let weight = rng.floats(*width);
            let (x_view, weight_view) = (upload(&gpu, &x), upload(&gpu, &weight));
            let picked: Vec<u32> = (0..*rows).map(|_| rng.below(40) as u32).collect();
            let gather = upload(&gpu, &picked);
            for gathered in [false, true] {
                let out = Output::new(&gpu, rows * width, UNWRITTEN_F32);
                run(&gpu, |rec, pass| {
                    Norm {
                        rows: *rows,
                        width: *width,
                        eps: 1e-6,
                        x: &x_view,
                        weight: &weight_view,
                        gather: gathered.then_some(&gather),
                        out: &out.view,
                    }
                    .record(rec, pass)
                });
                let source = |i: usize| if gathered { picked[i] as usize } else { i };
                let input: Vec<f32> = (0..*rows).flat_map(|i| x[source(i) * width..][..*width].to_vec()).collect();
                let mut expected = vec![0.0; rows * width];
                reference::rms_norm(&input, &weight, 1e-6, &mut expected);
                close(&out.read(&gpu), &expected).map_err(|e| format!("gathered {gathered}: {e}"))?;
            }
            Ok(())
        });
    }
}

#[test]
fn embedding_takes_given_ids_and_sampled_ids_from_every_piece() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (rows, d, limit_rows) in [(0, 8, 100), (1, 8, 100), (9, 24, 100), (9, 24, 7), (67, 40, 3)] {
            cases.push((dtype, rows, d, limit_rows));
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |(dtype, rows, d, limit_rows)| {
            let (vocab, mut rng) = (23, Rng::new(34));
            let limit = (limit_rows * d * dtype.size()) as u64;
            let (table, decoded) = weights(&gpu, *dtype, [1, vocab, *d], &rng.floats(vocab * d), limit);
            // The last sequence's sample failed: its row is entry 0.
            let last_ids = [5, 22, 0, 7, -1];
            let mut ids = Vec::new();
            let mut row_table = Vec::new();
            for t in 0..*rows {
                let sequence = rng.below(last_ids.len());
                let token = if t % 3 == 1 { -1 } else { rng.below(vocab) as i32 };
                let id = if token < 0 { last_ids[sequence].max(0) } else { token };
                ids.push(id as u32);
                row_table.push([token, 0, sequence as i32, -1]);
            }
            let (row_view, last_view) = (upload(&gpu, &row_table), upload(&gpu, &last_ids));
            let hidden = Output::new(&gpu, rows * d, UNWRITTEN_F32);
            run(&gpu, |rec, pass| {
                Embed { rows: *rows, row_table: &row_view, last_ids: &last_view, table: &table, hidden: &hidden.view }
                    .record(rec, pass)
            });
            let mut expected = vec![0.0; rows * d];
            reference::embed(&decoded, &ids, *d, &mut expected);
            if hidden.read(&gpu) == expected { Ok(()) } else { Err("rows differ".to_owned()) }
        });
    }
}
