//! Rows packed for matrices on the device against the oracle: by themselves, and by the norm that makes them. Neither needs a
//! matrix, only f16.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use common::{Rng, TOL_F32, UNWRITTEN_F32, each_case, rel_err};
use gpu_run::{Output, read, replayed, run, upload};
use wgmoe::Gpu;
use wgmoe::dtype::DType;
use wgmoe::kernels::norm::Norm;
use wgmoe::kernels::norm_pack;
use wgmoe::kernels::pack::{Form, Packed, Reads, pack};
use wgmoe::plan::matrix::{DEPTH_PARTS, MatrixTile};
use wgmoe::plan::tuning::TuningTable;
use wgmoe::reference;

const LABELS: [&str; 2] = ["packed", "packed blocks"];

fn devices() -> Vec<Gpu> {
    let f16 = |gpu: &Gpu| gpu.device().features().contains(wgpu::Features::SHADER_F16);
    device::every_variant().into_iter().filter(f16).collect()
}

/// Every form in which a product reads rows.
fn forms() -> [Form; 4] {
    let cut: Option<MatrixTile> = TuningTable::built_in().unwrap().cuts.of_16.dense.pop();
    assert!(cut.is_some_and(|cut| cut.direct));
    [Form::ROWS, Form::TWICE, Form { cut, ..Form::ROWS }, Form { cut, by_row: false, ..Form::ROWS }]
}

/// What lies in a form: the values of rows, what rounding took from them, and the exponents.
#[derive(Debug, PartialEq)]
struct Unpacked {
    values: Vec<f32>,
    rests: Vec<f32>,
    exponents: Vec<f32>,
}

/// All that a packing holds: one [`Unpacked`] for the rows, if they are written, and one for the blocks.
fn unpacked(gpu: &Gpu, packed: &Packed) -> Result<Vec<Unpacked>, String> {
    let Packed { view, rows, width, twice, by_row, blocks, .. } = packed;
    let (rows, width, stride) = (*rows, *width, packed.stride());
    let halves = |view, n: usize| -> Vec<f32> {
        let words: Vec<u16> = read(gpu, view, n);
        DType::F16.decode(bytemuck::cast_slice(&words))
    };
    let exponents = |halves: &[f32], at: u32| (0..rows).map(|r| halves[(at as usize + r) * 4]).collect::<Vec<f32>>();
    let mut all = Vec::new();
    let of_rows = halves(view, (packed.exponents() as usize + rows) * 4);
    if *by_row {
        let part = |begin: usize| {
            (0..rows).flat_map(|r| of_rows[r * stride + begin..][..width].to_vec()).collect::<Vec<f32>>()
        };
        let rests = if *twice { part(width) } else { vec![0.0; rows * width] };
        all.push(Unpacked { values: part(0), rests, exponents: exponents(&of_rows, packed.exponents()) });
    } else if let Some(blocks) = blocks {
        // The exponents stand in both.
        let in_blocks = halves(&blocks.view, (blocks.exponents as usize + rows) * 4);
        if exponents(&of_rows, packed.exponents()) != exponents(&in_blocks, blocks.exponents) {
            return Err("exponents differ".to_owned());
        }
    }
    if let Some(blocks) = blocks {
        let of_blocks = halves(&blocks.view, (blocks.exponents as usize + rows) * 4);
        let value = |r: usize, k: usize| of_blocks[(r / 16 * blocks.per_row + k / 16) * 256 + r % 16 * 16 + k % 16];
        for row in 0..rows {
            if let Some(k) = (width..blocks.per_row * 16).find(|k| value(row, *k) != 0.0) {
                return Err(format!("row {row} goes on at {k}"));
            }
        }
        let values = (0..rows).flat_map(|r| (0..width).map(move |k| (r, k))).map(|(r, k)| value(r, k)).collect();
        let exponents = exponents(&of_blocks, blocks.exponents);
        all.push(Unpacked { values, rests: vec![0.0; rows * width], exponents });
    }
    Ok(all)
}

/// The power of two of a row.
fn exponent(row: &[f32], twice: bool) -> f32 {
    let most = row.iter().fold(0f32, |most, v| most.max(v.abs()));
    if !twice && (2f32.powi(-5)..2f32.powi(7)).contains(&most) {
        return 0.0;
    }
    133.0 - ((most.to_bits() >> 23) as f32).clamp(53.0, 254.0)
}

/// Compares a packing with the rows that it is of.
fn check(gpu: &Gpu, packed: &Packed, x: &[f32]) -> Result<(), String> {
    for Unpacked { values, rests, exponents } in unpacked(gpu, packed)? {
        for (row, of_row) in x.chunks(packed.width).enumerate() {
            let expected = exponent(of_row, packed.twice);
            if exponents[row] != expected {
                return Err(format!("row {row}: 2^{}, expected 2^{expected}", exponents[row]));
            }
            for (k, v) in of_row.iter().enumerate() {
                let scaled = f64::from(*v) * 2f64.powf(f64::from(expected));
                let [near, rest] = [&values, &rests].map(|all| f64::from(all[row * packed.width + k]));
                // To the nearest number of f16, or the next, where what is lost does not stand behind it.
                let digits = if packed.twice { 11 } else { 10 };
                let off = (near - scaled).abs();
                if off > scaled.abs() * 2f64.powi(-digits) * 1.001 + 2f64.powi(-24) {
                    return Err(format!("row {row}, value {k}: {near}, expected {scaled}"));
                }
                let off = (near + rest - scaled).abs();
                if packed.twice && off > scaled.abs() * 2f64.powi(-21) + 2f64.powi(-24) {
                    return Err(format!("row {row}, value {k}: {near} and {rest}, expected {scaled}"));
                }
            }
        }
    }
    Ok(())
}

/// Rows of every size, in every form.
fn check_pack(gpu: &Gpu, [rows, width]: [usize; 2]) -> Result<(), String> {
    let mut x = Rng::new(35).floats(rows * width);
    for (row, of_row) in x.chunks_mut(width).enumerate() {
        let size = [1.0, 1e-3, 200.0, 1e6, 1e-12, 0.0, 1e30, 127.99][row % 8];
        of_row.iter_mut().for_each(|v| *v *= size);
    }
    let x_view = upload(gpu, &x);
    for form in forms() {
        let packed = run(gpu, |rec, pass| pack(rec, pass, LABELS, &x_view, [rows, width], &form));
        check(gpu, &packed, &x).map_err(|e| format!("{form:?}: {e}"))?;
    }
    Ok(())
}

/// A norm in one form: as the oracle's, and packed as by a pack behind it.
fn check_norm(gpu: &Gpu, [rows, width]: [usize; 2], form: Form, gathered: bool) -> Result<(), String> {
    let mut rng = Rng::new(36);
    let sources = rows + 5;
    let mut x = rng.floats(sources * width);
    x[..width].fill(0.0);
    let weight: Vec<f32> = rng.floats(width).iter().map(|v| v * 300.0).collect();
    let picked: Vec<u32> = (0..rows).map(|_| rng.below(sources) as u32).collect();
    let (x_view, weight_view, gather) = (upload(gpu, &x), upload(gpu, &weight), upload(gpu, &picked));
    let of = |plain: bool| {
        let out = Output::new(gpu, rows * width, UNWRITTEN_F32);
        let packed = run(gpu, |rec, pass| {
            let (x, weight, gather) = (&x_view, &weight_view, gathered.then_some(&gather));
            let norm = Norm { rows, width, eps: 1e-6, x, weight, gather, out: &out.view };
            norm.record_for(rec, pass, &Reads { plain, packed: Some(form) }, None)
        });
        (out, packed.unwrap())
    };
    let (out, packed) = of(true);
    let got = out.read(gpu);
    let source = |i: usize| if gathered { picked[i] as usize } else { i };
    let input: Vec<f32> = (0..rows).flat_map(|i| x[source(i) * width..][..width].to_vec()).collect();
    let mut expected = vec![0.0; rows * width];
    reference::rms_norm(&input, &weight, 1e-6, &mut expected);
    let off = rel_err(&got, &expected);
    if off > TOL_F32 {
        return Err(format!("off by {off}"));
    }
    let behind = run(gpu, |rec, pass| pack(rec, pass, LABELS, &out.view, [rows, width], &form));
    if unpacked(gpu, &packed)? != unpacked(gpu, &behind)? {
        return Err("not what a pack leaves".to_owned());
    }
    if !gathered && norm_pack::holds(gpu.capabilities(), width) {
        return check_parts(gpu, &x[..rows * width], &weight, form);
    }
    // What nobody reads is left alone.
    let (out, packed) = of(false);
    if out.read(gpu).iter().any(|v| v.to_bits() != UNWRITTEN_F32.to_bits()) {
        return Err("f32 was written".to_owned());
    }
    check(gpu, &packed, &got)
}

/// The norm of rows that parts of a product are added to first, with and without f32.
fn check_parts(gpu: &Gpu, x: &[f32], weight: &[f32], form: Form) -> Result<(), String> {
    let width = weight.len();
    let rows = x.len() / width;
    let parts: Vec<f32> = Rng::new(37).floats(DEPTH_PARTS * x.len());
    let sum = |at: usize| parts[at..].iter().step_by(x.len()).fold(x[at], |sum, part| sum + part);
    let sums: Vec<f32> = (0..x.len()).map(sum).collect();
    let mut expected = vec![0.0; x.len()];
    reference::rms_norm(&sums, weight, 1e-6, &mut expected);
    for plain in [true, false] {
        let hidden = Output::of(gpu, x, UNWRITTEN_F32);
        let out = Output::new(gpu, x.len(), UNWRITTEN_F32);
        let (parts, weight) = (upload(gpu, &parts), upload(gpu, weight));
        let packed = run(gpu, |rec, pass| {
            let norm = Norm { rows, width, eps: 1e-6, x: &hidden.view, weight: &weight, gather: None, out: &out.view };
            norm.record_for(rec, pass, &Reads { plain, packed: Some(form) }, Some(&parts))
        });
        let off = rel_err(&hidden.read(gpu), &sums);
        if off > TOL_F32 {
            return Err(format!("sums are off by {off}"));
        }
        if plain && rel_err(&out.read(gpu), &expected) > TOL_F32 {
            return Err("the norm of sums is off".to_owned());
        }
        for Unpacked { values, rests, exponents } in unpacked(gpu, &packed.unwrap())? {
            let value = |at: usize| (values[at] + rests[at]) * (-exponents[at / width]).exp2();
            let off = rel_err(&(0..x.len()).map(value).collect::<Vec<f32>>(), &expected);
            if off > 1e-3 {
                return Err(format!("packed sums are off by {off}"));
            }
        }
    }
    Ok(())
}

/// Norms of rows of these sizes in every form, gathered or not.
fn norms(sizes: &[[usize; 2]]) -> Vec<([usize; 2], Form, bool)> {
    let ways = || forms().into_iter().flat_map(|form| [(form, false), (form, true)]);
    sizes.iter().flat_map(|size| ways().map(|(form, gathered)| (*size, form, gathered))).collect()
}

#[test]
fn packed_rows_keep_what_their_form_holds() {
    let sizes = [[1, 8], [3, 24], [17, 64], [33, 136], [5, 520], [2, 2056]];
    for gpu in devices() {
        each_case(&sizes, |size| check_pack(&gpu, *size));
    }
}

#[test]
fn a_norm_that_packs_leaves_what_a_pack_behind_it_would() {
    let cases = norms(&[[1, 8], [3, 24], [35, 256], [2, 264], [5, 1032], [2, 4000], [3, 4104], [1, 8200]]);
    for gpu in devices() {
        // Blocks of whole tiles of such long rows are more than a small binding holds.
        let fits = |tile: MatrixTile, width| {
            let bytes = tile.height as usize * (tile.blocks(width) * 32 + 8) + 4096;
            bytes as u64 <= gpu.capabilities().max_binding_bytes
        };
        let possible = cases.iter().filter(|([_, width], form, _)| form.cut.is_none_or(|tile| fits(tile, *width)));
        let possible: Vec<_> = possible.copied().collect();
        each_case(&possible, |(size, form, gathered)| check_norm(&gpu, *size, *form, *gathered));
    }
}

#[test]
#[ignore = "repeats MSL on the CPU: portability/steps/msl-run.sh"]
fn rows_for_matrices_of_8_equal_the_oracle() {
    let gpu = replayed::device(|tuning| tuning);
    each_case(&[[17, 72]], |size| check_pack(&gpu, *size));
    let cases = norms(&[[17, 72], [2, 2056]]);
    each_case(&cases, |(size, form, gathered)| check_norm(&gpu, *size, *form, *gathered));
}
