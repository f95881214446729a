//! One sorting for a product and its adapters: pairs by expert and, within one, by adapter. Tokens are sorted by adapter first, once for
//! all layers of a step; what a layer has left to do is to sort by expert and to leave equals in their order.

use crate::error::Result;
use crate::kernels::align::{self, Align, Aligned, CHUNKS, LANES, MAX_CONSUMERS};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::shape::align_capacity;

/// Counts chunk by chunk.
pub static RUNS_COUNT: Kernel = Kernel { stem: "runs_count", reads: 3, writes: 3 };
/// Places pairs and writes runs; a workgroup has a chunk, and room for what it knows of each expert.
pub static RUNS_SCATTER_HELD: Kernel = Kernel { stem: "runs_scatter", reads: 3, writes: 1 };
/// The same for any number of chunks and experts.
pub static RUNS_SCATTER: Kernel = Kernel { stem: "runs_scatter", reads: 3, writes: 2 };

/// Words that the second stage has for each expert of each chunk.
const WORDS: usize = 4;

/// Words of a run: virtual id slot · E_l + expert, its first place, the place behind its last, and one more.
const RUN_WORDS: usize = 4;

/// Chunks that are few: each workgroup of the second stage reads the counts of all.
const FEW_CHUNKS: usize = 128;

/// Tokens of a chunk, at least and at most.
const CHUNK_TOKENS: [usize; 2] = [8, 256];

/// Workgroups of the second stage at most, for the same reason.
const MOST_WORKGROUPS: usize = 256;

/// Experts, those of no expert counted, of which workgroup memory holds what the second stage knows of a chunk.
const HELD: usize = 512;

params! {
    /// Sizes of one sorting, and where the parts of its buffers lie.
    AlignRunsParams {
        /// P.
        pairs: u32,
        /// E_l.
        buckets: u32,
        /// B.
        tile: u32,
        /// Most chunks that there may be.
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
        /// Pairs of a chunk.
        chunk_pairs: u32,
        /// Its tokens.
        chunk_tokens: u32,
        /// Word of the slots of chunks.
        slot_base: u32,
        /// Word of their tokens.
        token_base: u32,
        /// A.
        top_k: u32,
        /// L.
        all_slots: u32,
        /// 1: pairs have ids, 0: all have expert 0.
        routed: u32,
        /// Most pairs of a run.
        run: u32,
        /// Word of the runs in the output buffer.
        run_base: u32,
        /// Consumers of tiles, which come first.
        tile_consumers: u32,
        /// Chunks that a workgroup of the second stage places.
        each: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
        /// Column tiles of each consumer.
        columns: [u32; MAX_CONSUMERS],
    }
}

/// The tokens of a batch sorted by the slots of their adapters, tokens without one last, stable, and cut into chunks that are of one
/// adapter each: the tiles of an alignment.
#[derive(Debug, Clone)]
pub struct TokenChunks {
    aligned: Aligned,
    token_lora_mapping: View,
    tokens: usize,
    slots: usize,
    counted: usize,
}

impl TokenChunks {
    /// Sorts `tokens` tokens by `token_lora_mapping`, i32 `[T]`: slot of each, outside 0..`slots` for none. `used` are the slots that occur
    /// in it, ascending: others count as none, unless `used` is empty or has more than fit.
    ///
    /// # Errors
    /// Those of the align stage.
    pub fn record(
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        label: &'static str,
        (tokens, token_lora_mapping): (usize, &View),
        (slots, used): (usize, &[usize]),
    ) -> Result<Self> {
        let [least, most] = CHUNK_TOKENS;
        let tile = tokens.div_ceil(FEW_CHUNKS).next_power_of_two().clamp(least, most);
        let align = Align { pairs: tokens, buckets: slots, tile, label, ids: token_lora_mapping, columns: &[] };
        let aligned = align.record_used(rec, pass, used, 1)?;
        let counted = if align::bits(used).is_some() { used.len() } else { slots };
        Ok(Self { aligned, token_lora_mapping: token_lora_mapping.clone(), tokens, slots, counted })
    }

    /// Most chunks that there may be.
    fn most(&self) -> usize {
        self.aligned.capacity / self.aligned.tile
    }
}

/// The second stage, with what it knows in workgroup memory or not, and its variables.
pub fn placing(held: bool) -> (&'static Kernel, Vars) {
    let (kernel, room) = if held { (&RUNS_SCATTER_HELD, HELD as u32) } else { (&RUNS_SCATTER, 0) };
    (kernel, vec![("lanes", LANES.into()), ("held", room.into())])
}

/// Semantics: pairs sorted by expert, then by adapter (as [`TokenChunks`] have them), stable; each expert padded to whole tiles, ids that
/// are no expert last; and the runs: for each expert and adapter its pairs, cut every [`run`](Self::run). What
/// [`Remap`](crate::kernels::remap::Remap) says of slots and ids in a status, this says as well.
pub struct AlignRuns<'a> {
    /// T tokens.
    pub chunks: &'a TokenChunks,
    /// A; pairs are T · A.
    pub top_k: usize,
    /// E_l; 1 where pairs are whole tokens.
    pub experts: usize,
    /// B.
    pub tile: usize,
    /// Label of the output buffer.
    pub label: &'static str,
    /// i32 `[P]`, this rank's; `None` where pairs are whole tokens.
    pub ids: Option<&'a View>,
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
    /// More than [`MAX_CONSUMERS`] column counts, or buffers above the device's limits.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<Runs> {
        let Self { chunks, top_k, experts, tile, label, .. } = *self;
        let pairs = chunks.tokens * top_k;
        let ids = self.ids.unwrap_or(&chunks.token_lora_mapping);
        let run_columns = align::distinct(self.run_columns);
        let run_words = align_capacity(pairs, chunks.counted * experts, self.run) / self.run * RUN_WORDS;
        let tiles = Align { pairs, buckets: experts, tile, label, ids, columns: self.columns };
        let room = tiles.room(rec, &run_columns, run_words)?;
        let aligned = room.aligned;

        let counts = chunks.most() * (experts + 1);
        let each = chunks.most().div_ceil(MOST_WORKGROUPS);
        let params = AlignRunsParams {
            pairs: pairs as u32,
            buckets: experts as u32,
            tile: tile as u32,
            chunks: chunks.most() as u32,
            capacity: aligned.capacity as u32,
            expert_base: aligned.expert_base,
            sorted_base: aligned.sorted_base,
            rank_base: counts as u32,
            consumers: room.consumers,
            places_base: aligned.places_base,
            chunk_pairs: (chunks.aligned.tile * top_k) as u32,
            chunk_tokens: chunks.aligned.tile as u32,
            slot_base: chunks.aligned.expert_base,
            token_base: chunks.aligned.sorted_base,
            top_k: top_k as u32,
            all_slots: chunks.slots as u32,
            routed: u32::from(self.ids.is_some()),
            run: self.run as u32,
            run_base: room.run_base,
            tile_consumers: room.consumers - run_columns.len() as u32,
            each: each as u32,
            columns: room.columns,
            ..bytemuck::Zeroable::zeroed()
        };
        let bytes = bytemuck::bytes_of(&params);
        let held = each <= 1 && experts < HELD;
        let work = if held { None } else { Some(align::places(rec, counts, WORDS)?) };
        let counts = align::counted(rec, counts, pairs)?;
        let [.., largest] = CHUNKS;
        let at_once = CHUNKS.into_iter().find(|chunk| params.chunk_pairs <= *chunk).unwrap_or(largest);
        let counting = pipeline(rec.gpu(), &RUNS_COUNT, align::vars(at_once))?;
        let (view, mapping) = (&chunks.aligned.view, &chunks.token_lora_mapping);
        let buffers = [ids, view, mapping, &aligned.view, &counts, self.status];
        rec.dispatch(pass, &counting, bytes, &buffers, &Grid::folded(1, params.chunks.max(1)));
        let (kernel, vars) = placing(held);
        let placing = pipeline(rec.gpu(), kernel, vars)?;
        let grid = Grid::folded(1, chunks.most().div_ceil(each.max(1)).max(1) as u32);
        let buffers: Vec<&View> = [ids, view, &counts, &aligned.view].into_iter().chain(&work).collect();
        rec.dispatch(pass, &placing, bytes, &buffers, &grid);
        Ok(Runs { aligned, most: self.run, base: room.run_base, columns: run_columns })
    }
}
