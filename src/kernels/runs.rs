//! One sorting for a product and its adapters: pairs by expert and, within one, by adapter. The second half of what
//! [`align`] records is another one here.

use crate::error::Result;
use crate::kernels::align::{self, ALIGN_COUNT, Align, Aligned, Chunks};
use crate::kernels::linker::{Kernel, pipeline};
use crate::kernels::{Grid, Recording, View};
use crate::shape::align_capacity;

/// Counts chunk by chunk.
pub static RUNS_COUNT: Kernel = Kernel { stem: ALIGN_COUNT.stem, reads: 2, writes: 3 };
/// Places pairs and writes runs.
pub static RUNS_SCATTER: Kernel = Kernel { stem: "runs_scatter", reads: 3, writes: 2 };

/// Words of the second stage for each bucket of each chunk: the place of its first pair, where it begins and ends, and the runs before
/// it.
const WORDS: usize = 4;

/// Words of a run: virtual id slot · E_l + expert, its first place, the place behind its last, and one more.
const RUN_WORDS: usize = 4;

/// Semantics: pairs sorted by expert, then by adapter (as [`used`](Self::used) has them, pairs without one last), stable; each
/// expert padded to whole tiles, ids that are no expert last; and the runs: for each expert and adapter its pairs, cut every
/// [`run`](Self::run). What [`Remap`](crate::kernels::remap::Remap) says of slots and ids in a status, this says as well.
pub struct AlignRuns<'a> {
    /// P.
    pub pairs: usize,
    /// A.
    pub top_k: usize,
    /// E_l; 1 where pairs are whole tokens.
    pub experts: usize,
    /// B.
    pub tile: usize,
    /// Label of the output buffer.
    pub label: &'static str,
    /// i32 `[P]`, this rank's; `None` where pairs are whole tokens.
    pub ids: Option<&'a View>,
    /// i32 `[P / A]`: slot of each token, negative for none.
    pub token_lora_mapping: &'a View,
    /// L.
    pub slots: usize,
    /// Slots that occur in the mapping, ascending: no others may.
    pub used: &'a [usize],
    /// u32 `[1]`: bit 1 for a slot past L, bit 2 for an id past E_l.
    pub status: &'a View,
    /// Most pairs of a run.
    pub run: usize,
    /// Column tiles of each kind of consumer of tiles.
    pub columns: &'a [u32],
    /// Of runs.
    pub run_columns: &'a [u32],
}

/// Where the runs of an alignment lie.
#[derive(Debug, Clone)]
pub struct Runs {
    /// The pairs.
    pub aligned: Aligned,
    /// Most pairs of a run.
    pub most: usize,
    /// Word of the runs i32 `[R, 4]`, whose number [`COUNT_WORD`](Self::COUNT_WORD) has.
    pub base: u32,
    columns: Vec<u32>,
}

impl Runs {
    /// Word of the number of runs.
    pub const COUNT_WORD: usize = Aligned::COUNT_WORD + 2;

    /// The grid of a consumer of runs with `columns` column tiles.
    ///
    /// # Errors
    /// When no such consumer was announced to [`AlignRuns`].
    pub fn grid(&self, columns: u32) -> Result<Grid> {
        self.aligned.grid_behind(&self.columns, columns)
    }
}

impl AlignRuns<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// More than [`MAX_CONSUMERS`](align::MAX_CONSUMERS) column counts, or buffers above the device's limits.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<Runs> {
        let Self { pairs, tile, label, .. } = *self;
        let used = align::bits(self.used);
        let slots = if used.is_some() { self.used.len() } else { self.slots };
        let ids = self.ids.unwrap_or(self.token_lora_mapping);
        // Counts are of experts and adapters.
        let buckets = self.experts * (slots + 1);
        let chunks = Chunks::new(pairs, buckets, WORDS, rec.gpu().capabilities().max_binding_bytes);
        let (columns, run_columns) = (self.columns, align::distinct(self.run_columns));
        let run_words = align_capacity(pairs, slots * self.experts, self.run) / self.run * RUN_WORDS;
        let tiles = Align { pairs, buckets: self.experts, tile, label, ids, columns };
        let (aligned, mut params) = tiles.laid_out(rec, &chunks, &run_columns, run_words)?;

        // Before what follows, which is in 32 bits as far as a binding goes.
        let [counts, work] = chunks.scratch(rec, pairs, buckets, WORDS)?;
        params.buckets = buckets as u32;
        params.stride = slots as u32 + 1;
        params.experts = self.experts as u32;
        params.width = Chunks::width(buckets) as u32;
        params.rank_base = params.chunks * params.width;
        params.top_k = self.top_k as u32;
        params.all_slots = self.slots as u32;
        params.routed = u32::from(self.ids.is_some());
        params.run = self.run as u32;
        params.every_slot = u32::from(used.is_none());
        params.slots = used.unwrap_or(params.slots);
        let (bytes, grid) = (bytemuck::bytes_of(&params), Grid::folded(1, params.chunks));
        let counting = pipeline(rec.gpu(), &RUNS_COUNT, align::vars(chunks.at_once, true))?;
        let buffers = [ids, self.token_lora_mapping, &aligned.view, &counts, self.status];
        rec.dispatch(pass, &counting, bytes, &buffers, &grid);
        let placing = pipeline(rec.gpu(), &RUNS_SCATTER, align::vars(chunks.at_once, true))?;
        rec.dispatch(pass, &placing, bytes, &[ids, self.token_lora_mapping, &counts, &aligned.view, &work], &grid);
        Ok(Runs { aligned, most: self.run, base: params.run_base, columns: run_columns })
    }
}
