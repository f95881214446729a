//! The stages of few pairs on the device against the oracle: products with adapters and activation inside, and the weighted
//! sum, wherever the lanes of a device can lie along the depth.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/held.rs"]
mod held;

use common::{Rng, Routing, TOL_F32, UNWRITTEN_F32, each_case, rel_err};
use gpu_run::{Output, read, run, upload, weights};
use held::{Held, MIXED, Slots};
use wgmoe::Gpu;
use wgmoe::activation::Activation;
use wgmoe::dtype::DType;
use wgmoe::kernels::Recording;
use wgmoe::kernels::align::Align;
use wgmoe::kernels::choice::{self, Choice, Topk};
use wgmoe::kernels::down_combine::DownCombine;
use wgmoe::kernels::lora::{Factors, LoraSite};
use wgmoe::kernels::operands::Rows;
use wgmoe::kernels::pair_expand_shrink::PairExpandShrink;
use wgmoe::kernels::pair_gemm::{self, PairGemm};
use wgmoe::kernels::pair_gemm_shrink::{self, PairGemmShrink};
use wgmoe::kernels::pair_shrink::{PairShrink, Shrunk};
use wgmoe::kernels::route::Route;
use wgmoe::plan::rows::FEW_TILE;
use wgmoe::reference;
use wgmoe::router::{NoAdapter, RouteOptions, STATUS_ID, STATUS_NON_FINITE, STATUS_SLOT, Score};

const CLAMPED: Activation = Activation::SwigluClamped { alpha: 1.702, limit: 7.0 };

#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: DType,
    activation: Activation,
    tokens: usize,
    top_k: usize,
    experts: usize,
    hidden: usize,
    width: usize,
    tiles: bool,
    /// Experts of a binding of gate and up; rows of a binding of down.
    cut: Option<[usize; 2]>,
    /// None: no adapters.
    slots: Slots,
    /// Shrinks are parts of other stages.
    beside: bool,
    accumulate: bool,
}

const CASE: Case = Case {
    dtype: DType::Bf16,
    activation: Activation::Silu,
    tokens: 3,
    top_k: 3,
    experts: 5,
    hidden: 72,
    width: 40,
    tiles: false,
    cut: None,
    slots: MIXED,
    beside: false,
    accumulate: false,
};

/// Ranks of one group, of two, of more than a workgroup takes at once, and the highest of all with every type.
const RANKS: Slots = &[
    (1, DType::Bf16, false),
    (16, DType::Bf16, false),
    (16, DType::F32, true),
    (128, DType::F16, false),
    (33, DType::F32, false),
];

/// The site of one half; an adapter leaves out an expert and a projection.
fn site(
    case: &Case,
    rng: &mut Rng,
    pool: &mut Vec<u8>,
    index: &mut Vec<[u32; 4]>,
    down: bool,
) -> (LoraSite, Vec<Held>) {
    let (outs, inner) = if down { (vec![case.hidden], case.width) } else { (vec![case.width; 2], case.hidden) };
    let absent =
        |slot: usize, expert: usize, projection: usize| slot == 1 && (expert == 1 || expert == 2 && projection == 1);
    let (site, held) = held::site(case.slots, case.experts, &outs, inner, absent, rng, pool, index);
    (LoraSite { ordinal: usize::from(down), ..site }, held)
}

/// `y[p] = W x + adapter` of one projection; W is `[E, out, in]`.
#[allow(clippy::too_many_arguments, reason = "the operands of a product with adapters")]
fn product(
    x: &[f32],
    w: &[f32],
    ids: &[i32],
    virtual_ids: &[i32],
    row_div: usize,
    [out, inner]: [usize; 2],
    held: &[Held],
    [projections, projection]: [usize; 2],
) -> Vec<f32> {
    let mut y = vec![UNWRITTEN_F32; ids.len() * out];
    reference::expert_gemm(x, w, ids, row_div, out, inner, &mut y);
    let factors = |v: usize| held.get(v * projections + projection).map(Held::factors);
    reference::lora(x, row_div, virtual_ids, &factors, out, inner, &mut y, out, 0);
    y
}

/// Compares rows of pairs with an expert; the others must not have been written.
fn compare(what: &str, got: &[f32], expected: &[f32], ids: &[i32]) -> Result<(), String> {
    let columns = got.len() / ids.len();
    let rows = |values: &[f32]| -> Vec<f32> {
        let held = ids.iter().enumerate().filter(|(_, id)| **id >= 0);
        held.flat_map(|(p, _)| values[p * columns..(p + 1) * columns].to_vec()).collect()
    };
    let off = rel_err(&rows(got), &rows(expected));
    if off > TOL_F32 {
        return Err(format!("{what}: off by {off}"));
    }
    for p in (0..ids.len()).filter(|p| ids[*p] < 0) {
        if got[p * columns..(p + 1) * columns].iter().any(|v| v.to_bits() != UNWRITTEN_F32.to_bits()) {
            return Err(format!("{what}: row {p} was written"));
        }
    }
    Ok(())
}

fn check(gpu: &Gpu, case: &Case) -> Result<(), String> {
    let Case { dtype, activation, tokens, top_k, experts, hidden: d, width: f, slots, accumulate, .. } = *case;
    let (pairs, mut rng) = (tokens * top_k, Rng::new(91));
    let mut given = Routing::Zipf(1.5).ids(tokens, top_k, experts, &mut rng);
    for (i, p) in (2..pairs).step_by(5).enumerate() {
        given[p] = [-1, i32::MIN, experts as i32, i32::MAX][i % 4];
    }
    let ids: Vec<i32> = given.iter().map(|id| if (0..experts as i32).contains(id) { *id } else { -1 }).collect();
    // Every slot, none, and one that does not exist.
    let mapping: Vec<i32> = (0..tokens).map(|t| (t % (slots.len() + 2)) as i32 - 1).collect();
    let remapped = reference::remap(&given, &mapping, top_k, experts, slots.len(), NoAdapter::Skip);
    let lora = !slots.is_empty();
    let virtual_ids = if lora { remapped.virtual_topk_ids } else { vec![-1; pairs] };

    let mut x = rng.floats(tokens * d);
    for t in 0..tokens {
        if ids[t * top_k..(t + 1) * top_k].iter().all(|id| *id < 0) {
            x[t * d..(t + 1) * d].fill(f32::NAN);
        }
    }
    let limit = |rows: usize, cols: usize| (rows * cols * dtype.size()) as u64;
    let values: Vec<f32> = rng.floats(experts * 2 * f * d).iter().map(|v| v * 0.3).collect();
    let gate_up_limit = case.cut.map_or(u64::MAX, |[count, _]| limit(count * 2 * f, d));
    let (gate_up, decoded) = weights(gpu, dtype, [experts, 2 * f, d], &values, gate_up_limit);
    assert!(pair_gemm::gated(&gate_up));
    let down_limit = case.cut.map_or(u64::MAX, |[_, rows]| limit(rows, f));
    let (down, down_decoded) = weights(gpu, dtype, [experts, d, f], &rng.floats(experts * d * f), down_limit);
    let topk_weights: Vec<f32> = (0..pairs).map(|p| if ids[p] < 0 { f32::NAN } else { rng.unit() as f32 }).collect();
    let before = if accumulate { rng.floats(tokens * d) } else { vec![UNWRITTEN_F32; tokens * d] };
    let (mut pools, mut index) = ([48, 80].map(|n| vec![0xffu8; n]), Vec::new());
    let (first_site, first_held) = site(case, &mut rng, &mut pools[0], &mut index, false);
    let (second_site, second_held) = site(case, &mut rng, &mut pools[1], &mut index, true);
    let pools = pools.iter().map(|pool| upload(gpu, pool)).collect();
    let factors = Factors { pools, index: upload(gpu, &index), empty: Vec::new() };

    // The oracle.
    let interleaved = activation.interleaved();
    let half = |which: usize| {
        let rows = decoded.chunks(d).enumerate();
        let of = |r: usize| if interleaved { r % 2 == which } else { (r % (2 * f)) / f == which };
        let w: Vec<f32> = rows.filter(|(r, _)| of(*r)).flat_map(|(_, row)| row.to_vec()).collect();
        product(&x, &w, &ids, &virtual_ids, top_k, [f, d], &first_held, [2, which])
    };
    let (gate, up) = (half(0), half(1));
    let mut both = Vec::new();
    for (gate, up) in gate.chunks(f).zip(up.chunks(f)) {
        if interleaved {
            both.extend(gate.iter().zip(up).flat_map(|(g, u)| [*g, *u]));
        } else {
            both.extend([gate, up].concat());
        }
    }
    let mut expected_h = vec![UNWRITTEN_F32; pairs * f];
    reference::activation(&both, &ids, f, activation, &mut expected_h);
    let expected_y = product(&expected_h, &down_decoded, &ids, &virtual_ids, 1, [d, f], &second_held, [1, 0]);
    let mut expected = before.clone();
    reference::combine(&expected_y, &topk_weights, &ids, top_k, d, &mut expected, accumulate);

    // The device.
    let [x, h, y] = [
        Output::of(gpu, &x, UNWRITTEN_F32),
        Output::new(gpu, pairs * f, UNWRITTEN_F32),
        Output::new(gpu, pairs * d, UNWRITTEN_F32),
    ];
    let (out, status) = (Output::of(gpu, &before, UNWRITTEN_F32), Output::new(gpu, 1, 0u32));
    let (ids_view, mapping, topk_weights) = (upload(gpu, &given), upload(gpu, &mapping), upload(gpu, &topk_weights));
    let max_rank = held::max_rank(slots);
    run(gpu, |rec, pass| {
        let words = pairs * 2 * (max_rank.next_multiple_of(8) + 4) + 64;
        let u = rec.scratch("lora u", 4 * words as u64 * 4)?;
        gpu.queue().write_buffer(&u.buffer, 0, &vec![0xff; 4 * words * 4]);
        let bytes = pair_gemm_shrink::bytes(pairs, 2 * f, max_rank);
        let sums = rec.scratch("pair sums", bytes)?;
        gpu.queue().write_buffer(&sums.buffer, 0, &vec![0xff; bytes as usize]);
        let aligned = if case.tiles {
            let label = "tiles";
            let align = Align { pairs, buckets: experts, tile: FEW_TILE, label, ids: &ids_view, columns: &[] };
            Some(align.record(rec, pass)?)
        } else {
            None
        };
        let select = aligned.as_ref().map_or(Rows::Pairs(&ids_view), Rows::Tiles);
        let shrink = |down: bool, x| PairShrink {
            rows: pairs,
            row_div: if down { 1 } else { top_k },
            top_k,
            experts,
            slots: slots.len(),
            max_rank,
            site: if down { &second_site } else { &first_site },
            factors: &factors,
            x,
            ids: Some(&ids_view),
            token_lora_mapping: &mapping,
            status: &status.view,
        };
        let gate_up_first = |rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>| -> wgmoe::Result<Option<Shrunk>> {
            let shrunk = if lora { Some(shrink(false, &x.view).record(rec, pass)?) } else { None };
            PairGemm {
                rows: pairs,
                row_div: top_k,
                select,
                choice: None,
                x: &x.view,
                weights: &gate_up,
                activation: Some(activation),
                adapters: shrunk.as_ref(),
                y: &h.view,
            }
            .record(rec, pass)?;
            if lora { shrink(true, &h.view).record(rec, pass).map(Some) } else { Ok(None) }
        };
        let shrunk = if case.beside {
            let (weights, shrink, down) = (&gate_up, shrink(false, &x.view), &second_site);
            let sums = PairGemmShrink { select, choice: None, weights, shrink, down }.record(rec, pass)?;
            let (rows, width, sums, h, status) = (pairs, f, &sums, &h.view, &status.view);
            let [pool, down_pool] = [&first_site, &second_site].map(|site| factors.pool(site));
            let stage = PairExpandShrink { rows, width, activation, sums, pool, down_pool, h, status };
            Some(stage.record(rec, pass)?)
        } else {
            gate_up_first(rec, pass)?
        };
        let (weights, adapters) = (&down, shrunk.as_ref());
        DownCombine {
            tokens,
            top_k,
            h: &h.view,
            weights,
            ids: &ids_view,
            topk_weights: &topk_weights,
            adapters,
            out: &out.view,
            accumulate,
        }
        .record(rec, pass)?;
        let (rows, row_div, choice, activation) = (pairs, 1, None, None);
        PairGemm { rows, row_div, select, choice, x: &h.view, weights, activation, adapters, y: &y.view }
            .record(rec, pass)
    });
    compare("h", &h.read(gpu), &expected_h, &ids)?;
    compare("y", &y.read(gpu), &expected_y, &ids)?;
    compare("out", &out.read(gpu), &expected, &vec![0; tokens])?;
    // As `remap` has it: without adapters nobody looks.
    let owed = if lora { remapped.status } else { 0 };
    assert!(!lora || tokens < 7 || owed == STATUS_SLOT | STATUS_ID);
    if status.read(gpu)[0] == owed { Ok(()) } else { Err(format!("status {}, expected {owed}", status.read(gpu)[0])) }
}

#[test]
fn few_pairs_with_mixed_adapters_equal_the_oracle() {
    let mut cases = Vec::new();
    let kinds = [(DType::F32, Activation::Gelu), (DType::F16, CLAMPED), (DType::Bf16, Activation::Silu)];
    for (dtype, activation) in kinds {
        for (tokens, tiles) in [(1, false), (7, false), (13, true)] {
            for (slots, beside) in [(MIXED, false), (MIXED, true), (RANKS, true), (&[], false)] {
                cases.push(Case { dtype, activation, tokens, tiles, slots, beside, accumulate: tokens == 7, ..CASE });
            }
        }
    }
    for gpu in device::every_along_depth() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
fn few_pairs_take_any_widths_and_cuts() {
    let mut cases = Vec::new();
    for (hidden, width) in [(8, 8), (16, 264), (200, 136)] {
        for cut in [None, Some([2, 13])] {
            for (tiles, beside) in [(false, false), (false, true), (true, false), (true, true)] {
                cases.push(Case { hidden, width, cut, tiles, beside, tokens: 9, accumulate: cut.is_none(), ..CASE });
            }
        }
    }
    for beside in [false, true] {
        // One choice, and more experts than lanes.
        cases.push(Case { top_k: 1, cut: Some([1, 5]), beside, ..CASE });
        cases.push(Case { top_k: 11, experts: 40, tokens: 2, beside, ..CASE });
        // As many chunks as are few on every device, some more, and one that is not full.
        for width in [256, 1032, 2056] {
            cases.push(Case { width, slots: RANKS, hidden: 16, experts: 3, beside, tokens: 7, ..CASE });
        }
    }
    for gpu in device::every_along_depth() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

/// Pairs whose experts a stage of its own chooses, or the first product.
#[derive(Debug, Clone, Copy)]
struct Chosen {
    tokens: usize,
    experts: usize,
    top_k: usize,
    options: RouteOptions,
    slots: Slots,
    /// Experts of a binding.
    cut: Option<usize>,
    /// The last row has fewer finite logits than places.
    short: bool,
}

impl Chosen {
    /// The slot of each token: every one, none, and one that does not exist.
    fn mapping(&self) -> Vec<i32> {
        (0..self.tokens).map(|t| (t % (self.slots.len() + 2)) as i32 - 1).collect()
    }

    /// The status, where somebody looks at the slots: with adapters.
    fn owed(&self) -> u32 {
        let past = !self.slots.is_empty() && self.mapping().iter().any(|slot| *slot >= self.slots.len() as i32);
        (u32::from(self.short) * STATUS_NON_FINITE) | (u32::from(past) * STATUS_SLOT)
    }
}

/// h, ids, weights and the status after gate and up.
fn gate_and_up(gpu: &Gpu, case: &Chosen, late: bool) -> (Vec<f32>, Vec<i32>, Vec<f32>, u32) {
    let Chosen { tokens, experts, top_k, options, slots, cut, short } = *case;
    let (pairs, [d, f]) = (tokens * top_k, [72, 40]);
    let mut rng = Rng::new(17);
    let mut logits = rng.floats(tokens * experts);
    // Ties, which the lower id wins, of the first and the last, and of neighbours that one lane holds where lanes hold more than one.
    if experts >= 5 {
        for (t, row) in logits.chunks_mut(experts).enumerate() {
            let [ends, neighbours] = if t.is_multiple_of(2) { [2.0, 3.0] } else { [3.0, 2.0] };
            [row[0], row[experts - 1]] = [ends; 2];
            [row[2], row[3]] = [neighbours; 2];
        }
    }
    if short {
        let last = &mut logits[(tokens - 1) * experts..];
        last[top_k - 1..].fill(f32::NAN);
        last[0] = f32::NEG_INFINITY;
    }
    let x = rng.floats(tokens * d);
    let limit = cut.map_or(u64::MAX, |count| (count * 2 * f * d * 2) as u64);
    let (weights, _) = weights(gpu, DType::Bf16, [experts, 2 * f, d], &rng.floats(experts * 2 * f * d), limit);
    let (mut pools, mut index) = ([48, 80].map(|n| vec![0xffu8; n]), Vec::new());
    let sizes = Case { experts, hidden: d, width: f, slots, ..CASE };
    let (site, _) = site(&sizes, &mut rng, &mut pools[0], &mut index, false);
    let (down, _) = self::site(&sizes, &mut rng, &mut pools[1], &mut index, true);
    let pools = pools.iter().map(|pool| upload(gpu, pool)).collect();
    let factors = Factors { pools, index: upload(gpu, &index), empty: Vec::new() };
    let (x, logits, mapping) = (upload(gpu, &x), upload(gpu, &logits), upload(gpu, &case.mapping()));
    let (h, status) = (Output::new(gpu, pairs * f, UNWRITTEN_F32), Output::new(gpu, 1, 0u32));
    let routed = run(gpu, |rec, pass| {
        let topk = Topk::scratch(rec, pairs)?;
        let (logits, status, options) = (&logits, &status.view, &options);
        let choice = Choice { options, experts, logits, topk: &topk, status };
        let (ids, topk_weights) = if late {
            (topk.ids(), topk.weights())
        } else {
            let [topk_ids, topk_weights] =
                [rec.scratch("ids", pairs as u64 * 4)?, rec.scratch("weights", pairs as u64 * 4)?];
            let (bias, topk_ids, topk_weights) = (None, &topk_ids, &topk_weights);
            Route { tokens, experts, top_k, options, logits, parts: 1, bias, topk_ids, topk_weights, status }
                .record(rec, pass)?;
            (topk_ids.clone(), topk_weights.clone())
        };
        let (rows, row_div, select, choice) = (pairs, top_k, Rows::Pairs(&ids), late.then_some(&choice));
        let (x, h, weights, activation) = (&x, &h.view, &weights, Activation::Silu);
        if slots.is_empty() {
            let (activation, adapters, y) = (Some(activation), None, h);
            PairGemm { rows, row_div, select, choice, x, weights, activation, adapters, y }.record(rec, pass)?;
        } else {
            let (max_rank, token_lora_mapping, ids) = (held::max_rank(slots), &mapping, Some(&ids));
            let (slots, site, factors) = (slots.len(), &site, &factors);
            let shrink = PairShrink {
                rows,
                row_div,
                top_k,
                experts,
                slots,
                max_rank,
                site,
                factors,
                x,
                ids,
                token_lora_mapping,
                status,
            };
            let sums = &PairGemmShrink { select, choice, weights, shrink, down: &down }.record(rec, pass)?;
            let [pool, down_pool] = [site, &down].map(|site| factors.pool(site));
            PairExpandShrink { rows, width: f, activation, sums, pool, down_pool, h, status }.record(rec, pass)?;
        }
        Ok((ids, topk_weights))
    });
    // Views of one buffer begin where they say.
    let words = |view: &wgmoe::kernels::View| -> Vec<u32> {
        let begin = view.offset as usize / 4;
        read::<u32>(gpu, &wgmoe::kernels::View::whole(&view.buffer), begin + pairs)[begin..].to_vec()
    };
    let ids = words(&routed.0).into_iter().map(u32::cast_signed).collect();
    (h.read(gpu), ids, words(&routed.1).into_iter().map(f32::from_bits).collect(), status.read(gpu)[0])
}

#[test]
fn a_product_that_chooses_its_experts_does_what_route_does() {
    let softmax = RouteOptions { scale: 2.5, ..RouteOptions::default() };
    let sigmoid = RouteOptions { score: Score::Sigmoid, ..softmax };
    let raw = RouteOptions { renormalise: false, ..RouteOptions::default() };
    for gpu in device::every_along_depth() {
        let lanes = gpu.capabilities().row_lanes as usize;
        let (top_k, options) = (8.min(lanes), softmax);
        let whole = Chosen { tokens: 1, experts: lanes, top_k, options, slots: &[], cut: None, short: false };
        let mut cases = Vec::new();
        for (experts, top_k) in [(5, 2), (lanes, 8.min(lanes)), (2 * lanes + 1, 3), (8 * lanes, 6)] {
            for short in [false, true] {
                cases.push(Chosen { experts, top_k, short, ..whole });
                cases.push(Chosen { experts, top_k, short, tokens: 7, slots: MIXED, cut: Some(3), ..whole });
            }
        }
        for options in [sigmoid, raw] {
            cases.push(Chosen { options, slots: MIXED, ..whole });
            cases.push(Chosen { options, slots: MIXED, short: true, ..whole });
            cases.push(Chosen { options, tokens: 4, cut: Some(2), ..whole });
            cases.push(Chosen { options, tokens: 4, cut: Some(2), short: true, ..whole });
        }
        each_case(&cases, |case| {
            assert!(choice::possible(gpu.capabilities(), &case.options, case.experts, case.top_k));
            let [(h, ids, weights, status), expected] = [true, false].map(|late| gate_and_up(&gpu, case, late));
            let owed = case.owed();
            if ids != expected.1 || [status, expected.3] != [owed; 2] {
                return Err(format!("{ids:?}, {:?}; status {status}, {}, expected {owed}", expected.1, expected.3));
            }
            let off = rel_err(&weights, &expected.2);
            if off > TOL_F32 || h.iter().zip(&expected.0).any(|(ours, theirs)| ours.to_bits() != theirs.to_bits()) {
                return Err(format!("weights are off by {off}, or h differs"));
            }
            Ok(())
        });
        let caps = gpu.capabilities();
        let grouped = RouteOptions { groups: 2, ..softmax };
        assert!(!choice::possible(caps, &grouped, 8, 2) && !choice::possible(caps, &softmax, 8 * lanes + 1, 2));
    }
}
