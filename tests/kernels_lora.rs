//! Adapters on the device against the oracle: different ranks, types and values in one batch.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/held.rs"]
mod held;

use common::{AdapterMix, Rng, Routing, TOL_F32, UNWRITTEN_F32, UNWRITTEN_I32, each_case, rel_err, tolerance};
use gpu_run::{Output, read, replayed, run, upload, weights};
use held::{Held, place};
use wgmoe::Gpu;
use wgmoe::dtype::DType;
use wgmoe::kernels::align::Align;
use wgmoe::kernels::expert_gemm_matrix::{ExpertGemmMatrix, Leaves};
use wgmoe::kernels::lora::{Factors, Lora, LoraSite, column_tiles};
use wgmoe::kernels::lora_gather::LoraGather;
use wgmoe::kernels::lora_matrix::Folded;
use wgmoe::kernels::lora_matrix::{self, InBlocks, LoraExpandTiles, LoraShrinkMatrix};
use wgmoe::kernels::operands::Rows;
use wgmoe::kernels::pack::{Form, pack};
use wgmoe::kernels::pair_shrink::PairShrink;
use wgmoe::kernels::runs::{AlignRuns, TokenChunks};
use wgmoe::kernels::tile_rows::TileRows;
use wgmoe::plan::matrix::{self, DEPTH_PARTS, FOLDED_SLOTS, MatrixTile, factor_exponent, largest_magnitude};
use wgmoe::plan::tuning::Tuning;
use wgmoe::reference;
use wgmoe::router::NoAdapter;
use wgmoe::shape::align_capacity;

/// Entries of other sites in front of this one.
const INDEX_BASE: usize = 3;

#[derive(Debug, Clone)]
struct Case {
    /// Tile height, or pairs one by one.
    tile: Option<usize>,
    tokens: usize,
    top_k: usize,
    experts: usize,
    out_dims: Vec<usize>,
    /// The columns of the projections alternate.
    alternating: bool,
    inner: usize,
    mix: AdapterMix,
    /// Rank and type of each slot; 0: nothing loaded there.
    slots: Vec<(usize, DType)>,
    /// All projections of a slot and expert use one A.
    shared: bool,
    /// Factor on A and on B.
    size: [f32; 2],
    /// Which slots have a bias, on every projection but the second; none past the end.
    biased: Vec<bool>,
    /// Packed rows hold what rounding took from them, which shrinks and tiles pass over.
    twice: bool,
}

fn case() -> Case {
    Case {
        tile: None,
        tokens: 9,
        top_k: 2,
        experts: 3,
        out_dims: vec![21, 21],
        alternating: false,
        inner: 24,
        mix: AdapterMix::Uniform,
        slots: vec![(8, DType::F16), (17, DType::Bf16)],
        shared: false,
        size: [1.0; 2],
        biased: Vec::new(),
        twice: false,
    }
}

/// As many slots as a product on matrices takes; some of them hold nothing.
fn most_slots() -> Vec<(usize, DType)> {
    [(7, DType::F16), (16, DType::Bf16), (0, DType::F32), (3, DType::F32)].repeat(FOLDED_SLOTS / 4)
}

/// A with the power of two that the pool keeps for it.
fn place_a(pool: &mut Vec<u8>, dtype: DType, values: &[f32], cols: usize) -> (u32, Vec<f32>, u32) {
    let (at, decoded) = place(pool, dtype, values, cols);
    let exponent = factor_exponent(largest_magnitude(dtype, &dtype.encode(values)));
    (at, decoded, u32::from(exponent.cast_unsigned()))
}

/// Pool, index, and what the oracle looks up at (virtual expert · projections + projection).
fn factors(gpu: &Gpu, case: &Case, rng: &mut Rng) -> (Factors, Vec<Held>) {
    let mut pool = vec![0xffu8; 48];
    // Entries that belong to other sites, and absent ones, would do damage if they were used.
    let mut index = vec![[7u32, 9, 5, f32::NAN.to_bits()]; INDEX_BASE];
    let mut held = Vec::new();
    for (slot, (rank, dtype)) in case.slots.iter().enumerate() {
        for expert in 0..case.experts {
            let large = |values: Vec<f32>, size: f32| values.into_iter().map(|v| v * size).collect::<Vec<f32>>();
            let a_values = large(rng.floats(rank * case.inner), case.size[0]);
            let shared = place_a(&mut pool, *dtype, &a_values, case.inner);
            for (projection, out) in case.out_dims.iter().enumerate() {
                // An expert that an adapter leaves out.
                let rank = if slot == 1 && expert == 1 && case.experts > 1 { 0 } else { *rank };
                let (a, a_values, exponent) = if case.shared {
                    shared.clone()
                } else {
                    place_a(&mut pool, *dtype, &large(rng.floats(rank * case.inner), case.size[0]), case.inner)
                };
                let biased = rank > 0 && projection != 1 && case.biased.get(slot) == Some(&true);
                // With a bias, B has one more column.
                let columns = rank + usize::from(biased);
                let (b, stored) =
                    place(&mut pool, *dtype, &large(rng.floats(out * columns), case.size[1]), columns.max(1));
                let rows = || stored.chunks(columns.max(1));
                let b_values = rows().flat_map(|row| &row[..rank]).copied().collect();
                let bias = biased.then(|| rows().map(|row| row[rank]).collect());
                // Not so different that the tolerance of the large ones hides the small ones.
                let scale = 0.25 + (held.len() % 64) as f32 / 16.0;
                let kind = [DType::F32, DType::F16, DType::Bf16].iter().position(|d| d == dtype).unwrap() as u32;
                let flags = kind << 16 | u32::from(biased) << 18 | exponent << 24;
                index.push([a, b, columns as u32 | flags, scale.to_bits()]);
                // A common A is whole also where this projection has no factor.
                let a = a_values[..rank * case.inner].to_vec();
                held.push(Held { rank, scale, a, b: b_values, bias });
            }
        }
    }
    (Factors { pools: vec![upload(gpu, &pool)], index: upload(gpu, &index), empty: Vec::new() }, held)
}

/// Adds the adapters of all pairs to y, `[P, stride]`, as the oracle does.
fn add_adapters(case: &Case, held: &[Held], x: &[f32], virtual_ids: &[i32], y: &mut [f32], stride: usize) {
    let mut column = 0;
    for (i, out) in case.out_dims.iter().enumerate() {
        let find = |v: usize| Some(held[v * case.out_dims.len() + i].factors());
        if case.alternating {
            // The oracle adds to columns without gaps.
            let step = case.out_dims.len();
            let mut own: Vec<f32> =
                y.chunks(stride).flat_map(|row| row.iter().skip(i).step_by(step)).copied().collect();
            reference::lora(x, case.top_k, virtual_ids, &find, *out, case.inner, &mut own, *out, 0);
            let columns = y.chunks_mut(stride).flat_map(|row| row.iter_mut().skip(i).step_by(step));
            columns.zip(own).for_each(|(y, own)| *y = own);
            continue;
        }
        reference::lora(x, case.top_k, virtual_ids, &find, *out, case.inner, y, stride, column);
        column += out;
    }
}

/// A case on the device, and what the oracle needs to know of it.
struct Prepared {
    rng: Rng,
    ids: Vec<i32>,
    virtual_ids: Vec<i32>,
    mapping: Vec<i32>,
    factors: Factors,
    held: Vec<Held>,
    site: LoraSite,
    max_rank: usize,
}

fn prepare(gpu: &Gpu, case: &Case) -> Prepared {
    let mut rng = Rng::new(21);
    let slots = case.slots.len();
    let mut ids = Routing::Uniform.ids(case.tokens, case.top_k, case.experts, &mut rng);
    for p in (4..ids.len()).step_by(11) {
        ids[p] = -1;
    }
    let mapping = case.mix.mapping(case.tokens, slots, &mut rng);
    let virtual_ids =
        reference::remap(&ids, &mapping, case.top_k, case.experts, slots, NoAdapter::Skip).virtual_topk_ids;
    let (factors, held) = factors(gpu, case, &mut rng);
    let site = LoraSite {
        ordinal: 0,
        index_base: INDEX_BASE,
        out_dims: case.out_dims.clone(),
        alternating: case.alternating,
        in_dim: case.inner,
    };
    let biased = |slot: usize| usize::from(case.biased.get(slot) == Some(&true));
    let max_rank = case.slots.iter().enumerate().map(|(slot, (rank, _))| rank + biased(slot)).max().unwrap();
    Prepared { rng, ids, virtual_ids, mapping, factors, held, site, max_rank }
}

fn check(gpu: &Gpu, case: &Case) -> Result<(), String> {
    let Prepared { mut rng, virtual_ids, factors, held, site, max_rank, .. } = prepare(gpu, case);
    let (slots, projections) = (case.slots.len(), case.out_dims.len());
    let pairs = case.tokens * case.top_k;
    let mut x = rng.floats(case.tokens * case.inner);
    for t in 0..case.tokens {
        if virtual_ids[t * case.top_k..(t + 1) * case.top_k].iter().all(|v| *v < 0) {
            x[t * case.inner..(t + 1) * case.inner].fill(f32::NAN);
        }
    }
    let stride: usize = case.out_dims.iter().sum();
    let before = rng.floats(pairs * stride);
    let y = Output::of(gpu, &before, UNWRITTEN_F32);
    let (x_view, ids_view) = (upload(gpu, &x), upload(gpu, &virtual_ids));
    run(gpu, |rec, pass| {
        // 0x7fffffff is also a NaN: what the shrink leaves unwritten must not be read by the expand.
        let words = pairs * projections * max_rank.next_multiple_of(8);
        let u = rec.scratch("lora u", words as u64 * 4)?;
        gpu.queue().write_buffer(&u.buffer, 0, bytemuck::cast_slice(&vec![UNWRITTEN_I32; words]));
        let buckets = slots * case.experts;
        let aligned = match case.tile {
            None => None,
            Some(tile) => {
                let columns = column_tiles(gpu.capabilities(), &site, max_rank, tile);
                let label = "tiles";
                Some(Align { pairs, buckets, tile, label, ids: &ids_view, columns: &columns }.record(rec, pass)?)
            }
        };
        let select = aligned.as_ref().map_or(Rows::Pairs(&ids_view), Rows::Tiles);
        Lora {
            rows: pairs,
            row_div: case.top_k,
            select,
            buckets,
            max_rank,
            site: &site,
            factors: &factors,
            x: &x_view,
            y: &y.view,
            y_stride: stride,
        }
        .record(rec, pass)
    });
    let got = y.read(gpu);
    let mut expected = before.clone();
    add_adapters(case, &held, &x, &virtual_ids, &mut expected, stride);
    for p in 0..pairs {
        let row = p * stride..(p + 1) * stride;
        let idle = virtual_ids[p] < 0 || held[virtual_ids[p] as usize * projections].rank == 0;
        if idle && got[row.clone()] != before[row] {
            return Err(format!("pair {p} has no adapter, but its row changed"));
        }
    }
    let off = rel_err(&got, &expected);
    if off > TOL_F32 { Err(format!("off by {off}")) } else { Ok(()) }
}

#[test]
fn adapters_of_any_rank_and_type_share_a_batch() {
    let mut cases = Vec::new();
    for tile in [None, Some(1), Some(4), Some(8)] {
        let of = |slots: Vec<(usize, DType)>| Case { tile, tokens: 24, slots, ..case() };
        cases.push(of(vec![(1, DType::F32), (64, DType::Bf16)]));
        cases.push(of(vec![(3, DType::F16), (8, DType::F32), (17, DType::Bf16)]));
        cases.push(of(vec![(64, DType::F16), (0, DType::F32), (1, DType::F16)]));
        cases.push(of(vec![(17, DType::F32)]));
        cases.push(Case { mix: AdapterMix::Distinct, tokens: 130, ..of(most_slots()) });
    }
    for gpu in device::every_variant() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
fn tokens_take_their_columns_of_a_as_the_oracle_says() {
    const VOCAB: usize = 37;
    let cases: Vec<(usize, DType)> =
        [1, 7, 8, 17].into_iter().flat_map(|r| [DType::F32, DType::F16, DType::Bf16].map(|d| (r, d))).collect();
    for gpu in device::every_tier() {
        each_case(&cases, |(rank, dtype)| {
            let mut rng = Rng::new(23);
            // Slot 0 of rank 3 in f32, slot 1 empty, slot 2 of the case; slot 7 does not exist.
            let mut pool = vec![0xffu8; 48];
            let mut index = vec![[7u32, 9, 5, f32::NAN.to_bits()]; INDEX_BASE];
            let mut held = Vec::new();
            for (rank, dtype, scale) in [(3, DType::F32, 0.5f32), (0, DType::F32, 1.0), (*rank, *dtype, 1.5)] {
                let (a, columns) = place(&mut pool, dtype, &rng.floats(VOCAB * rank), rank.max(1));
                let kind = [DType::F32, DType::F16, DType::Bf16].iter().position(|d| *d == dtype).unwrap() as u32;
                index.push([a, 0, rank as u32 | kind << 16, scale.to_bits()]);
                let a: Vec<f32> = (0..rank * VOCAB).map(|i| columns[i % VOCAB * rank + i / VOCAB]).collect();
                held.push((rank, scale, a));
            }
            let factors = Factors { pools: vec![upload(&gpu, &pool)], index: upload(&gpu, &index), empty: Vec::new() };
            // Every other row decodes: its token is what the last step left.
            let tokens: Vec<u32> = (0..11).map(|t| t * 7 % VOCAB as u32).collect();
            let slots: Vec<i32> = (0..11).map(|t| [2, 0, -1, 1, 2, 7][t % 6]).collect();
            let table: Vec<[i32; 4]> =
                (0..11).map(|t| [if t % 2 == 0 { tokens[t] as i32 } else { -1 }, 5, t as i32, slots[t]]).collect();
            let (rows, last_ids) = (upload(&gpu, &table), upload(&gpu, &tokens));
            let max_rank = rank.max(&3).next_multiple_of(8) + 8;
            let u = Output::new(&gpu, 11 * max_rank, UNWRITTEN_F32);
            let site =
                LoraSite { ordinal: 0, index_base: INDEX_BASE, out_dims: vec![16], alternating: false, in_dim: VOCAB };
            run(&gpu, |rec, pass| {
                LoraGather {
                    rows: 11,
                    row_table: &rows,
                    last_ids: &last_ids,
                    slots: 3,
                    max_rank,
                    site: &site,
                    factors: &factors,
                    u: &u.view,
                }
                .record(rec, pass)
            });
            let mut expected = vec![UNWRITTEN_F32; 11 * max_rank];
            for t in 0..11 {
                // Up to the next multiple of eight there are zeros.
                let padded = held.get(slots[t] as usize).map_or(0, |(rank, ..)| rank.next_multiple_of(8));
                expected[t * max_rank..t * max_rank + padded].fill(0.0);
            }
            let find = |slot: usize| {
                let (rank, scale, a) = held.get(slot)?;
                Some(reference::Factors { rank: *rank, scale: *scale, a, b: &[], bias: None })
            };
            reference::lora_gather(&tokens, &slots, &find, VOCAB, max_rank, &mut expected);
            let same = |(g, e): (&f32, &f32)| g == e || g.to_bits() == e.to_bits();
            let got = u.read(&gpu);
            match got.iter().zip(&expected).position(|pair| !same(pair)) {
                None => Ok(()),
                Some(at) => Err(format!("element {at}: {} instead of {}", got[at], expected[at])),
            }
        });
    }
}

#[test]
fn a_bias_is_added_at_every_rank_beside_adapters_without_one() {
    let mut cases = Vec::new();
    for tile in [None, Some(1), Some(4), Some(8)] {
        for rank in [1, 7, 8, 15, 16] {
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let slots = vec![(rank, dtype), (rank, DType::F32), (8, DType::Bf16)];
                for shared in [false, true] {
                    let biased = vec![true, false, true];
                    cases.push(Case { tile, tokens: 24, slots: slots.clone(), shared, biased, ..case() });
                }
            }
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
fn projections_meet_their_own_factors_with_and_without_a_common_a() {
    let mut cases = Vec::new();
    for tile in [None, Some(4)] {
        for shared in [false, true] {
            // gate and up; q, k and v on whole tokens; one projection; four of different widths.
            for (out_dims, experts, top_k) in
                [(vec![21, 21], 3, 2), (vec![24, 8, 8], 1, 1), (vec![40], 4, 3), (vec![1, 16, 17, 5], 2, 1)]
            {
                cases.push(Case { tile, shared, out_dims, experts, top_k, tokens: 13, ..case() });
            }
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
fn columns_of_projections_may_alternate() {
    let mut cases = Vec::new();
    for tile in [None, Some(4), Some(8)] {
        for out_dims in [vec![21, 21], vec![128, 128], vec![5, 5, 5], vec![16; 4]] {
            for biased in [vec![], vec![true, false]] {
                let out_dims = out_dims.clone();
                cases.push(Case { tile, out_dims, alternating: true, biased, tokens: 24, ..case() });
            }
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

#[test]
fn every_edge_shape_and_mix_equals_the_oracle() {
    let mut cases = Vec::new();
    for tile in [None, Some(4), Some(8)] {
        for tokens in [0, 1, 3, 4, 5, 7, 8, 9, 31] {
            cases.push(Case { tile, tokens, top_k: 1, ..case() });
        }
        for inner in [8, 16, 32, 40, 56] {
            cases.push(Case { tile, inner, ..case() });
        }
        for mix in AdapterMix::ALL {
            cases.push(Case { tile, mix, ..case() });
        }
    }
    for gpu in device::every_variant() {
        each_case(&cases, |case| check(&gpu, case));
    }
}

/// The adapters of the matrix tier: packed rows, and products in the order of tiles that keep both powers of two.
fn check_matrix(gpu: &Gpu, case: &Case) -> Result<(), String> {
    const W_SCALE: f32 = 4.0;
    let Prepared { mut rng, ids, virtual_ids, mapping, factors, held, site, max_rank } = prepare(gpu, case);
    let (slots, projections) = (case.slots.len(), case.out_dims.len());
    let (pairs, row_div) = (case.tokens * case.top_k, case.top_k);
    let max_rank = max_rank.next_multiple_of(8);
    let x = rng.floats(case.tokens * case.inner);
    let (stride, tile) = (case.out_dims.iter().sum::<usize>(), 32);
    // y is added to where each pair stands among the tiles of its expert.
    let capacity = align_capacity(pairs, case.experts, tile);
    let before: Vec<f32> = rng.floats(capacity * stride).into_iter().map(|v| v * 65_536.0).collect();
    let y = Output::of(gpu, &before, UNWRITTEN_F32);
    let (x_view, ids_view) = (upload(gpu, &x), upload(gpu, &ids));
    let (mapping_view, status) = (upload(gpu, &mapping), upload(gpu, &[0u32]));
    let (aligned, packed) = run(gpu, |rec, pass| {
        let words = pairs * projections * max_rank;
        let u = rec.scratch("lora u", words as u64 * 4)?;
        gpu.queue().write_buffer(&u.buffer, 0, bytemuck::cast_slice(&vec![UNWRITTEN_I32; words]));
        let used: Vec<usize> = (0..slots).collect();
        let chunks = TokenChunks::record(rec, pass, "chunks", (case.tokens, &mapping_view), (slots, &used))?;
        let runs = AlignRuns {
            chunks: &chunks,
            top_k: case.top_k,
            experts: case.experts,
            tile,
            label: "tiles",
            ids: Some(&ids_view),
            status: &status,
            run: lora_matrix::RUN,
            columns: &[1],
            run_columns: &lora_matrix::column_tiles(&site, max_rank),
        }
        .record(rec, pass)?;
        let form = if case.twice { Form::TWICE } else { Form::ROWS };
        let packed = pack(rec, pass, ["packed"; 2], &x_view, [case.tokens, case.inner], &form)?;
        let u = LoraShrinkMatrix {
            rows: pairs,
            row_div,
            runs: &runs,
            max_rank,
            w_scale: W_SCALE,
            site: &site,
            factors: &factors,
            x: &packed,
            blocks: None,
            folded: false,
        }
        .record(rec, pass)?;
        LoraExpandTiles {
            runs: &runs,
            buckets: slots * case.experts,
            max_rank,
            site: &site,
            factors: &factors,
            u: &u,
            y: &y.view,
            y_stride: stride,
        }
        .record(rec, pass)?;
        Ok((runs.aligned, packed))
    });
    let got = y.read(gpu);
    let words: Vec<i32> = read(gpu, &aligned.view, aligned.places_base as usize + pairs);
    let halves: Vec<u16> = read(gpu, &packed.view, (packed.exponents() as usize + packed.rows) * 4);
    let mut delta = vec![0.0; pairs * stride];
    add_adapters(case, &held, &x, &virtual_ids, &mut delta, stride);
    let mut expected = before.clone();
    for p in 0..pairs {
        let place = words[aligned.places_base as usize + p] as usize;
        let exponent = DType::F16.decode(&halves[(packed.exponents() as usize + p / row_div) * 4].to_le_bytes())[0];
        for (e, d) in expected[place * stride..].iter_mut().zip(&delta[p * stride..(p + 1) * stride]) {
            *e += d * exponent.exp2() * W_SCALE;
        }
        let idle = virtual_ids[p] < 0 || held[virtual_ids[p] as usize * projections].rank == 0;
        let row = place * stride..(place + 1) * stride;
        if idle && got[row.clone()] != before[row] {
            return Err(format!("pair {p} has no adapter, but its row changed"));
        }
    }
    let off = rel_err(&got, &expected);
    if off > tolerance(gpu) { Err(format!("off by {off}")) } else { Ok(()) }
}

#[test]
fn adapters_on_matrices_equal_the_oracle() {
    let mut cases = Vec::new();
    let of = |slots: Vec<(usize, DType)>| Case { tokens: 60, slots, ..case() };
    cases.push(of(vec![(1, DType::F32), (64, DType::Bf16)]));
    cases.push(of(vec![(3, DType::F16), (8, DType::F32), (17, DType::Bf16)]));
    cases.push(of(vec![(64, DType::F16), (0, DType::F32), (128, DType::F16)]));
    for rank in [7, 8, 15, 16] {
        let slots = vec![(rank, DType::Bf16), (rank, DType::F32), (8, DType::F16)];
        cases.push(Case { biased: vec![true, false, true], ..of(slots) });
    }
    for inner in [8, 64, 72, 256, 264, 768] {
        cases.push(Case { inner, tokens: 70, ..case() });
        cases.push(Case { inner, tokens: 70, twice: true, ..case() });
    }
    for (out_dims, experts, top_k) in [(vec![128, 128], 3, 2), (vec![40], 4, 3), (vec![1, 16, 17, 5], 2, 1)] {
        cases.push(Case { out_dims, experts, top_k, tokens: 50, ..case() });
    }
    for out_dims in [vec![21, 21], vec![128, 128], vec![5, 5, 5]] {
        cases.push(Case { out_dims, alternating: true, tokens: 50, ..case() });
    }
    for mix in AdapterMix::ALL {
        cases.push(Case { mix, tokens: 40, ..case() });
    }
    // Factors outside the range of f16.
    for size in [[1e6, 1.0], [1.0, 1e6], [1e6, 1e-9], [1e-9, 1e3], [1e20, 1e-30]] {
        cases.push(Case { size, slots: vec![(8, DType::Bf16), (17, DType::F32)], tokens: 40, ..case() });
    }
    for gpu in device::every_tier().into_iter().filter(|gpu| gpu.capabilities().matrix) {
        each_case(&cases, |case| check_matrix(&gpu, case));
    }
}

/// A product on cooperative matrices that adds adapters, in tiles of `tile` pairs or, with one expert and `None`, dense; its
/// weights cut into pieces of `cut` rows; the shrink takes runs of `shrink` pairs, or each on its own.
fn check_folded(
    gpu: &Gpu,
    (case, tile, cut): &(Case, Option<usize>, Option<usize>),
    shrink: Option<usize>,
) -> Result<(), String> {
    let Prepared { mut rng, ids, virtual_ids, mapping, factors, held, site, max_rank } = prepare(gpu, case);
    // A dense product knows no ids.
    let ids = if tile.is_some() { ids } else { vec![0; ids.len()] };
    let virtual_ids = if tile.is_some() { virtual_ids } else { mapping.clone() };
    let (slots, experts, projections) = (case.slots.len(), case.experts, case.out_dims.len());
    let (pairs, row_div, inner) = (case.tokens * case.top_k, case.top_k, case.inner);
    let max_rank = max_rank.next_multiple_of(16);
    let out: usize = case.out_dims.iter().sum();
    let y_stride = out.next_multiple_of(16);
    let x = rng.floats(case.tokens * inner);
    let limit = cut.map_or(u64::MAX, |rows| (rows * inner * 2) as u64);
    let (w, decoded) = weights(gpu, DType::Bf16, [experts, out, inner], &rng.floats(experts * out * inner), limit);
    let rows = tile.map_or(pairs, |tile| align_capacity(pairs, experts, tile));
    let before = if tile.is_some() { vec![UNWRITTEN_F32; rows * y_stride] } else { rng.floats(rows * y_stride) };
    let y = Output::of(gpu, &before, UNWRITTEN_F32);
    // The same in parts of the depth, of a dense product whose x goes through workgroup memory.
    let in_parts = Output::new(gpu, if tile.is_none() { DEPTH_PARTS * rows * y_stride } else { 0 }, UNWRITTEN_F32);
    let (x_view, ids_view) = (upload(gpu, &x), upload(gpu, &ids));
    let (mapping_view, status) = (upload(gpu, &mapping), upload(gpu, &[0u32]));
    let (aligned, packed) = run(gpu, |rec, pass| {
        // 0x7fff is a NaN of f16, too: what the shrink leaves unwritten must not be added.
        let words = pairs * projections * max_rank / 2;
        let u = rec.scratch("lora u", words as u64 * 4)?;
        gpu.queue().write_buffer(&u.buffer, 0, bytemuck::cast_slice(&vec![0x7fff_7fffu32; words]));
        let label = "tiles";
        let columns: Vec<u32> = tile.iter().flat_map(|tile| w.columns(gpu.capabilities(), *tile)).collect();
        let columns = &columns;
        let runs = match shrink {
            None => None,
            Some(run) => {
                let used: Vec<usize> = (0..slots).collect();
                let chunks =
                    TokenChunks::record(rec, pass, "chunks", (pairs / case.top_k, &mapping_view), (slots, &used))?;
                let align = AlignRuns {
                    chunks: &chunks,
                    top_k: case.top_k,
                    experts,
                    tile: tile.unwrap_or(run),
                    label,
                    ids: tile.map(|_| &ids_view),
                    status: &status,
                    run,
                    columns,
                    run_columns: &lora_matrix::column_tiles(&site, max_rank),
                };
                Some(align.record(rec, pass)?)
            }
        };
        let aligned = match (*tile, &runs) {
            (None, _) => None,
            (_, Some(runs)) => Some(runs.aligned.clone()),
            (Some(tile), None) => {
                let align = Align { pairs, buckets: experts, tile, label, ids: &ids_view, columns };
                Some(align.record(rec, pass)?)
            }
        };
        let direct = matrix::dense(gpu.capabilities(), pairs, out, false).filter(|cut| tile.is_none() && cut.direct);
        if tile.is_none() && pairs >= 2000 && direct.is_none() {
            panic!("so many rows, and x does not go straight into matrices");
        }
        let labels = ["packed", "packed blocks"];
        // NaN of f16: what nobody writes must not reach a sum.
        for label in ["packed blocks", "x in blocks", "u in blocks"] {
            let words = rec.scratch(label, 1 << 22)?;
            gpu.queue().write_buffer(&words.buffer, 0, bytemuck::cast_slice(&vec![0x7fff_7fffu32; 1 << 20]));
        }
        let form = Form { twice: case.twice && tile.is_some(), cut: direct, ..Form::ROWS };
        let mut packed = pack(rec, pass, labels, &x_view, [case.tokens, inner], &form)?;
        // In the tiles of a direct cut the shrink of long runs reads the blocks of the product.
        if let (Some(aligned), Some(tile)) = (&aligned, *tile)
            && let Some(cut) = MatrixTile::direct_of(gpu.capabilities(), tile)
        {
            packed.blocks = Some(TileRows { rows: pairs, row_div, aligned, cut, x: &packed }.record(rec, pass)?);
        }
        let packed = packed;
        let u = match &runs {
            None => {
                let (ids, status) = (tile.map(|_| &ids_view), &status);
                let (x, rows, token_lora_mapping, site, factors) =
                    (&packed.view, pairs, &mapping_view, &site, &factors);
                let top_k = case.top_k;
                PairShrink {
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
                }
                .record_packed(rec, pass, packed.stride())?
            }
            Some(runs) => {
                let (rows, site, factors, x) = (pairs, &site, &factors, &packed);
                let (w_scale, folded) = (1.0, true);
                let blocks = packed.blocks.as_ref().filter(|_| tile.is_some()).map(|blocks| (blocks, InBlocks::Read));
                LoraShrinkMatrix { rows, row_div, runs, max_rank, w_scale, site, factors, x, blocks, folded }
                    .record(rec, pass)?
            }
        };
        let (token_lora_mapping, site, factors, top_k) = (&mapping_view, &site, &factors, case.top_k);
        let used = slots;
        let folded = Folded { u, max_rank, token_lora_mapping, top_k, slots, used, experts, site, factors };
        let select = aligned.as_ref().map_or(Rows::Dense, Rows::Tiles);
        ExpertGemmMatrix {
            rows: pairs,
            row_div,
            select,
            x: &packed,
            weights: &w,
            y: &y.view,
            y_stride,
            accumulate: tile.is_none(),
            parts: 1,
            adapters: Some(&folded),
            leaves: Leaves::Sums,
        }
        .record(rec, pass)?;
        if tile.is_none() && packed.by_row && pairs > 8 {
            let (rows, x, weights, y, accumulate, parts) = (pairs, &packed, &w, &in_parts.view, false, DEPTH_PARTS);
            let adapters = Some(&folded);
            let leaves = Leaves::Sums;
            ExpertGemmMatrix { rows, row_div, select, x, weights, y, y_stride, accumulate, parts, adapters, leaves }
                .record(rec, pass)?;
        }
        Ok((aligned, packed))
    });
    let got = y.read(gpu);
    let words: Option<(Vec<i32>, usize)> =
        aligned.map(|a| (read(gpu, &a.view, a.places_base as usize + pairs), a.places_base as usize));
    let halves: Vec<u16> = read(gpu, &packed.view, (packed.exponents() as usize + packed.rows) * 4);
    let mut expected = vec![0.0; pairs * out];
    reference::expert_gemm(&x, &decoded, &ids, row_div, out, inner, &mut expected);
    add_adapters(case, &held, &x, &virtual_ids, &mut expected, out);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for p in (0..pairs).filter(|p| tile.is_none() || ids[*p] >= 0) {
        let place = words.as_ref().map_or(p, |(words, base)| words[base + p] as usize);
        let exponent = DType::F16.decode(&halves[(packed.exponents() as usize + p / row_div) * 4].to_le_bytes())[0];
        let unscale = if tile.is_some() { (-exponent).exp2() } else { 1.0 };
        let residual = |c: usize| if tile.is_none() { before[p * y_stride + c] } else { 0.0 };
        ours.extend(got[place * y_stride..][..out].iter().map(|v| v * unscale));
        theirs.extend(expected[p * out..(p + 1) * out].iter().enumerate().map(|(c, v)| v + residual(c)));
    }
    let off = rel_err(&ours, &theirs);
    if off > tolerance(gpu) {
        return Err(format!("off by {off}"));
    }
    if tile.is_none() && packed.by_row && pairs > 8 {
        let parts = in_parts.read(gpu);
        let sum = |at: usize| parts[at..].iter().step_by(rows * y_stride).sum::<f32>() + before[at];
        let ours: Vec<f32> = (0..pairs).flat_map(|p| (0..out).map(move |c| p * y_stride + c)).map(sum).collect();
        let off = rel_err(&ours, &theirs);
        if off > tolerance(gpu) {
            return Err(format!("in parts off by {off}"));
        }
    }
    Ok(())
}

#[test]
fn products_on_matrices_add_adapters_as_the_oracle_does() {
    let mut cases = Vec::new();
    let of = |slots: Vec<(usize, DType)>| Case { tokens: 60, slots, ..case() };
    for height in [None].into_iter().chain(device::matrix_heights().into_iter().map(Some)) {
        let mut add = |case: Case, cut: Option<usize>| {
            let case = if height.is_none() { Case { experts: 1, top_k: 1, ..case } } else { case };
            cases.push((case, height, cut));
        };
        add(of(vec![(8, DType::F16)]), None);
        add(of(vec![(3, DType::F16), (8, DType::F32), (17, DType::Bf16)]), None);
        add(of(vec![(64, DType::F16), (0, DType::F32), (128, DType::F32)]), None);
        add(Case { tokens: 300, ..of(most_slots()[..40].to_vec()) }, None);
        // Slots of all four words of bits: in one tile, and a low tile in one or two of them.
        for mix in [AdapterMix::Uniform, AdapterMix::Distinct] {
            add(Case { mix, tokens: 300, ..of(most_slots()) }, None);
        }
        for inner in [8, 64, 72, 256] {
            for twice in [false, true] {
                add(Case { inner, twice, ..of(vec![(16, DType::Bf16), (16, DType::F16)]) }, None);
            }
        }
        for out_dims in [vec![128, 128], vec![256, 256], vec![40], vec![1, 16, 17, 5], vec![320, 64, 64]] {
            add(Case { out_dims, tokens: 150, ..case() }, None);
        }
        add(Case { out_dims: vec![128, 128], ..case() }, Some(48));
        for (out_dims, cut) in
            [(vec![21, 21], None), (vec![128, 128], None), (vec![128, 128], Some(48)), (vec![5, 5, 5], None)]
        {
            add(Case { out_dims, alternating: true, tokens: 70, ..case() }, cut);
        }
        for mix in AdapterMix::ALL {
            add(Case { mix, tokens: 40, ..case() }, None);
        }
        add(Case { size: [5.0, 0.01], ..case() }, None);
    }
    // So many rows that x and u go straight into matrices, and columns of two projections in one tile.
    for out_dims in [vec![512, 512], vec![700, 300]] {
        let slots = vec![(17, DType::Bf16), (3, DType::F32), (8, DType::F16)];
        cases.push((Case { out_dims, experts: 1, top_k: 1, tokens: 2000, ..of(slots) }, None, None));
    }
    for gpu in device::every_tier().into_iter().filter(|gpu| gpu.capabilities().matrix) {
        for shrink in [Some(lora_matrix::RUN), Some(lora_matrix::LONG_RUN), None] {
            each_case(&cases, |case| check_folded(&gpu, case, shrink));
        }
    }
}

#[test]
#[ignore = "repeats MSL on the CPU: portability/steps/msl-run.sh"]
fn adapters_on_matrices_of_8_equal_the_oracle() {
    let gpu = replayed::device(|tuning| Tuning { matrix_workgroups: 1, ..tuning });
    let slots = || vec![(3, DType::F16), (8, DType::F32), (17, DType::Bf16)];
    let mut apart = Vec::new();
    for (out_dims, inner) in [(vec![21, 21], 72), (vec![40], 24), (vec![5, 5, 5], 64)] {
        apart.push(Case { tokens: 60, slots: slots(), out_dims, inner, ..case() });
    }
    apart.push(Case { biased: vec![true, false, true], ..apart[0].clone() });
    each_case(&apart, |case| check_matrix(&gpu, case));

    for height in [None].into_iter().chain(device::matrix_heights().into_iter().map(Some)) {
        let [experts, top_k] = if height.is_none() { [1, 1] } else { [2, 2] };
        let of = |out_dims, alternating, tokens| Case {
            out_dims,
            alternating,
            experts,
            top_k,
            tokens,
            slots: slots(),
            ..case()
        };
        let cases = [
            (of(vec![40, 90], false, 20), height, None),
            (of(vec![21, 21], true, 70), height, None),
            (Case { inner: 72, twice: true, ..of(vec![1, 16, 17, 5], false, 150) }, height, None),
        ];
        for shrink in [Some(lora_matrix::RUN), Some(lora_matrix::LONG_RUN), None] {
            each_case(&cases, |case| check_folded(&gpu, case, shrink));
        }
    }
}
