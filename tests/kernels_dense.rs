//! Products of few whole tokens with their adapters on the device against the oracle, wherever the lanes of a device can
//! lie along the depth.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/gpu_run.rs"]
mod gpu_run;
#[path = "common/held.rs"]
mod held;

use common::{Rng, TOL_F32, UNWRITTEN_F32, each_case, rel_err};
use gpu_run::{Output, run, upload, weights};
use held::{Held, MIXED, Slots};
use wgmoe::Gpu;
use wgmoe::dtype::DType;
use wgmoe::kernels::dense_gemm::{Cut, DenseGemm, MOST_ROWS};
use wgmoe::kernels::lora::Factors;
use wgmoe::kernels::pair_shrink::PairShrink;
use wgmoe::reference;
use wgmoe::router::{NoAdapter, STATUS_SLOT};

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
};

fn check(gpu: &Gpu, case: &Case) -> Result<(), String> {
    let Case { dtype, tokens, inner, outs, slots, accumulate, .. } = *case;
    let mut rng = Rng::new(95);
    let out: usize = outs.iter().sum();
    let x = rng.floats(tokens * inner);
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

    let (y, status) = (Output::of(gpu, &before, UNWRITTEN_F32), Output::new(gpu, 1, 0u32));
    let (x, mapping) = (upload(gpu, &x), upload(gpu, &mapping));
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
        DenseGemm { rows: tokens, cut, x: &x, weights: &matrix, adapters, y: &y.view, accumulate }.record(rec, pass)
    });
    let off = rel_err(&y.read(gpu), &expected);
    if off > TOL_F32 {
        return Err(format!("off by {off}"));
    }
    let owed = if lora { remapped.status } else { 0 };
    assert!(!lora || tokens <= slots.len() || owed == STATUS_SLOT);
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
