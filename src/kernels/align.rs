//! Sorts pairs into buckets of whole tiles: a stable counting sort in two dispatches, or one for few pairs, without float or
//! ordering atomics. [`runs`](crate::kernels::runs) also sorts those of an expert by adapter.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::shape::align_capacity;

/// All at once.
pub static ALIGN_FEW: Kernel = Kernel { stem: "align_few", reads: 1, writes: 1 };
/// Counts chunk by chunk.
pub static ALIGN_COUNT: Kernel = Kernel { stem: "align_count", reads: 1, writes: 2 };
/// Places pairs.
pub static ALIGN_SCATTER: Kernel = Kernel { stem: "align_scatter", reads: 2, writes: 2 };

/// Consumers whose dispatch arguments one alignment can write.
pub const MAX_CONSUMERS: usize = 16;
/// Slots that an alignment can leave out where they do not occur.
const MOST_USED: usize = 512;
/// Words in front of `expert_ids`: 16 dispatch arguments of four words, the count, the real tiles, the runs, padding.
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
        /// Word of the ranks behind the counts.
        rank_base: u32,
        /// Dispatch arguments to write.
        consumers: u32,
        /// Word of the places in the output buffer.
        places_base: u32,
        /// 0, or ids are slot · stride + rest and buckets count the slots that occur.
        stride: u32,
        /// Pairs of a chunk.
        chunk_pairs: u32,
        /// Column tiles of each consumer.
        columns: [u32; MAX_CONSUMERS],
        /// A bit for each slot that occurs.
        slots: [u32; MOST_USED / 32],
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
    /// i32 `[P]`.
    pub ids: &'a View,
    /// Column tiles (x workgroups) of each kind of consumer.
    pub columns: &'a [u32],
}

/// Where an alignment lies: one buffer of i32 words that consumers bind whole.
#[derive(Debug, Clone)]
pub struct Aligned {
    /// Dispatch arguments, count, `expert_ids`, `sorted_token_ids`, places.
    pub view: View,
    /// B.
    pub tile: usize,
    /// Word of `expert_ids` i32 `[C / B]`.
    pub expert_base: u32,
    /// Word of `sorted_token_ids` i32 `[C]`.
    pub sorted_base: u32,
    /// Word of the places i32 `[P]`: where each pair stands in `sorted_token_ids`.
    pub places_base: u32,
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
        self.grid_at(self.columns.iter().position(|c| *c == columns), columns)
    }

    /// The same for a consumer whose arguments stand behind those of tiles, at the place of `columns` in `announced`.
    pub(super) fn grid_behind(&self, announced: &[u32], columns: u32) -> Result<Grid> {
        let at = announced.iter().position(|c| *c == columns);
        self.grid_at(at.map(|at| self.columns.len() + at), columns)
    }

    fn grid_at(&self, at: Option<usize>, columns: u32) -> Result<Grid> {
        let at = at.ok_or_else(|| {
            Error::new(ErrorKind::Limit, format!("alignment: no consumer with {columns} column tiles was announced"))
        })?;
        Ok(Grid::Indirect(self.view.buffer.clone(), self.view.offset + at as u64 * 16))
    }
}

/// Pairs of a chunk that are counted at once: small chunks cost less comparing, large ones less adding over chunks.
pub const CHUNKS: [u32; 3] = [64, 256, 512];

/// Chunks that are few: each workgroup of the second stage reads the counts of all.
const FEW_CHUNKS: usize = 64;

/// Counts that are few even of twice as many chunks.
const FEW_COUNTS: usize = 1 << 14;

/// Most counts, where there is room for so many: more than those of the largest steps with tens of adapters. Each workgroup of the
/// second stage reads all of them.
const MOST_COUNTS: usize = 1 << 22;

/// How pairs are cut into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunks {
    /// One of [`CHUNKS`].
    at_once: u32,
    /// Pairs of a chunk: so many once or, where many buckets make many counts, several times.
    pairs: usize,
    /// Chunks, at least one.
    n: usize,
}

impl Chunks {
    /// For buffers of at most `room` bytes: one with a word for each bucket of each chunk and each pair, and one with a word for each
    /// bucket of each chunk. Where that is too little for any, all pairs are one chunk.
    fn new(pairs: usize, buckets: usize, room: u64) -> Self {
        let [.., largest] = CHUNKS;
        let counts = (room / 4).saturating_sub(pairs as u64);
        let most = MOST_COUNTS.min(counts as usize) / (buckets + 1);
        let few = |chunks: usize| chunks <= FEW_CHUNKS || chunks <= 2 * FEW_CHUNKS && chunks * buckets <= FEW_COUNTS;
        let chunks = |at_once: u32| pairs.div_ceil(at_once as usize).max(1);
        let fits = |at_once: &u32| few(chunks(*at_once)) && chunks(*at_once) <= most;
        let at_once = CHUNKS.into_iter().find(fits).unwrap_or(largest);
        let times = chunks(at_once).div_ceil(most.max(1));
        let of_chunk = times * at_once as usize;
        Self { at_once, pairs: of_chunk, n: pairs.div_ceil(of_chunk).max(1) }
    }
}

/// Room for what a first stage counts: a word for each of `counts`, and for each of `pairs` its rank.
pub(super) fn counted(rec: &mut Recording, counts: usize, pairs: usize) -> Result<View> {
    rec.scratch("align counts", (counts + pairs) as u64 * 4)
}

/// Room for what a second stage makes of `counts`, so many `words` of each.
pub(super) fn places(rec: &mut Recording, counts: usize, words: usize) -> Result<View> {
    rec.scratch("align places", (words * counts) as u64 * 4)
}

/// Pairs that are aligned at once at most.
pub const FEW: usize = 256;

/// The variables of the alignment at once of up to `most` pairs, one of [`FEW_SIZES`].
pub fn few_vars(most: u32) -> Vars {
    vec![("lanes", most.min(256).into()), ("most", most.into())]
}

/// Sizes of the alignment at once.
pub const FEW_SIZES: [u32; 3] = [64, 128, FEW as u32];

/// Invocations of the second stage.
pub(super) const LANES: u32 = 256;

/// The variables of both stages that count `chunk` pairs at once.
pub fn vars(chunk: u32) -> Vars {
    vec![("chunk", chunk.into()), ("lanes", LANES.into())]
}

/// Column counts of consumers, each once.
pub(super) fn distinct(columns: &[u32]) -> Vec<u32> {
    let mut columns = columns.to_vec();
    columns.sort_unstable();
    columns.dedup();
    columns
}

/// Bits of the slots in `used`; `None` where there are none, or not for all: then every slot has to count.
pub(super) fn bits(used: &[usize]) -> Option<[u32; MOST_USED / 32]> {
    let mut slots = [0; MOST_USED / 32];
    for slot in used {
        *slots.get_mut(slot / 32)? |= 1 << (slot % 32);
    }
    Some(slots).filter(|_| !used.is_empty())
}

impl Align<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// More than [`MAX_CONSUMERS`] different column counts, or buffers above the device's limits.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<Aligned> {
        self.record_as(rec, pass, self.pairs <= FEW)
    }

    /// The same where ids are slot · `stride` + rest and no other slots occur than `used`, ascending: the work grows with these,
    /// not with all slots. What lies in the result is the same but for its capacity.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn record_used(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        used: &[usize],
        stride: usize,
    ) -> Result<Aligned> {
        let Some(slots) = bits(used) else { return self.record(rec, pass) };
        let dense = Align { buckets: used.len() * stride, ..*self };
        dense.record_with(rec, pass, self.pairs <= FEW, (stride as u32, slots))
    }

    /// The same in one dispatch, if there are at most [`FEW`] pairs, or in two.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn record_as(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, at_once: bool) -> Result<Aligned> {
        self.record_with(rec, pass, at_once, (0, [0; MOST_USED / 32]))
    }

    fn record_with(
        &self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        at_once: bool,
        (stride, slots): (u32, [u32; MOST_USED / 32]),
    ) -> Result<Aligned> {
        let chunks = Chunks::new(self.pairs, self.buckets, rec.gpu().capabilities().max_binding_bytes);
        let room = self.room(rec, &[], 0)?;
        let aligned = room.aligned;
        let counts = chunks.n * (self.buckets + 1);
        let params = AlignParams {
            pairs: self.pairs as u32,
            buckets: self.buckets as u32,
            tile: self.tile as u32,
            chunks: chunks.n as u32,
            capacity: aligned.capacity as u32,
            expert_base: aligned.expert_base,
            sorted_base: aligned.sorted_base,
            rank_base: counts as u32,
            consumers: aligned.columns.len() as u32,
            places_base: aligned.places_base,
            stride,
            chunk_pairs: chunks.pairs as u32,
            columns: room.columns,
            slots,
        };
        let bytes = bytemuck::bytes_of(&params);
        if at_once && self.pairs <= FEW {
            let most = FEW_SIZES.into_iter().find(|most| self.pairs <= *most as usize).unwrap_or(FEW as u32);
            let pipeline = pipeline(rec.gpu(), &ALIGN_FEW, few_vars(most))?;
            rec.dispatch(pass, &pipeline, bytes, &[self.ids, &aligned.view], &Grid::Direct([1, 1, 1]));
        } else {
            let (work, counts) = (places(rec, counts, 1)?, counted(rec, counts, self.pairs)?);
            let (vars, grid) = (vars(chunks.at_once), Grid::folded(1, params.chunks));
            let counting = pipeline(rec.gpu(), &ALIGN_COUNT, vars.clone())?;
            rec.dispatch(pass, &counting, bytes, &[self.ids, &aligned.view, &counts], &grid);
            let placing = pipeline(rec.gpu(), &ALIGN_SCATTER, vars)?;
            rec.dispatch(pass, &placing, bytes, &[self.ids, &counts, &aligned.view, &work], &grid);
        }
        Ok(aligned)
    }

    /// Room for the result with `run_words` more at its end. The arguments of `run_columns` stand behind those of tiles.
    pub(super) fn room(&self, rec: &mut Recording, run_columns: &[u32], run_words: usize) -> Result<Room> {
        let columns = distinct(self.columns);
        let all = [&columns, run_columns].concat();
        if all.len() > MAX_CONSUMERS {
            let message = format!("alignment: {} column counts, at most {MAX_CONSUMERS}", all.len());
            return Err(Error::new(ErrorKind::Limit, message));
        }
        let capacity = align_capacity(self.pairs, self.buckets, self.tile);
        let sorted_base = HEADER_WORDS + capacity / self.tile;
        let places_base = sorted_base + capacity;
        let run_base = places_base + self.pairs;
        let view = rec.scratch(self.label, (run_base + run_words) as u64 * 4)?;
        let mut announced = [0; MAX_CONSUMERS];
        announced[..all.len()].copy_from_slice(&all);
        let aligned = Aligned {
            view,
            tile: self.tile,
            expert_base: HEADER_WORDS as u32,
            sorted_base: sorted_base as u32,
            places_base: places_base as u32,
            capacity,
            columns,
        };
        Ok(Room { aligned, columns: announced, consumers: all.len() as u32, run_base: run_base as u32 })
    }
}

/// Room for an alignment.
pub(super) struct Room {
    /// Where its parts lie.
    pub aligned: Aligned,
    /// Column tiles of each consumer, of tiles and then of runs.
    pub columns: [u32; MAX_CONSUMERS],
    /// How many there are.
    pub consumers: u32,
    /// Word of the runs.
    pub run_base: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_longer_only_where_their_counts_would_be_too_many() {
        let wide = |pairs, buckets| {
            let Chunks { at_once, pairs, n } = Chunks::new(pairs, buckets, 2 << 30);
            (at_once as usize, pairs, n)
        };
        assert_eq!(wide(0, 128), (64, 64, 1));
        assert_eq!(wide(4096, 128), (64, 64, 64));
        assert_eq!(wide(8192, 127), (64, 64, 128));
        assert_eq!(wide(8192, 129), (256, 256, 32));
        // 16,384 tokens with eight experts each, of 128, and 64 adapters: many, but not too many.
        assert_eq!(wide(1 << 17, 128 * 65), (512, 512, 256));
        // Of 512 experts, with 1,024 adapters.
        assert_eq!(wide(1 << 17, 512 * 1025), (512, 37 * 512, 7));
        assert_eq!(wide(4096, 512 * 1025), (512, 2 * 512, 4));
        assert_eq!(wide(64, 1 << 23), (512, 512, 1));
    }

    #[test]
    fn the_work_of_all_chunks_fits_the_room_where_that_of_one_does() {
        for (pairs, buckets) in [(0_usize, 1), (1, 7), (300, 128), (8300, 8192), (1 << 17, 1152), (1 << 17, 512 * 1025)]
        {
            let bytes = |chunks: usize| 4 * (pairs + chunks * (buckets + 1)) as u64;
            for most in 1..70 {
                let chunks = Chunks::new(pairs, buckets, bytes(most));
                let Chunks { at_once, pairs: of_chunk, n } = chunks;
                assert!(bytes(n) <= bytes(most) && n > 0, "{pairs} {buckets} {most} {chunks:?}");
                assert!(n * of_chunk >= pairs && of_chunk % at_once as usize == 0, "{pairs} {chunks:?}");
                assert!((n - 1) * of_chunk <= pairs, "{pairs} {chunks:?}");
            }
            assert_eq!(Chunks::new(pairs, buckets, bytes(1) - 4).n, 1);
        }
    }
}
