//! Rows packed for matrices on the device against the oracle: by themselves, and by the norm and the activation that make them.
//! None needs a matrix, only f16.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use std::process::Command;

use common::{Rng, TOL_F32, UNWRITTEN_F32, each_case, rel_err};
use gpu_run::{Output, read, replayed, run, upload};
use wgmoe::Gpu;
use wgmoe::activation::Activation;
use wgmoe::dtype::DType;
use wgmoe::kernels::activation::ActivatePack;
use wgmoe::kernels::align::Align;
use wgmoe::kernels::norm::Norm;
use wgmoe::kernels::pack::{Blocks, FORMS, Form, Packed, Reads, pack};
use wgmoe::kernels::{View, activation_blocks, norm_pack};
use wgmoe::plan::matrix::{DEPTH_PARTS, EDGE, MatrixTile};
use wgmoe::plan::tuning::TuningTable;
use wgmoe::reference;
use wgmoe::shape::align_capacity;

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

/// The first `n` values of a view of f16.
fn halves(gpu: &Gpu, view: &View, n: usize) -> Vec<f32> {
    let words: Vec<u16> = read(gpu, view, n);
    DType::F16.decode(bytemuck::cast_slice(&words))
}

/// All that a packing holds: one [`Unpacked`] for the rows, if they are written, and one for the blocks.
fn unpacked(gpu: &Gpu, packed: &Packed) -> Result<Vec<Unpacked>, String> {
    let Packed { view, rows, width, twice, by_row, blocks, .. } = packed;
    let (rows, width, stride) = (*rows, *width, packed.stride());
    let halves = |view, n| halves(gpu, view, n);
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

/// One activation that packs its result.
#[derive(Debug, Clone, Copy)]
struct Act {
    kind: Activation,
    width: usize,
    /// Rows are written.
    by_row: bool,
    /// Blocks are.
    in_blocks: bool,
}

impl Act {
    /// Every one that a product behind experts of these widths may ask for.
    fn all(widths: &[usize]) -> Vec<Self> {
        let kinds = [
            Activation::Silu,
            Activation::Gelu,
            Activation::SwigluClamped { alpha: 1.702, limit: 7.0 },
            Activation::ReluSquared,
        ];
        let forms = |kind, width| FORMS.map(|[by_row, in_blocks]| Self { kind, width, by_row, in_blocks });
        kinds.into_iter().flat_map(|kind| widths.iter().flat_map(move |width| forms(kind, *width))).collect()
    }

    /// Whether it is the stage of narrow experts.
    fn narrow(&self) -> bool {
        self.in_blocks && activation_blocks::takes(self.width)
    }

    /// Whether a device can run it: the sixteen lanes of a row of that stage belong to one subgroup, and the blocks fit a binding.
    fn possible(&self, gpu: &Gpu) -> bool {
        let caps = gpu.capabilities();
        let rows = align_capacity(PAIRS, EXPERTS, direct(gpu).height as usize);
        let runs = !self.narrow() || caps.one_subgroup && caps.row_lanes >= 16;
        runs && (!self.in_blocks || fits(gpu, &direct(gpu), rows, self.width))
    }
}

/// Experts, pairs of a token and pairs of the activations below.
const EXPERTS: usize = 4;
const TOP_K: usize = 2;
const PAIRS: usize = 156;

/// The direct cut of tiles of pairs.
fn direct(gpu: &Gpu) -> MatrixTile {
    *gpu.capabilities().cuts.experts.iter().find(|tile| tile.direct).unwrap()
}

/// Whether a binding holds blocks of so many rows.
fn fits(gpu: &Gpu, tile: &MatrixTile, rows: usize, width: usize) -> bool {
    let bytes = rows.next_multiple_of(tile.height as usize) * (tile.blocks(width) * 32 + 8) + 4096;
    bytes as u64 <= gpu.capabilities().max_binding_bytes
}

/// The expert of each pair: of the last more than a tile of them, of the first one, of the second none; and pairs of no expert.
fn spread() -> Vec<i32> {
    let sorted = [vec![3; 130], vec![0; 1], vec![2; 17], vec![-1; 4], vec![i32::MIN; 4]].concat();
    // 31 and 156 have no divisor in common.
    (0..PAIRS).map(|p| sorted[p * 31 % PAIRS]).collect()
}

/// Compares an activation with the oracle's: values and powers of two of each pair, zeros behind its blocks, and nothing else written.
fn check_activation(gpu: &Gpu, act: Act) -> Result<(), String> {
    const W_SCALE: f32 = 16.0;
    const DEPTH: usize = 8;
    let Act { kind, width, by_row, in_blocks } = act;
    let (cut, ids, mut rng) = (direct(gpu), spread(), Rng::new(38));
    let (tokens, columns, tile) = (PAIRS / TOP_K, kind.input_columns(width), cut.height as usize);
    let mut x = rng.floats(tokens * DEPTH);
    for (token, row) in x.chunks_mut(DEPTH).enumerate() {
        row.iter_mut().for_each(|v| *v *= [1.0, 1e-3, 200.0, 1e6, 0.0][token % 5]);
    }
    let mut wanted = rng.floats(PAIRS * columns);
    for (pair, row) in wanted.chunks_mut(columns).enumerate() {
        // Of the third and the fourth even a product of two would be too much for f16.
        row.iter_mut().for_each(|v| *v *= [1.0, 20.0, 1e3, 1e6, 1e-4, 0.0, 1e-12][pair % 7]);
    }
    let mut expected = vec![0.0; PAIRS * width];
    reference::activation(&wanted, &ids, width, kind, &mut expected);

    // In the order of the tiles and with both powers of two, as a product leaves it; NaN where there is no pair of an expert.
    let sorted = reference::align(&ids, EXPERTS, tile, &[]).sorted_token_ids;
    let pair_at = |place: usize| usize::try_from(sorted[place]).ok().filter(|p| *p < PAIRS && ids[*p] >= 0);
    let mut gate_up = vec![f32::NAN; sorted.len() * columns];
    for (place, row) in gate_up.chunks_mut(columns).enumerate() {
        let Some(pair) = pair_at(place) else { continue };
        let scale = exponent(&x[pair / TOP_K * DEPTH..][..DEPTH], false).exp2() * W_SCALE;
        row.iter_mut().zip(&wanted[pair * columns..]).for_each(|(to, v)| *to = v * scale);
    }
    let (x_view, ids_view, gate_up) = (upload(gpu, &x), upload(gpu, &ids), upload(gpu, &gate_up));
    let (h, labels) = run(gpu, |rec, pass| {
        rec.labels();
        let x = pack(rec, pass, ["packed x"; 2], &x_view, [tokens, DEPTH], &Form::ROWS)?;
        // A workgroup of narrow experts takes sixteen rows.
        let announced = [cut.height / EDGE];
        let align = Align { pairs: PAIRS, buckets: EXPERTS, tile, label: "tiles", ids: &ids_view, columns: &announced };
        let aligned = align.record(rec, pass)?;
        let mut h = Packed::scratch(rec, LABELS[0], PAIRS, width)?;
        h.by_row = by_row;
        if in_blocks {
            h.blocks = Some(Blocks::scratch(rec, LABELS[1], aligned.capacity, width, &cut)?);
        }
        for View { buffer, .. } in [&h.view].into_iter().chain(h.blocks.as_ref().map(|blocks| &blocks.view)) {
            // NaN, as f16.
            gpu.queue().write_buffer(buffer, 0, &vec![0xff; buffer.size() as usize]);
        }
        ActivatePack {
            rows: PAIRS,
            width,
            kind,
            gate_up: &gate_up,
            ids: &ids_view,
            aligned: &aligned,
            x: &x,
            row_div: TOP_K,
            w_unscale: 1.0 / W_SCALE,
            h: &h,
        }
        .record(rec, pass)?;
        Ok((h, rec.labels()))
    });
    let stem = if act.narrow() { "activation_blocks[" } else { "activation_pack[" };
    if !labels.last().is_some_and(|label| label.starts_with(stem)) {
        return Err(format!("expected {stem}, got {labels:?}"));
    }

    let exponents = h.exponents() as usize * 4;
    let of_rows = halves(gpu, &h.view, h.view.size as usize / 2);
    let same_row = |pair: usize, value: &dyn Fn(usize) -> f32| -> Result<(), String> {
        let (own, shift) = (&expected[pair * width..][..width], of_rows[exponents + pair * 4]);
        let most = own.iter().fold(0f32, |most, v| most.max(v.abs()));
        // The device's largest value may be a little larger or smaller.
        let owed = [1.0 - TOL_F32, 1.0 + TOL_F32].map(|off| exponent(&[most * off], false));
        if !owed.contains(&shift) {
            return Err(format!("pair {pair}, largest {most}: 2^{shift}, expected 2^{}", owed[0]));
        }
        for (k, v) in own.iter().enumerate() {
            let off = (value(k) * (-shift).exp2() - v).abs();
            if off.is_nan() || off > v.abs() * 2f32.powi(-10) + most * TOL_F32 {
                return Err(format!("pair {pair}, value {k}: {} times 2^{}, expected {v}", value(k), -shift));
            }
        }
        Ok(())
    };
    for pair in 0..PAIRS {
        let row = &of_rows[pair * width..][..width];
        if by_row && ids[pair] >= 0 {
            same_row(pair, &|k| row[k]).map_err(|e| format!("rows: {e}"))?;
        } else if row.iter().any(|v| !v.is_nan()) {
            return Err(format!("the row of pair {pair} was written"));
        }
        if ids[pair] < 0 && !of_rows[exponents + pair * 4].is_nan() {
            return Err(format!("the power of two of pair {pair} was written"));
        }
    }
    let Some(blocks) = &h.blocks else { return Ok(()) };
    let of_blocks = halves(gpu, &blocks.view, blocks.view.size as usize / 2);
    for place in 0..sorted.len() {
        let value = |k: usize| of_blocks[(place / 16 * blocks.per_row + k / 16) * 256 + place % 16 * 16 + k % 16];
        match pair_at(place) {
            Some(pair) => {
                same_row(pair, &value).map_err(|e| format!("blocks: {e}"))?;
                if let Some(k) = (width..blocks.per_row * 16).find(|k| value(*k) != 0.0) {
                    return Err(format!("pair {pair} goes on at {k}"));
                }
            }
            None if (0..blocks.per_row * 16).any(|k| !value(k).is_nan()) => {
                return Err(format!("place {place} was written"));
            }
            None => {}
        }
    }
    if of_blocks[sorted.len() * blocks.per_row * 16..].iter().any(|v| !v.is_nan()) {
        return Err("written past the blocks".to_owned());
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
        let possible = cases
            .iter()
            .filter(|([rows, width], form, _)| form.cut.is_none_or(|tile| fits(&gpu, &tile, *rows, *width)));
        let possible: Vec<_> = possible.copied().collect();
        each_case(&possible, |(size, form, gathered)| check_norm(&gpu, *size, *form, *gathered));
    }
}

#[test]
fn an_activation_that_packs_equals_the_oracle_and_writes_no_row_without_expert() {
    let cases = Act::all(&[8, 64, 72, 200, 768, 1024, 1032]);
    for gpu in devices() {
        let possible: Vec<_> = cases.iter().filter(|act| act.possible(&gpu)).copied().collect();
        each_case(&possible, |act| check_activation(&gpu, *act));
    }
}

#[test]
fn llvmpipe_runs_the_activation_of_narrow_experts_where_its_vectors_are_long_enough() {
    const WIDTH: &str = "LP_NATIVE_VECTOR_WIDTH";
    let narrow: Vec<_> = Act::all(&[64]).into_iter().filter(Act::narrow).collect();
    let runs = devices().iter().any(|gpu| narrow.iter().any(|act| act.possible(gpu)));
    if runs || std::env::var_os(WIDTH).is_some() {
        return;
    }
    // Its subgroups are as long as the vectors of the process: by itself eight lanes, not sixteen.
    let test = "an_activation_that_packs_equals_the_oracle_and_writes_no_row_without_expert";
    let mut again = Command::new(std::env::current_exe().unwrap());
    let output = again.args(["--exact", test]).env(WIDTH, "512").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "repeats MSL on the CPU: portability/steps/msl-run.sh"]
fn rows_for_matrices_of_8_equal_the_oracle() {
    let gpu = replayed::device(|tuning| tuning);
    each_case(&[[17, 72]], |size| check_pack(&gpu, *size));
    let cases = norms(&[[17, 72], [2, 2056]]);
    each_case(&cases, |(size, form, gathered)| check_norm(&gpu, *size, *form, *gathered));
    // A width of each variant that there is.
    each_case(&Act::all(&[64, 768, 1024]), |act| check_activation(&gpu, *act));
}
