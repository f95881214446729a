//! Few whole tokens whose adapters are shrunk beside a product and added by the stage that reads it, against the oracle: the norm,
//! and rope; wherever the lanes of a device can lie along the depth.

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
use wgmoe::kernels::View;
use wgmoe::kernels::dense_gemm::{Cut, DenseGemm, MOST_ROWS};
use wgmoe::kernels::expand_norm::{self, ExpandNorm};
use wgmoe::kernels::lora::{Factors, LoraSite};
use wgmoe::kernels::operands::Weights;
use wgmoe::kernels::pair_shrink::PairShrink;
use wgmoe::kernels::rope::{self, AttentionShape, Heads, Rope, rotary_table};
use wgmoe::reference;
use wgmoe::router::{NoAdapter, STATUS_SLOT};

const EPS: f64 = 1e-6;
const THETA: f64 = 10_000.0;

/// Ranks of one group of B, of two, of more than are read at once, and the highest that a norm takes.
const RANKS: Slots =
    &[(1, DType::Bf16, false), (16, DType::Bf16, false), (31, DType::F32, true), (32, DType::F16, false)];
/// Higher ones, for rope.
const HIGH: Slots = &[(128, DType::Bf16, false), (40, DType::F32, true), (16, DType::F16, false)];

/// A product on the device, and what the oracle says of it.
struct Prepared {
    tokens: usize,
    x: View,
    weights: Weights,
    site: LoraSite,
    factors: Factors,
    mapping: View,
    slots: Slots,
    status: Output<u32>,
    /// `before + W x`, and the same with adapters.
    base: Vec<f32>,
    expected: Vec<f32>,
    owed: u32,
}

/// `outs` are the columns of the projections, `piece` those of a binding.
fn prepare(
    gpu: &Gpu,
    rng: &mut Rng,
    (dtype, slots): (DType, Slots),
    tokens: usize,
    (inner, outs): (usize, &[usize]),
    piece: Option<usize>,
    before: &[f32],
) -> Prepared {
    let out: usize = outs.iter().sum();
    let x = rng.floats(tokens * inner);
    let limit = piece.map_or(u64::MAX, |rows| (rows * inner * dtype.size()) as u64);
    let (weights, decoded) = weights(gpu, dtype, [1, out, inner], &rng.floats(out * inner), limit);
    let (mut pool, mut index) = (vec![0xffu8; 48], Vec::new());
    // A projection that an adapter leaves out.
    let absent = |slot: usize, _: usize, projection: usize| slot == 1 && projection == 1;
    let (site, held) = held::site(slots, 1, outs, inner, absent, rng, &mut pool, &mut index);
    let factors = Factors { pools: vec![upload(gpu, &pool)], index: upload(gpu, &index), empty: Vec::new() };
    // Every slot, one that does not exist, and none.
    let mapping: Vec<i32> = (0..tokens).map(|t| ((t + 1) % (slots.len() + 2)) as i32 - 1).collect();
    let remapped = reference::remap(&vec![0; tokens], &mapping, 1, 1, slots.len(), NoAdapter::Skip);
    assert!(tokens <= slots.len() || remapped.status == STATUS_SLOT);
    let mut base = vec![0.0; tokens * out];
    reference::expert_gemm(&x, &decoded, &vec![0; tokens], 1, out, inner, &mut base);
    base.iter_mut().zip(before).for_each(|(y, before)| *y += before);
    let mut expected = base.clone();
    let mut column = 0;
    for (projection, columns) in outs.iter().enumerate() {
        let find = |slot: usize| held.get(slot * outs.len() + projection).map(Held::factors);
        let ids = &remapped.virtual_topk_ids;
        reference::lora(&x, 1, ids, &find, *columns, inner, &mut expected, out, column);
        column += columns;
    }
    let (x, mapping, status) = (upload(gpu, &x), upload(gpu, &mapping), Output::new(gpu, 1, 0u32));
    Prepared { tokens, x, weights, site, factors, mapping, slots, status, base, expected, owed: remapped.status }
}

impl Prepared {
    fn max_rank(&self) -> usize {
        held::max_rank(self.slots)
    }

    fn shrink(&self) -> PairShrink<'_> {
        PairShrink {
            rows: self.tokens,
            row_div: 1,
            top_k: 1,
            experts: 1,
            slots: self.slots.len(),
            max_rank: self.max_rank(),
            site: &self.site,
            factors: &self.factors,
            x: &self.x,
            ids: None,
            token_lora_mapping: &self.mapping,
            status: &self.status.view,
        }
    }

    /// The product into `y`, cut as one of `as_wide_as` columns is.
    fn gemm<'a>(&'a self, gpu: &Gpu, y: &'a View, as_wide_as: usize, accumulate: bool) -> DenseGemm<'a> {
        let cut = Cut::of(gpu.capabilities(), self.tokens.min(5), as_wide_as, self.weights.in_dim).unwrap();
        DenseGemm { rows: self.tokens, cut, x: &self.x, weights: &self.weights, adapters: None, y, accumulate }
    }

    fn check_status(&self, gpu: &Gpu) -> Result<(), String> {
        let status = self.status.read(gpu)[0];
        if status == self.owed { Ok(()) } else { Err(format!("status {status}, expected {}", self.owed)) }
    }
}

fn close(what: &str, got: &[f32], expected: &[f32]) -> Result<(), String> {
    let off = rel_err(got, expected);
    if off > TOL_F32 { Err(format!("{what} is off by {off}")) } else { Ok(()) }
}

/// NaN in all of a scratch buffer: what is left unwritten must not be read.
fn poison(gpu: &Gpu, view: &View) {
    gpu.queue().write_buffer(&view.buffer, 0, &vec![0xff; view.buffer.size() as usize]);
}

#[test]
fn a_norm_adds_what_a_product_left_to_it() {
    let mut cases = Vec::new();
    for (dtype, slots) in [(DType::Bf16, RANKS), (DType::F16, MIXED), (DType::F32, RANKS)] {
        for tokens in 1..=MOST_ROWS {
            cases.push((dtype, slots, tokens, 72, 200, None, 2048));
        }
    }
    // Widths of one column to a lane and of many, more than registers hold, and cuts.
    for (width, as_wide_as) in [(8, 128), (1028, 8192), (4096, 2048), (4104, 2048)] {
        for piece in [None, Some(width / 2 + 1)] {
            cases.push((DType::Bf16, RANKS, 5, 40, width, piece, as_wide_as));
        }
    }
    for gpu in device::every_along_depth() {
        each_case(&cases, |(dtype, slots, tokens, inner, width, piece, as_wide_as)| {
            assert!(expand_norm::adds(gpu.capabilities(), held::max_rank(slots)));
            let mut rng = Rng::new(97);
            let before = rng.floats(tokens * width);
            let p = prepare(&gpu, &mut rng, (*dtype, slots), *tokens, (*inner, &[*width]), *piece, &before);
            let weight = rng.floats(*width);
            let x = Output::of(&gpu, &before, UNWRITTEN_F32);
            let (weight_view, out) = (upload(&gpu, &weight), Output::new(&gpu, tokens * width, UNWRITTEN_F32));
            run(&gpu, |rec, pass| {
                let u = rec.scratch("u", (tokens * (4 + p.max_rank().next_multiple_of(8)) * 4) as u64)?;
                poison(&gpu, &u);
                let gemm = p.gemm(&gpu, &x.view, *as_wide_as, true);
                let adapters = &gemm.record_shrink(rec, pass, &p.shrink(), u)?;
                let (rows, width, x, weight, out) = (*tokens, *width, &x.view, &weight_view, &out.view);
                ExpandNorm { rows, width, eps: EPS, x, weight, adapters, out }.record(rec, pass)
            });
            close("x", &x.read(&gpu), &p.expected)?;
            let mut expected = vec![0.0; tokens * width];
            reference::rms_norm(&p.expected, &weight, EPS, &mut expected);
            close("out", &out.read(&gpu), &expected)?;
            p.check_status(&gpu)
        });
    }
}

#[test]
fn rope_adds_what_a_product_left_to_it() {
    let mut cases = Vec::new();
    for slots in [MIXED, RANKS, HIGH] {
        for (tokens, heads, kv_heads, head_dim) in [(1, 4, 2, 16), (2, 1, 1, 8), (5, 4, 1, 32), (7, 6, 2, 24)] {
            for piece in [None, Some(21)] {
                cases.push((slots, tokens, heads, kv_heads, head_dim, piece));
            }
        }
    }
    let inner = 72;
    for gpu in device::every_along_depth() {
        let fit = |head_dim: usize| rope::adds(gpu.capabilities(), head_dim);
        let cases: Vec<_> = cases.iter().filter(|(.., head_dim, _)| fit(*head_dim)).collect();
        assert!(!cases.is_empty());
        each_case(&cases, |(slots, tokens, heads, kv_heads, head_dim, piece)| {
            let (tokens, h, kv, d) = (*tokens, *heads, *kv_heads, *head_dim);
            let shape = AttentionShape { heads: h, kv_heads: kv, head_dim: d, block_size: 4, max_blocks: 3 };
            let (q_width, kv_width, row) = (h * d, kv * d, (h + 2 * kv) * d);
            let (mut rng, outs) = (Rng::new(98), [q_width, kv_width, kv_width]);
            let p = prepare(&gpu, &mut rng, (DType::Bf16, slots), tokens, (inner, &outs), *piece, &[]);
            let norms = rng.floats(2 * d);
            // Two sequences; the blocks of neither are in order.
            let blocks = [[4u32, 0, 2], [1, 5, 3]];
            let rows: Vec<[i32; 4]> = (0..tokens).map(|t| [0, (t / 2 + 3) as i32, (t % 2) as i32, -1]).collect();
            let part = |begin: usize, n: usize| -> Vec<f32> {
                p.expected.chunks(row).flat_map(|row| row[begin..begin + n].to_vec()).collect()
            };
            let (mut q, mut k, v) = (part(0, q_width), part(q_width, kv_width), part(q_width + kv_width, kv_width));
            let positions: Vec<u32> = rows.iter().map(|row| row[1] as u32).collect();
            let frequencies = reference::inverse_frequencies(THETA, d);
            reference::rope(&mut q, Some(&norms[..d]), EPS, &positions, h, d, &frequencies);
            reference::rope(&mut k, Some(&norms[d..]), EPS, &positions, kv, d, &frequencies);

            let cached = 6 * shape.block_size * kv_width;
            let [k_cache, v_cache] = [(); 2].map(|()| Output::new(&gpu, cached, UNWRITTEN_F32));
            let (norms, table) = (upload(&gpu, &norms), upload(&gpu, &rotary_table(12, d, THETA)));
            let (row_table, blocks_view) = (upload(&gpu, &rows), upload(&gpu, blocks.as_flattened()));
            let heads = run(&gpu, |rec, pass| {
                let heads = Heads::scratch(rec, tokens, &shape, p.max_rank())?;
                poison(&gpu, &heads.whole);
                let gemm = p.gemm(&gpu, &heads.qkv, 2048, false);
                let shrunk = gemm.record_shrink(rec, pass, &p.shrink(), heads.u.clone())?;
                Rope {
                    rows: tokens,
                    shape,
                    eps: EPS,
                    qkv: &heads.qkv,
                    parts: 1,
                    norms: &norms,
                    table: &table,
                    row_table: &row_table,
                    blocks: &blocks_view,
                    q: &heads.q,
                    k_cache: &k_cache.view,
                    v_cache: &v_cache.view,
                    adapters: Some((&heads, &shrunk)),
                }
                .record(rec, pass)?;
                Ok(heads)
            });
            close("qkv", &gpu_run::read::<f32>(&gpu, &heads.qkv, tokens * row), &p.base)?;
            close("q", &gpu_run::read::<f32>(&gpu, &heads.q, tokens * q_width), &q)?;
            for (what, cache, expected) in [("k", &k_cache, &k), ("v", &v_cache, &v)] {
                let all = cache.read(&gpu);
                let at = |row: &[i32; 4]| {
                    let (position, sequence) = (row[1] as usize, row[2] as usize);
                    blocks[sequence][position / 4] as usize * 4 + position % 4
                };
                let got: Vec<f32> =
                    rows.iter().flat_map(|row| all[at(row) * kv_width..][..kv_width].to_vec()).collect();
                close(what, &got, expected)?;
                let written = all.iter().filter(|v| v.to_bits() != UNWRITTEN_F32.to_bits()).count();
                assert_eq!(written, tokens * kv_width, "{what}: other places of the cache were written");
            }
            p.check_status(&gpu)
        });
    }
}
