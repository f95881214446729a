//! Matrix products on the device against the oracle: every selection of rows, storage type and cut.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;

use std::sync::Arc;

use common::{Rng, Routing, TOL_F32, UNWRITTEN_F32, each_case, rel_err, tolerance};
use gpu_run::{Output, read, replayed, run, upload, weights};
use proptest::prelude::*;
use wgmoe::Gpu;
use wgmoe::dtype::DType;
use wgmoe::kernels::View;
use wgmoe::kernels::align::Align;
use wgmoe::kernels::expert_gemm::ExpertGemm;
use wgmoe::kernels::expert_gemm_matrix::{ExpertGemmMatrix, Leaves};
use wgmoe::kernels::operands::{Rows, Weights};
use wgmoe::kernels::pack::{Form, pack};
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::matrix::{self, Cuts, DEPTH_PARTS, EDGES, MatrixTile, reach_exponent};
use wgmoe::plan::tuning::{Tuning, TuningTable};
use wgmoe::reference;
use wgmoe::shape::align_capacity;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Select {
    Dense,
    Pairs,
    Tiles(usize),
}

/// How a stack is cut into bindings.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Cut {
    Whole,
    /// Two experts a binding.
    Experts,
    /// Five rows of one expert a binding; sixteen for tiles of the matrix tier.
    Rows,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    select: Select,
    dtype: DType,
    /// Pairs; rows when dense.
    pairs: usize,
    row_div: usize,
    experts: usize,
    out: usize,
    inner: usize,
    cut: Cut,
    accumulate: bool,
    /// In tiles of the matrix tier: rows hold what rounding took from them, which the product passes over.
    exact: bool,
    /// The largest input and weight.
    size: [f32; 2],
    /// Every 70th row of x is four times as large.
    uneven: bool,
}

const CASE: Case = Case {
    select: Select::Pairs,
    dtype: DType::F32,
    pairs: 12,
    row_div: 2,
    experts: 5,
    out: 37,
    inner: 24,
    cut: Cut::Whole,
    accumulate: false,
    exact: false,
    size: [1.0; 2],
    uneven: false,
};

/// Every seventh pair has no expert of this rank, in each way in which that can be said.
fn ids_of(case: &Case, rng: &mut Rng) -> Vec<i32> {
    if case.select == Select::Dense {
        return vec![0; case.pairs];
    }
    let mut ids = Routing::Zipf(1.5).ids(case.pairs, 1, case.experts, rng);
    for (i, p) in (3..case.pairs).step_by(7).enumerate() {
        ids[p] = [-1, -9, case.experts as i32, i32::MAX][i % 4];
    }
    ids
}

/// Every third value times `size`, so that large and small ones meet in one row.
fn scaled(values: Vec<f32>, size: f32) -> Vec<f32> {
    values.into_iter().enumerate().map(|(i, v)| if i % 3 == 0 { v * size } else { v }).collect()
}

/// Inputs with a NaN in every row that no pair of this rank needs.
fn inputs(case: &Case, held: &dyn Fn(usize) -> bool, rng: &mut Rng) -> Vec<f32> {
    let Case { pairs, row_div, inner, .. } = *case;
    let mut x = scaled(rng.floats(pairs.div_ceil(row_div) * inner), case.size[0]);
    for row in 0..pairs.div_ceil(row_div) {
        if case.uneven && row % 70 == 69 {
            x[row * inner..(row + 1) * inner].iter_mut().for_each(|v| *v *= 4.0);
        }
        if (row * row_div..((row + 1) * row_div).min(pairs)).all(|p| !held(p)) {
            x[row * inner..(row + 1) * inner].fill(f32::NAN);
        }
    }
    x
}

/// A product of the matrix tier in tiles: y in their order, times both powers of two.
fn check_tiles(gpu: &Gpu, case: &Case, tile: usize) -> Result<(), String> {
    let Case { pairs, row_div, experts, out, inner, .. } = *case;
    let mut rng = Rng::new(11);
    let ids = ids_of(case, &mut rng);
    let held = |p: usize| (0..experts as i32).contains(&ids[p]);
    let x = inputs(case, &held, &mut rng);
    let row_bytes = (inner * case.dtype.size()) as u64;
    let limit = match case.cut {
        Cut::Whole => u64::MAX,
        Cut::Experts => row_bytes * out as u64 * 2,
        Cut::Rows => row_bytes * 16,
    };
    let values = scaled(rng.floats(experts * out * inner), case.size[1]);
    let (w, decoded) = weights(gpu, case.dtype, [experts, out, inner], &values, limit);
    let y_stride = out.next_multiple_of(16);
    let y = Output::new(gpu, align_capacity(pairs, experts, tile) * y_stride, UNWRITTEN_F32);
    // A direct cut leaves f16 as well, by a power of two that follows from a bound.
    let y_halves = Output::<u32>::new(gpu, align_capacity(pairs, experts, tile) * y_stride / 2, u32::MAX);
    let reach = w.magnitude.norms().and_then(|norms| reach_exponent(norms, 0.0));
    let half_exponent = reach
        .filter(|_| MatrixTile::direct_of(gpu.capabilities(), tile).is_some())
        .map(|reach| matrix::halves_exponent(reach + w.magnitude.exponent().unwrap(), inner));
    let (x_view, ids_view) = (upload(gpu, &x), upload(gpu, &ids));
    let (aligned, packed) = run(gpu, |rec, pass| {
        let columns: Vec<u32> = w.columns(gpu.capabilities(), tile).collect();
        let (label, ids) = ("tiles", &ids_view);
        let aligned = Align { pairs, buckets: experts, tile, label, ids, columns: &columns }.record(rec, pass)?;
        let form = if case.exact { Form::TWICE } else { Form::ROWS };
        let packed = pack(rec, pass, ["packed"; 2], &x_view, [pairs.div_ceil(row_div), inner], &form)?;
        let (rows, select, x, weights, y, accumulate) = (pairs, Rows::Tiles(&aligned), &packed, &w, &y.view, false);
        let (adapters, parts, leaves) = (None, 1, Leaves::Sums);
        let sums =
            ExpertGemmMatrix { rows, row_div, select, x, weights, y, y_stride, accumulate, parts, adapters, leaves };
        sums.record(rec, pass)?;
        if let Some(exponent) = half_exponent {
            let (y, leaves) = (&y_halves.view, Leaves::Halves(exponent));
            ExpertGemmMatrix { y, leaves, ..sums }.record(rec, pass)?;
        }
        Ok((aligned, packed))
    });
    let got = y.read(gpu);
    let words: Vec<i32> = read(gpu, &aligned.view, aligned.places_base as usize + pairs);
    let halves: Vec<u16> = read(gpu, &packed.view, (packed.exponents() as usize + packed.rows) * 4);
    let exponent =
        |p: usize| DType::F16.decode(&halves[(packed.exponents() as usize + p / row_div) * 4].to_le_bytes())[0];
    let mut expected = vec![0.0; pairs * out];
    reference::expert_gemm(&x, &decoded, &ids, row_div, out, inner, &mut expected);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for p in 0..pairs {
        let row = &got[words[aligned.places_base as usize + p] as usize * y_stride..][..out];
        if !held(p) {
            if row.iter().any(|v| v.to_bits() != UNWRITTEN_F32.to_bits()) {
                return Err(format!("pair {p} was written"));
            }
            continue;
        }
        let unscale = |v: f32| f64::from(v) * 2f64.powi(-exponent(p) as i32 - w.magnitude.exponent().unwrap());
        ours.extend(row.iter().map(|v| unscale(*v) as f32));
        theirs.extend(&expected[p * out..(p + 1) * out]);
    }
    let off = rel_err(&ours, &theirs);
    if off > tolerance(gpu) {
        return Err(format!("off by {off}"));
    }
    let Some(exponent) = half_exponent else { return Ok(()) };
    let of_halves = DType::F16.decode(bytemuck::cast_slice(&y_halves.read(gpu)));
    let scale = 2f32.powi(exponent);
    for p in (0..pairs).filter(|p| held(*p)) {
        let place = words[aligned.places_base as usize + p] as usize;
        for at in place * y_stride..place * y_stride + out {
            // As f16 rounds, or as it leaves what is among its smallest numbers.
            let off = (of_halves[at] - got[at] * scale).abs();
            if off.is_nan() || off > (got[at] * scale).abs() * 2f32.powi(-11) + 2f32.powi(-25) {
                return Err(format!("pair {p}: {} as f16, expected {}", of_halves[at], got[at] * scale));
            }
        }
    }
    Ok(())
}

fn check(gpu: &Gpu, case: &Case) -> Result<(), String> {
    if let Select::Tiles(tile @ 16..) = case.select {
        return check_tiles(gpu, case, tile);
    }
    let Case { pairs, row_div, experts, out, inner, .. } = *case;
    let experts = if case.select == Select::Dense { 1 } else { experts };
    let mut rng = Rng::new(11);
    let ids = ids_of(case, &mut rng);
    let held = |p: usize| (0..experts as i32).contains(&ids[p]);
    // Rows that no pair of this rank needs must not matter.
    let x = inputs(case, &held, &mut rng);
    let row_bytes = (inner * case.dtype.size()) as u64;
    let limit = match case.cut {
        Cut::Whole => u64::MAX,
        Cut::Experts => row_bytes * out as u64 * 2,
        Cut::Rows => row_bytes * 5,
    };
    let values = scaled(rng.floats(experts * out * inner), case.size[1]);
    let (w, decoded) = weights(gpu, case.dtype, [experts, out, inner], &values, limit);
    // y is wider than the product, so that its stride counts. Whole blocks of sums may go to it as they are.
    let stride = out + if out.is_multiple_of(16) { 4 } else { 3 };
    let before: Vec<f32> =
        if case.accumulate { rng.floats(pairs * stride) } else { vec![UNWRITTEN_F32; pairs * stride] };
    let y = Output::of(gpu, &before, UNWRITTEN_F32);
    let (x_view, ids_view) = (upload(gpu, &x), upload(gpu, &ids));
    run(gpu, |rec, pass| {
        let aligned = match case.select {
            Select::Tiles(tile) => {
                let columns: Vec<u32> = w.columns(gpu.capabilities(), tile).collect();
                let label = "tiles";
                let align = Align { pairs, buckets: experts, tile, label, ids: &ids_view, columns: &columns };
                Some(align.record(rec, pass)?)
            }
            _ => None,
        };
        let select = match (&aligned, case.select) {
            (Some(aligned), _) => Rows::Tiles(aligned),
            (None, Select::Dense) => Rows::Dense,
            _ => Rows::Pairs(&ids_view),
        };
        let (x, accumulate) = (&x_view, case.accumulate);
        let (rows, weights, y, y_stride, exact) = (pairs, &w, &y.view, stride, case.exact);
        ExpertGemm { rows, row_div, select, x, weights, y, y_stride, accumulate, exact }.record(rec, pass)
    });
    let got = y.read(gpu);
    let mut expected = vec![0.0; pairs * out];
    reference::expert_gemm(&x, &decoded, &ids, row_div, out, inner, &mut expected);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for p in 0..pairs {
        for i in 0..stride {
            let at = p * stride + i;
            if !held(p) || i >= out {
                if got[at].to_bits() != before[at].to_bits() {
                    return Err(format!("pair {p} column {i} was written"));
                }
                continue;
            }
            ours.push(got[at]);
            theirs.push(expected[p * out + i] + if case.accumulate { before[at] } else { 0.0 });
        }
    }
    let off = rel_err(&ours, &theirs);
    let tolerance = if case.exact { TOL_F32 } else { tolerance(gpu) };
    if off > tolerance {
        return Err(format!("off by {off}"));
    }
    let caps = gpu.capabilities();
    let parted = caps.matrix && w.magnitude.exponent().is_some() && case.select == Select::Dense && pairs > 8;
    if parted && row_div == 1 && !case.accumulate && (!case.exact || matrix::exact(caps, pairs)) {
        let form = if case.exact { Form::TWICE } else { Form::ROWS };
        let off = rel_err(&sum_of_parts(gpu, &x_view, &w, [pairs, out, inner], &form), &theirs);
        if off > tolerance {
            return Err(format!("in parts off by {off}"));
        }
    }
    Ok(())
}

/// A dense product on matrices in parts of its depth, which are then added up: `[pairs, out]`.
fn sum_of_parts(gpu: &Gpu, x: &View, weights: &Weights, [rows, out, inner]: [usize; 3], form: &Form) -> Vec<f32> {
    let parts = Output::new(gpu, DEPTH_PARTS * rows * out, UNWRITTEN_F32);
    run(gpu, |rec, pass| {
        let x = &pack(rec, pass, ["packed"; 2], x, [rows, inner], form)?;
        let (select, y, row_div, accumulate, adapters) = (Rows::Dense, &parts.view, 1, false, None);
        let (y_stride, parts) = (out, DEPTH_PARTS);
        let leaves = Leaves::Sums;
        ExpertGemmMatrix { rows, row_div, select, x, weights, y, y_stride, accumulate, parts, adapters, leaves }
            .record(rec, pass)
    });
    let parts = parts.read(gpu);
    let of = |at: usize| parts[at..].iter().step_by(rows * out).sum();
    (0..rows * out).map(of).collect()
}

#[test]
fn every_selection_type_and_cut_equals_the_oracle() {
    let mut cases = Vec::new();
    for select in [Select::Dense, Select::Pairs, Select::Tiles(1), Select::Tiles(4), Select::Tiles(8)] {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for cut in [Cut::Whole, Cut::Experts, Cut::Rows] {
                for accumulate in [false, true] {
                    let row_div = if select == Select::Dense { 1 } else { 2 };
                    cases.push(Case { select, dtype, cut, accumulate, row_div, pairs: 42, ..CASE });
                }
            }
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
fn every_edge_shape_equals_the_oracle() {
    let mut cases = Vec::new();
    for select in [Select::Dense, Select::Pairs, Select::Tiles(4), Select::Tiles(8)] {
        for pairs in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 31] {
            cases.push(Case { select, pairs, row_div: 1, ..CASE });
        }
        // Around the columns of a workgroup, and inner widths around what one round of carriers loads.
        for (out, inner) in [(1, 8), (15, 16), (16, 24), (17, 32), (31, 40), (32, 48), (33, 56), (64, 64), (131, 72)] {
            cases.push(Case { select, pairs: 11, row_div: 1, out, inner, dtype: DType::Bf16, ..CASE });
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

/// Devices with the matrix tier.
fn matrix_devices() -> impl Iterator<Item = Gpu> {
    device::every_tier().into_iter().filter(|gpu| gpu.capabilities().matrix)
}

#[test]
fn every_matrix_tile_equals_the_oracle() {
    let mut cases = Vec::new();
    for select in device::matrix_heights().into_iter().map(Select::Tiles).chain([Select::Dense]) {
        for dtype in [DType::F16, DType::Bf16] {
            for cut in [Cut::Whole, Cut::Experts, Cut::Rows] {
                cases.push(Case { select, dtype, cut, pairs: 300, row_div: 1, accumulate: true, ..CASE });
            }
            for pairs in [9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 1000] {
                cases.push(Case { select, dtype, pairs, row_div: 1, ..CASE });
            }
            // Around the columns of a workgroup and the depth of a step.
            for (out, inner) in
                [(1, 8), (15, 16), (16, 32), (17, 40), (64, 64), (127, 72), (128, 128), (129, 136), (513, 96)]
            {
                cases.push(Case { select, dtype, pairs: 200, row_div: 1, out, inner, ..CASE });
            }
        }
        if select != Select::Dense {
            let many = Case { select, dtype: DType::Bf16, pairs: 1000, row_div: 4, experts: 3, inner: 256, ..CASE };
            cases.extend([many, Case { exact: true, ..many }, Case { exact: true, inner: 72, ..many }]);
        } else {
            // So many workgroups that x goes straight into matrices.
            let direct = Case { select, dtype: DType::Bf16, pairs: 2990, row_div: 1, out: 704, inner: 768, ..CASE };
            for (out, inner, accumulate) in [(700, 760, false), (700, 768, true), (704, 760, false)] {
                cases.push(Case { out, inner, accumulate, ..direct });
            }
            // Sums that begin with what is in y; and with the scale of some rows alone, for they leave the range of halves.
            for size in [[1.0, 1.0], [16384.0, 1.0]] {
                let uneven = size[0] > 1.0;
                cases.push(Case { size, uneven, accumulate: true, ..direct });
                cases.push(Case { size, uneven, accumulate: true, pairs: 300, out: 160, ..direct });
            }
        }
        cases.push(Case {
            select,
            dtype: DType::Bf16,
            pairs: 3000,
            row_div: 1,
            experts: 9,
            out: 700,
            inner: 768,
            ..CASE
        });
    }
    for gpu in matrix_devices() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
fn values_outside_the_range_of_halves_make_no_infinity() {
    let mut cases = Vec::new();
    for select in [Select::Dense, Select::Pairs, Select::Tiles(4), Select::Tiles(16), Select::Tiles(80)] {
        for size in [[1e6, 1.0], [1.0, 1e6], [1e6, 1e6], [1e15, 1e15], [1e-12, 1e-9], [1e30, 1.0], [3e-38, 1.0]] {
            // Small sums of large products lose f32's own digits, so the row is short.
            cases.push(Case { select, size, dtype: DType::Bf16, pairs: 70, row_div: 1, inner: 24, ..CASE });
        }
        cases.push(Case { select, size: [1e6, 1e3], dtype: DType::F16, pairs: 70, row_div: 1, ..CASE });
    }
    for gpu in device::every_tier() {
        let high = |case: &&Case| matches!(case.select, Select::Tiles(16..));
        let possible: Vec<Case> = cases.iter().filter(|c| gpu.capabilities().matrix || !high(c)).copied().collect();
        each_case(&possible, |case| check(&gpu, case));
    }
}

#[test]
fn an_exact_product_is_one_of_f32_on_every_tier() {
    let case = Case { select: Select::Dense, dtype: DType::Bf16, pairs: 200, row_div: 1, exact: true, ..CASE };
    for gpu in device::every_tier() {
        // So many rows that matrices multiply each value and what rounding took from it.
        let many = Case { pairs: gpu.capabilities().tuning.exact_matrix_rows, ..case };
        let mut cases =
            vec![case, Case { out: 128, inner: 512, ..case }, many, Case { inner: 72, dtype: DType::F16, ..many }];
        // Small sums of large products lose f32's own digits, so the row is short.
        cases.extend([[1e6, 1.0], [1.0, 1e6], [1e-12, 1e-9]].map(|size| Case { size, inner: 24, ..many }));
        // Whole tiles of columns, pieces of the weights, and rows that matrices leave as they are.
        cases.push(Case { out: 128, inner: 512, cut: Cut::Rows, ..many });
        cases.push(Case { out: 128, inner: 512, size: [100.0, 1.0], ..many });
        each_case(&cases, |case| check(&gpu, case));
        // And in the highest tile.
        let own = gpu.capabilities();
        let tuning = Tuning { matrix_workgroups: 1, exact_matrix_rows: 130, ..own.tuning };
        let gpu = gpu.with_capabilities(Capabilities { tuning, ..own.clone() });
        each_case(&[Case { pairs: 130, out: 140, ..case }], |case| check(&gpu, case));
    }
}

#[test]
fn more_workgroups_than_one_dimension_holds_are_folded() {
    let folded = Case { pairs: 66_001, row_div: 66_001, out: 4, inner: 8, ..CASE };
    let cases = [folded, Case { select: Select::Tiles(1), ..folded }];
    for gpu in device::every_variant() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
fn any_shape_equals_the_oracle() {
    let gpus = device::every_variant();
    let select = prop_oneof![Just(Select::Dense), Just(Select::Pairs), Just(Select::Tiles(4)), Just(Select::Tiles(8))];
    let dtype = prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)];
    let cut = prop_oneof![Just(Cut::Whole), Just(Cut::Experts), Just(Cut::Rows)];
    let strategy = (select, dtype, cut, 0..40usize, 1..4usize, 1..7usize, 1..40usize, 1..10usize, any::<bool>());
    proptest!(ProptestConfig { cases: 10, failure_persistence: None, ..ProptestConfig::default() },
    |((select, dtype, cut, pairs, row_div, experts, out, groups, accumulate) in strategy)| {
        let row_div = if select == Select::Dense { 1 } else { row_div };
        let case = Case { select, dtype, cut, pairs, row_div, experts, out, inner: groups * 8, accumulate, ..CASE };
        for gpu in &gpus {
            prop_assert_eq!(check(gpu, &case), Ok(()));
        }
    });
}

/// Other cuts of the same heights.
fn other_cuts(own: &Cuts) -> Cuts {
    let mut cuts = own.clone();
    for cut in cuts.experts.iter_mut().chain(&mut cuts.dense) {
        *cut = match cut.height {
            16 => MatrixTile { columns: 32, depth: 32, ahead: 3, x_ahead: 1, sub_columns: 32, kept: false, ..*cut },
            32 => MatrixTile { columns: 96, depth: 48, ahead: 1, x_ahead: 1, sub_rows: 32, sub_columns: 16, ..*cut },
            _ if cut.direct => MatrixTile { columns: 64, depth: 32, x_ahead: 1, sub_columns: 64, ..*cut },
            _ => MatrixTile { ahead: 1, x_ahead: 1, rests: !cut.rests, ..*cut },
        };
    }
    cuts
}

#[test]
fn cuts_of_another_table_equal_the_oracle() {
    // Also where no device has matrices.
    for (edge, _) in EDGES {
        assert_eq!(other_cuts(TuningTable::built_in().unwrap().cuts.of(edge)).check(edge), Ok(()), "{edge}");
    }
    for own in matrix_devices() {
        let caps = own.capabilities();
        let cuts = other_cuts(&caps.cuts);
        let gpu = own.with_capabilities(Capabilities { cuts: Arc::new(cuts), ..caps.clone() });
        let mut cases = Vec::new();
        for select in device::matrix_heights().into_iter().map(Select::Tiles).chain([Select::Dense]) {
            for (dtype, pairs, inner) in [(DType::F16, 300, 72), (DType::Bf16, 33, 128), (DType::Bf16, 1000, 200)] {
                cases.push(Case { select, dtype, pairs, row_div: 1, out: 130, inner, ..CASE });
            }
        }
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
#[ignore = "repeats MSL on the CPU: portability/steps/msl-run.sh"]
fn matrices_of_8_equal_the_oracle() {
    let mut cases = Vec::new();
    for height in device::matrix_heights() {
        let select = Select::Tiles(height);
        let case = Case { select, dtype: DType::F16, pairs: 150, row_div: 1, experts: 2, ..CASE };
        // Around the columns of a workgroup, and with a row that ends within a step.
        cases.push(Case { out: 130, inner: 72, ..case });
        cases.push(Case { dtype: DType::Bf16, cut: Cut::Rows, row_div: 3, out: 60, inner: 128, ..case });
        cases.push(Case { dtype: DType::Bf16, size: [1e6, 1e6], pairs: 20, ..case });
        cases.push(Case { exact: true, out: 40, inner: 72, row_div: 2, ..case });
    }
    // Every cut of a dense product: the last one takes x straight from memory.
    for pairs in [9, 33, 70, 150] {
        let case = Case { select: Select::Dense, dtype: DType::Bf16, pairs, row_div: 1, ..CASE };
        cases.push(Case { out: 70, inner: 72, ..case });
        cases.push(Case { out: 100, inner: 128, accumulate: true, dtype: DType::F16, ..case });
        cases.push(Case { exact: true, out: 20, inner: 40, ..case });
    }
    let gpu = replayed::device(|tuning| Tuning { matrix_workgroups: 1, exact_matrix_rows: 9, ..tuning });
    each_case(&cases, |case| check(&gpu, case));
}
