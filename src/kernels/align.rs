//! Sorts pairs into buckets of whole tiles: a stable counting sort in four dispatches, or one for few pairs, without float or
//! ordering atomics.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::shape::align_capacity;

/// All at once.
pub static ALIGN_FEW: Kernel = Kernel { stem: "align_few", reads: 1, writes: 2 };
/// Counts chunk by chunk.
pub static ALIGN_COUNT: Kernel = Kernel { stem: "align_count", reads: 1, writes: 2 };
/// Sums over chunks.
pub static ALIGN_TOTAL: Kernel = Kernel { stem: "align_total", reads: 1, writes: 2 };
/// Scans over buckets.
pub static ALIGN_SCAN: Kernel = Kernel { stem: "align_scan", reads: 1, writes: 2 };
/// Places pairs.
pub static ALIGN_SCATTER: Kernel = Kernel { stem: "align_scatter", reads: 1, writes: 2 };

/// Invocations of the scan.
pub const SCAN_LANES: u32 = 64;
/// Consumers whose dispatch arguments one alignment can write.
pub const MAX_CONSUMERS: usize = 16;
/// Words in front of `expert_ids`: 16 dispatch arguments of four words, the count, the real tiles, padding.
const HEADER_WORDS: usize = 128;

params! {
    /// Sizes of one alignment and where the parts of its buffers lie.
    AlignParams {
        /// P.
        pairs: u32,
        /// N.
        buckets: u32,
        /// B.
        tile: u32,
        /// Chunks of pairs that are counted on their own.
        chunks: u32,
        /// C.
        capacity: u32,
        /// Word of `expert_ids`.
        expert_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// Word of the ranks in the work buffer.
        rank_base: u32,
        /// Word of the totals in the work buffer.
        total_base: u32,
        /// Word of the bases in the work buffer.
        base_base: u32,
        /// Dispatch arguments to write.
        consumers: u32,
        /// Padding.
        pad0: u32,
        /// Column tiles of each consumer.
        columns: [u32; 16],
    }
}

/// Semantics: pairs sorted by id, stable, each of N buckets padded to whole tiles of B, ids that are no bucket last.
pub struct Align<'a> {
    /// P.
    pub pairs: usize,
    /// N.
    pub buckets: usize,
    /// B.
    pub tile: usize,
    /// Label of the output buffer, so that two alignments of one recording do not share it.
    pub label: &'static str,
    /// Label of the work buffer.
    pub work_label: &'static str,
    /// i32 `[P]`.
    pub ids: &'a View,
    /// Column tiles (x workgroups) of each kind of consumer.
    pub columns: &'a [u32],
}

/// Where an alignment lies: one buffer of i32 words that consumers bind whole.
#[derive(Debug, Clone)]
pub struct Aligned {
    /// Dispatch arguments, count, `expert_ids`, `sorted_token_ids`.
    pub view: View,
    /// B.
    pub tile: usize,
    /// Word of `expert_ids` i32 `[C / B]`.
    pub expert_base: u32,
    /// Word of `sorted_token_ids` i32 `[C]`.
    pub sorted_base: u32,
    /// C.
    pub capacity: usize,
    columns: Vec<u32>,
}

impl Aligned {
    /// Word of `num_tokens_post_padded`.
    pub const COUNT_WORD: usize = 64;

    /// The grid of a consumer with `columns` column tiles.
    ///
    /// # Errors
    /// When no such consumer was announced to [`Align`].
    pub fn grid(&self, columns: u32) -> Result<Grid> {
        let at = self.columns.iter().position(|c| *c == columns).ok_or_else(|| {
            Error::new(ErrorKind::Limit, format!("alignment: no consumer with {columns} column tiles was announced"))
        })?;
        Ok(Grid::Indirect(self.view.buffer.clone(), self.view.offset + at as u64 * 16))
    }
}

/// Pairs a chunk: small chunks cost less comparing, large ones less memory where there are many buckets and fewer steps in
/// the sums over chunks.
pub const CHUNKS: [u32; 2] = [64, 256];

fn chunk(pairs: usize, buckets: usize) -> u32 {
    let [small, large] = CHUNKS;
    let chunks = pairs.div_ceil(small as usize);
    if chunks <= 64 && chunks * (buckets + 1) <= 1 << 20 { small } else { large }
}

/// Pairs that are aligned at once at most.
pub const FEW: usize = 512;

/// The variables of the alignment at once of up to `most` pairs, one of [`FEW_SIZES`].
pub fn few_vars(most: u32) -> Vars {
    vec![("lanes", most.min(256).into()), ("most", most.into())]
}

/// Sizes of the alignment at once.
pub const FEW_SIZES: [u32; 3] = [64, 128, FEW as u32];

/// The variables of count and scatter.
pub fn by_chunk(chunk: u32) -> Vars {
    vec![("chunk", chunk.into())]
}

/// The variables of the scan.
pub fn scan_vars() -> Vars {
    vec![("lanes", SCAN_LANES.into())]
}

impl Align<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// More than [`MAX_CONSUMERS`] different column counts, or buffers above the device's limits.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<Aligned> {
        self.record_as(rec, pass, self.pairs <= FEW)
    }

    /// The same in one dispatch, for at most [`FEW`] pairs, or in four.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn record_as(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, at_once: bool) -> Result<Aligned> {
        let mut columns = self.columns.to_vec();
        columns.sort_unstable();
        columns.dedup();
        if columns.len() > MAX_CONSUMERS {
            return Err(Error::new(
                ErrorKind::Limit,
                format!("alignment: {} column counts, at most {MAX_CONSUMERS}", columns.len()),
            ));
        }
        let chunk = chunk(self.pairs, self.buckets);
        let chunks = self.pairs.div_ceil(chunk as usize).max(1);
        let capacity = align_capacity(self.pairs, self.buckets, self.tile);
        let sorted_base = HEADER_WORDS + capacity / self.tile;
        let rank_base = chunks * (self.buckets + 1);
        let total_base = rank_base + self.pairs;
        let base_base = total_base + self.buckets + 1;
        let view = rec.scratch(self.label, (sorted_base + capacity) as u64 * 4)?;
        let work = rec.scratch(self.work_label, (base_base + self.buckets + 1) as u64 * 4)?;
        let mut params = AlignParams {
            pairs: self.pairs as u32,
            buckets: self.buckets as u32,
            tile: self.tile as u32,
            chunks: chunks as u32,
            capacity: capacity as u32,
            expert_base: HEADER_WORDS as u32,
            sorted_base: sorted_base as u32,
            rank_base: rank_base as u32,
            total_base: total_base as u32,
            base_base: base_base as u32,
            consumers: columns.len() as u32,
            pad0: 0,
            columns: [0; 16],
        };
        params.columns[..columns.len()].copy_from_slice(&columns);
        let bytes = bytemuck::bytes_of(&params);
        let buffers = [self.ids, &view, &work];
        let stages: [(&'static Kernel, Vars, u32); 4] = [
            (&ALIGN_COUNT, by_chunk(chunk), chunks as u32),
            (&ALIGN_TOTAL, Vars::new(), (self.buckets + 1).div_ceil(64) as u32),
            (&ALIGN_SCAN, scan_vars(), 1),
            (&ALIGN_SCATTER, by_chunk(chunk), self.pairs.div_ceil(64) as u32),
        ];
        if at_once {
            let most = FEW_SIZES.into_iter().find(|most| self.pairs <= *most as usize).unwrap_or(FEW as u32);
            let pipeline = pipeline(rec.gpu(), &ALIGN_FEW, few_vars(most))?;
            rec.dispatch(pass, &pipeline, bytes, &buffers, &Grid::Direct([1, 1, 1]));
        }
        for (kernel, vars, groups) in stages.into_iter().filter(|_| !at_once) {
            let pipeline = pipeline(rec.gpu(), kernel, vars)?;
            if groups > 0 {
                rec.dispatch(pass, &pipeline, bytes, &buffers, &Grid::folded(1, groups));
            }
        }
        Ok(Aligned {
            view,
            tile: self.tile,
            expert_base: HEADER_WORDS as u32,
            sorted_base: sorted_base as u32,
            capacity,
            columns,
        })
    }
}
