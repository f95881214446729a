//! Products of whole tokens with their adapters on the device against the oracle: of few, wherever the lanes of a device can
//! lie along the depth, and of many.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/held.rs"]
mod held;

use common::{Rng, TOL_F32, UNWRITTEN_F32, each_case, folds, rel_err, shrinks, tolerance};
use gpu_run::{Output, run, run_in, upload, weights};
use held::{Held, MIXED, Slots};
use wgmoe::Gpu;
use wgmoe::dtype::DType;
use wgmoe::kernels::dense_gemm::{Cut, DenseGemm, MOST_ROWS};
use wgmoe::kernels::lora::{Factors, LoraSite};
use wgmoe::kernels::operands::Weights;
use wgmoe::kernels::pair_shrink::PairShrink;
use wgmoe::kernels::{Recording, View};
use wgmoe::layer::{Dense, LoraBatch};
use wgmoe::plan::capabilities::Capabilities;
use wgmoe::plan::tuning::Tuning;
use wgmoe::reference;
use wgmoe::router::{NoAdapter, STATUS_SLOT};

/// Adapters without a bias, which products on cooperative matrices can add: 4 of at most 32 ranks.
const PLAIN: Slots =
    &[(8, DType::F16, false), (17, DType::Bf16, false), (0, DType::F32, false), (3, DType::F32, false)];

/// High ranks: more parts of B than a subgroup has lanes.
const HIGH: Slots = &[(64, DType::Bf16, false), (100, DType::F32, true)];

#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: DType,
    tokens: usize,
    inner: usize,
    /// Columns of each projection.
    outs: &'static [usize],
    /// Columns of a binding.
    piece: Option<usize>,
    /// Cut as a product of this many columns is.
    as_wide_as: usize,
    /// None: no adapters.
    slots: Slots,
    accumulate: bool,
    /// The largest value of x.
    size: f32,
}

const CASE: Case = Case {
    dtype: DType::Bf16,
    tokens: 3,
    inner: 72,
    outs: &[21, 8, 10],
    piece: None,
    as_wide_as: 2048,
    slots: MIXED,
    accumulate: false,
    size: 1.0,
};

/// A case on the device, and what the oracle says of it.
struct Prepared {
    x: View,
    mapping: View,
    weights: Weights,
    site: LoraSite,
    factors: Factors,
    y: Output<f32>,
    expected: Vec<f32>,
    status: u32,
}

fn prepare(gpu: &Gpu, case: &Case) -> Prepared {
    let Case { dtype, tokens, inner, outs, slots, accumulate, .. } = *case;
    let mut rng = Rng::new(95);
    let out: usize = outs.iter().sum();
    let x: Vec<f32> = rng.floats(tokens * inner).iter().map(|v| v * case.size).collect();
    let limit = case.piece.map_or(u64::MAX, |rows| (rows * inner * dtype.size()) as u64);
    let (matrix, decoded) = weights(gpu, dtype, [1, out, inner], &rng.floats(out * inner), limit);
    let (mut pool, mut index) = (vec![0xffu8; 48], Vec::new());
    // A projection that an adapter leaves out.
    let absent = |slot: usize, _: usize, projection: usize| slot == 1 && projection == 1;
    let (site, held) = held::site(slots, 1, outs, inner, absent, &mut rng, &mut pool, &mut index);
    let factors = Factors { pools: vec![upload(gpu, &pool)], index: upload(gpu, &index), empty: Vec::new() };
    // Every slot, one that does not exist, and none.
    let mapping: Vec<i32> = (0..tokens).map(|t| ((t + 1) % (slots.len() + 2)) as i32 - 1).collect();
    let remapped = reference::remap(&vec![0; tokens], &mapping, 1, 1, slots.len(), NoAdapter::Skip);
    let lora = !slots.is_empty();

    let before = if accumulate { rng.floats(tokens * out) } else { vec![UNWRITTEN_F32; tokens * out] };
    let mut expected = vec![0.0; tokens * out];
    reference::expert_gemm(&x, &decoded, &vec![0; tokens], 1, out, inner, &mut expected);
    if lora {
        let mut column = 0;
        for (projection, columns) in outs.iter().enumerate() {
            let find = |slot: usize| held.get(slot * outs.len() + projection).map(Held::factors);
            let ids = &remapped.virtual_topk_ids;
            reference::lora(&x, 1, ids, &find, *columns, inner, &mut expected, out, column);
            column += columns;
        }
    }
    if accumulate {
        expected.iter_mut().zip(&before).for_each(|(e, b)| *e += b);
    }

    let owed = if lora { remapped.status } else { 0 };
    assert!(!lora || tokens <= slots.len() || owed == STATUS_SLOT);
    let y = Output::of(gpu, &before, UNWRITTEN_F32);
    Prepared {
        x: upload(gpu, &x),
        mapping: upload(gpu, &mapping),
        weights: matrix,
        site,
        factors,
        y,
        expected,
        status: owed,
    }
}

fn check(gpu: &Gpu, case: &Case) -> Result<(), String> {
    let Case { tokens, inner, outs, slots, accumulate, .. } = *case;
    let Prepared { x, mapping, weights, site, factors, y, expected, status: owed } = prepare(gpu, case);
    let (lora, status) = (!slots.is_empty(), Output::new(gpu, 1, 0u32));
    let max_rank = held::max_rank(slots);
    // Where more rows take another way, the cut of five does for them.
    let cut = Cut::of(gpu.capabilities(), tokens.min(5), case.as_wide_as, inner).ok_or("not few")?;
    run(gpu, |rec, pass| {
        // What the shrink leaves unwritten must not be read.
        let words = tokens * outs.len() * (max_rank.next_multiple_of(8) + 4) + 64;
        let u = rec.scratch("lora u", words as u64 * 4)?;
        gpu.queue().write_buffer(&u.buffer, 0, &vec![0xff; words * 4]);
        let shrink = PairShrink {
            rows: tokens,
            row_div: 1,
            top_k: 1,
            experts: 1,
            slots: slots.len(),
            max_rank,
            site: &site,
            factors: &factors,
            x: &x,
            ids: None,
            token_lora_mapping: &mapping,
            status: &status.view,
        };
        let shrunk = if lora { Some(shrink.record(rec, pass)?) } else { None };
        let adapters = shrunk.as_ref().map(|shrunk| (shrunk, &site));
        DenseGemm { rows: tokens, cut, x: &x, weights: &weights, adapters, y: &y.view, accumulate }.record(rec, pass)
    });
    let off = rel_err(&y.read(gpu), &expected);
    if off > TOL_F32 {
        return Err(format!("off by {off}"));
    }
    if status.read(gpu)[0] == owed { Ok(()) } else { Err(format!("status {}, expected {owed}", status.read(gpu)[0])) }
}

#[test]
fn few_tokens_with_mixed_adapters_equal_the_oracle() {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for tokens in 1..=MOST_ROWS {
            for slots in [MIXED, &[]] {
                for as_wide_as in [128, 2048, 8192] {
                    cases.push(Case { dtype, tokens, slots, as_wide_as, accumulate: tokens % 2 == 0, ..CASE });
                }
            }
        }
    }
    for gpu in device::every_along_depth() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
fn few_tokens_take_any_widths_cuts_and_ranks() {
    let mut cases = Vec::new();
    for (inner, outs) in [(8, &[1][..]), (16, &[264]), (200, &[64, 16, 16, 40]), (328, &[3, 130])] {
        for piece in [None, Some(13)] {
            for (as_wide_as, slots) in [(128, MIXED), (2048, HIGH), (8192, MIXED), (8192, HIGH)] {
                let accumulate = piece.is_none();
                cases.push(Case { inner, outs, piece, as_wide_as, slots, accumulate, tokens: 1, ..CASE });
                cases.push(Case { inner, outs, piece, as_wide_as, slots, accumulate, tokens: 5, ..CASE });
            }
        }
    }
    for gpu in device::every_along_depth() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

/// Many tokens as the decoder takes them: their adapters one by one, or sorted.
#[derive(Debug, Clone, Copy)]
struct Many {
    case: Case,
    /// Tokens are shrunk one by one.
    apart: bool,
    /// Products on cooperative matrices add the adapters.
    folded: bool,
}

fn check_many(gpu: &Gpu, Many { case, apart, folded }: &Many) -> Result<(), String> {
    let own = gpu.capabilities();
    // So that tiles are as high as there are rows.
    let tuning = Tuning { apart_tokens: if *apart { 65_535 } else { 1 }, matrix_workgroups: 1, ..own.tuning };
    let gpu = &gpu.with_capabilities(Capabilities { tuning, ..own.clone() });
    let Case { tokens, outs, slots, accumulate, .. } = *case;
    let Prepared { x, mapping, weights, site, factors, y, expected, .. } = prepare(gpu, case);
    let status = upload(gpu, &[0u32]);
    let max_rank = held::max_rank(slots).next_multiple_of(8);
    let mut rec = Recording::new(gpu);
    rec.labels();
    run_in(&mut rec, |rec, pass| {
        // 0x7fff is a NaN of f16, too: what the shrink leaves unwritten must not be added.
        let words = tokens * outs.len() * max_rank.next_multiple_of(16);
        let u = rec.scratch("lora u", words as u64 * 4)?;
        gpu.queue().write_buffer(&u.buffer, 0, bytemuck::cast_slice(&vec![0x7fff_7fffu32; words]));
        let batch = LoraBatch {
            token_lora_mapping: mapping,
            slots: slots.len(),
            used: (0..slots.len()).collect(),
            max_rank,
            folds: slots.iter().all(|(.., biased)| !biased),
            reach: 0.0,
            everyone: false,
            aligned: None,
            chunks: None,
            matrix_runs: None,
        };
        let batch = batch.prepare(rec, pass, tokens, std::iter::once(&site), &status)?;
        let adapters = Some((&batch, &site, &factors));
        let (x, weights, y, exact, status) = (&x, &weights, &y.view, false, &status);
        Dense { tokens, x, packed: None, weights, adapters, y, parts: 1, accumulate, exact, status }.record(rec, pass)
    });
    let labels = rec.labels();
    if gpu.capabilities().matrix {
        let shrink = match (folded, apart) {
            (false, _) => "lora_shrink",
            (true, false) => "lora_shrink_matrix",
            (true, true) => "pair_shrink_packed",
        };
        let products = folds(&labels);
        if shrinks(&labels) != [shrink] || products.is_empty() || products.iter().any(|folds| folds != folded) {
            return Err(format!("not {folded} with {shrink}: {labels:?}"));
        }
    }
    let off = rel_err(&y.read(gpu), &expected);
    if off > tolerance(gpu) { Err(format!("off by {off}")) } else { Ok(()) }
}

#[test]
fn many_tokens_with_mixed_adapters_equal_the_oracle_sorted_and_one_by_one() {
    let mut cases = Vec::new();
    for apart in [false, true] {
        // Tiles of every height of the matrix tier, and one row more than a tile.
        for tokens in [9, 17, 40, 70, 130] {
            let plain = Case { tokens, inner: 128, outs: &[64, 16, 16, 40], slots: PLAIN, ..CASE };
            let mut add = |case: Case, folded: bool| cases.push(Many { case, apart, folded });
            add(plain, true);
            add(Case { piece: Some(48), ..plain }, true);
            add(Case { inner: 200, outs: &[21, 8, 10], dtype: DType::F16, accumulate: true, ..plain }, true);
            add(Case { inner: 256, outs: &[264], accumulate: true, ..plain }, true);
            // Rows that get a power of two, or none: what adapters make of small ones keeps its precision.
            for size in [0.02, 0.04, 1e3] {
                add(Case { size, outs: &[64, 16, 16, 48], ..plain }, true);
            }
            // Whole blocks of sums.
            add(Case { inner: 256, outs: &[256], accumulate: true, ..plain }, true);
            add(Case { outs: &[64, 16, 16, 48], ..plain }, true);
            // All ranks together are longer than a row; a factor has a bias.
            add(Case { inner: 72, ..plain }, false);
            add(Case { slots: MIXED, ..plain }, false);
        }
    }
    for gpu in device::every_variant() {
        // Elsewhere both are the same.
        let both = gpu.capabilities().matrix && gpu.capabilities().along_depth;
        let cases: Vec<Many> = cases.iter().filter(|many| both || !many.apart).copied().collect();
        each_case(&cases, |case| check_many(&gpu, case));
    }
}
