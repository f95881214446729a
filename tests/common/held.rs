//! Adapters of mixed ranks and types as a pool holds them, beside what the oracle sees of them.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use wgmoe::dtype::DType;
use wgmoe::kernels::lora::LoraSite;
use wgmoe::reference;

use crate::common::Rng;

/// Rank, type and bias of each slot.
pub type Slots = &'static [(usize, DType, bool)];

/// Every type, ranks that are no multiple of eight, a bias, and a slot that holds nothing.
pub const MIXED: Slots =
    &[(8, DType::F16, false), (17, DType::Bf16, true), (0, DType::F32, false), (3, DType::F32, false)];

/// The largest rank, a bias counted.
pub fn max_rank(slots: Slots) -> usize {
    slots.iter().map(|(rank, _, biased)| rank + usize::from(*biased)).max().unwrap_or(0)
}

/// One (slot, expert, projection) as the oracle sees it.
pub struct Held {
    pub rank: usize,
    pub scale: f32,
    pub a: Vec<f32>,
    pub b: Vec<f32>,
    pub bias: Option<Vec<f32>>,
}

impl Held {
    /// As the oracle takes it.
    pub fn factors(&self) -> reference::Factors<'_> {
        let Self { rank, scale, a, b, bias } = self;
        reference::Factors { rank: *rank, scale: *scale, a, b, bias: bias.as_deref() }
    }
}

/// 16-byte words of a matrix with rows padded to eight columns.
pub fn place(pool: &mut Vec<u8>, dtype: DType, values: &[f32], cols: usize) -> (u32, Vec<f32>) {
    let at = pool.len() / 16;
    let mut decoded = Vec::new();
    for row in values.chunks(cols) {
        let bytes = dtype.encode(row);
        decoded.extend(dtype.decode(&bytes));
        pool.extend_from_slice(&bytes);
        pool.resize(pool.len() + (cols.next_multiple_of(8) - cols) * dtype.size(), 0);
    }
    (at as u32, decoded)
}

/// The entries of a site, and what the oracle looks up at (virtual expert · projections + projection). `absent` names the
/// (slot, expert, projection) that an adapter leaves out.
#[allow(clippy::too_many_arguments, reason = "the parts of a site")]
pub fn site(
    slots: Slots,
    experts: usize,
    outs: &[usize],
    inner: usize,
    absent: impl Fn(usize, usize, usize) -> bool,
    rng: &mut Rng,
    pool: &mut Vec<u8>,
    index: &mut Vec<[u32; 4]>,
) -> (LoraSite, Vec<Held>) {
    // Entries of another site, which would do damage if they were used.
    let index_base = index.len() + 3;
    index.resize(index_base, [7, 9, 5, f32::NAN.to_bits()]);
    let mut held = Vec::new();
    for (slot, (rank, dtype, biased)) in slots.iter().enumerate() {
        for expert in 0..experts {
            for (projection, out) in outs.iter().enumerate() {
                let rank = if absent(slot, expert, projection) { 0 } else { *rank };
                let biased = *biased && rank > 0;
                let (a, a_values) = place(pool, *dtype, &rng.floats(rank * inner), inner);
                let columns = rank + usize::from(biased);
                let (b, stored) = place(pool, *dtype, &rng.floats(out * columns), columns.max(1));
                let rows = || stored.chunks(columns.max(1));
                let b_values = rows().flat_map(|row| &row[..rank]).copied().collect();
                let bias = biased.then(|| rows().map(|row| row[rank]).collect());
                let scale = 0.25 + held.len() as f32 / 64.0;
                let kind = [DType::F32, DType::F16, DType::Bf16].iter().position(|d| d == dtype).unwrap() as u32;
                index.push([a, b, columns as u32 | kind << 16 | u32::from(biased) << 18, scale.to_bits()]);
                held.push(Held { rank, scale, a: a_values, b: b_values, bias });
            }
        }
    }
    (LoraSite { ordinal: 0, index_base, out_dims: outs.to_vec(), alternating: false, in_dim: inner }, held)
}
