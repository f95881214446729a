//! Head norms, rotary position and the write to the paged cache.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::pair_shrink::Shrunk;
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::rows::SUBGROUPS;

/// The shader. For heads that lack what adapters add it has other buffers, and as many.
pub static ROPE: Kernel = Kernel { stem: "rope", reads: 5, writes: 3 };

params! {
    /// Sizes of the heads and of the cache.
    RopeParams {
        /// T.
        rows: u32,
        /// Query heads.
        heads: u32,
        /// Key and value heads.
        kv_heads: u32,
        /// Width of a head.
        head_dim: u32,
        /// Positions of a cache block.
        block_size: u32,
        /// Blocks a sequence may have.
        max_blocks: u32,
        /// Added to the mean square.
        eps: f32,
        /// Rank that u has room for.
        max_rank: u32,
        /// Word of u.
        u_base: u32,
        /// Word of q.
        q_base: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
    }
}

/// Sizes of attention and of its cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head: a multiple of 8, at most 256.
    pub head_dim: usize,
    /// Positions of a cache block.
    pub block_size: usize,
    /// Blocks a sequence may have.
    pub max_blocks: usize,
}

/// Semantics: with adapters `qkv += B · u` first, then `q = rope(norm(q))`, `k_cache[block(t)] = rope(norm(k))`, `v_cache[block(t)] = v`.
pub struct Rope<'a> {
    /// T.
    pub rows: usize,
    /// Heads and cache.
    pub shape: AttentionShape,
    /// Added to the mean square.
    pub eps: f64,
    /// f32 `[parts, T, (heads + 2 kv_heads) · head_dim]`.
    pub qkv: &'a View,
    /// Parts whose sum the heads are: one with adapters.
    pub parts: usize,
    /// f32 `[2, head_dim]`: query norm, key norm.
    pub norms: &'a View,
    /// f32 `[positions, head_dim / 2, 2]`: cos, sin.
    pub table: &'a View,
    /// i32 `[T, 4]`: token, position, sequence, slot.
    pub row_table: &'a View,
    /// u32 `[sequences, max_blocks]`.
    pub blocks: &'a View,
    /// f32 `[T, heads · head_dim]`, written.
    pub q: &'a View,
    /// f32 `[blocks, block_size, kv_heads, head_dim]`, written at the rows' positions.
    pub k_cache: &'a View,
    /// As `k_cache`.
    pub v_cache: &'a View,
    /// What the heads still lack: the adapters of q, k and v. Their u, `qkv` and `q` are then the parts of these heads.
    pub adapters: Option<(&'a Heads, &'a Shrunk)>,
}

/// One buffer with the projected heads, the first half of their adapters, and the turned queries: a stage that has no binding left
/// for each of them takes it whole.
#[derive(Debug, Clone)]
pub struct Heads {
    /// All of it.
    pub whole: View,
    /// f32 `[T, (heads + 2 kv_heads) · head_dim]`.
    pub qkv: View,
    /// u32 `[T, 3, 4 + max_rank]`.
    pub u: View,
    /// f32 `[T, heads · head_dim]`.
    pub q: View,
}

impl Heads {
    /// Bytes of the parts, each but the last rounded up so that the next may follow.
    fn sizes(rows: usize, shape: &AttentionShape, max_rank: usize) -> [u64; 3] {
        let row = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        let u = 3 * (4 + max_rank.next_multiple_of(8));
        let [qkv, u, q] = [row, u, shape.heads * shape.head_dim].map(|words| (rows * words * 4) as u64);
        [qkv.next_multiple_of(View::ALIGN), u.next_multiple_of(View::ALIGN), q]
    }

    /// Whether this stage can add the adapters of `rows` rows with `max_rank` ranks at most.
    pub fn fit(caps: &Capabilities, rows: usize, shape: &AttentionShape, max_rank: usize) -> bool {
        let bytes: u64 = Self::sizes(rows, shape, max_rank).iter().sum();
        adds(caps, shape.head_dim) && bytes <= caps.max_binding_bytes
    }

    /// A scratch buffer for `rows` rows.
    ///
    /// # Errors
    /// When the device has no room for it.
    pub fn scratch(rec: &mut Recording, rows: usize, shape: &AttentionShape, max_rank: usize) -> Result<Self> {
        let [qkv, u, q] = Self::sizes(rows, shape, max_rank);
        let whole = rec.scratch("heads", qkv + u + q)?;
        let q = whole.part(qkv + u, whole.size - qkv - u);
        Ok(Self { qkv: whole.part(0, qkv), u: whole.part(qkv, u), q, whole })
    }
}

/// Elements of each half of a head that registers hold at most.
const MOST_PAIRS: u32 = 8;

/// Elements of each half that a lane keeps; 0 where registers do not hold them.
fn pairs(caps: &Capabilities, head_dim: usize) -> u32 {
    let pairs = (head_dim / 2).div_ceil(caps.row_lanes as usize).next_power_of_two() as u32;
    if caps.along_depth && pairs <= MOST_PAIRS { pairs } else { 0 }
}

/// Whether the stage can add adapters to heads of `head_dim` columns: where lanes keep them.
pub fn adds(caps: &Capabilities, head_dim: usize) -> bool {
    pairs(caps, head_dim) > 0
}

/// Rows from which on a workgroup has several heads.
const MANY_ROWS: usize = 256;

/// Heads of a workgroup: one, or of many rows as many as it has subgroups.
pub fn heads_at_once(caps: &Capabilities, rows: usize) -> u32 {
    if caps.along_depth && rows >= MANY_ROWS { SUBGROUPS } else { 1 }
}

/// The variables on one device for heads of `head_dim` columns in so many parts, so many heads a workgroup, with `lora` for those that
/// lack adapters.
pub fn vars(caps: &Capabilities, head_dim: usize, heads_at_once: u32, parts: usize, lora: bool) -> Vars {
    vec![
        ("parts", (parts as u32).into()),
        ("heads_at_once", heads_at_once.into()),
        ("pairs", pairs(caps, head_dim).into()),
        ("lora", lora.into()),
        ("lanes", caps.row_lanes.into()),
        ("one_subgroup", caps.one_subgroup.into()),
    ]
}

/// The rotary table: f32 `[positions, head_dim / 2, 2]`, computed in f64 from `theta`.
pub fn rotary_table(positions: usize, head_dim: usize, theta: f64) -> Vec<f32> {
    let half = head_dim / 2;
    let mut table = Vec::with_capacity(positions * half * 2);
    for position in 0..positions {
        for i in 0..half {
            let angle = position as f64 * theta.powf(-2.0 * i as f64 / head_dim as f64);
            table.push(angle.cos() as f32);
            table.push(angle.sin() as f32);
        }
    }
    table
}

impl Rope<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let s = &self.shape;
        let heads_at_once = heads_at_once(rec.gpu().capabilities(), self.rows);
        let vars = vars(rec.gpu().capabilities(), s.head_dim, heads_at_once, self.parts, self.adapters.is_some());
        let pipeline = pipeline(rec.gpu(), &ROPE, vars)?;
        let word = |view: &View| (view.offset / 4) as u32;
        let params = RopeParams {
            rows: self.rows as u32,
            heads: s.heads as u32,
            kv_heads: s.kv_heads as u32,
            head_dim: s.head_dim as u32,
            block_size: s.block_size as u32,
            max_blocks: s.max_blocks as u32,
            eps: self.eps as f32,
            max_rank: self.adapters.map_or(0, |(_, shrunk)| shrunk.max_rank as u32),
            u_base: self.adapters.map_or(0, |(heads, _)| word(&heads.u)),
            q_base: self.adapters.map_or(0, |(heads, _)| word(&heads.q)),
            pad0: 0,
            pad1: 0,
        };
        let Self { norms, table, row_table, blocks, k_cache, v_cache, .. } = *self;
        let buffers = match self.adapters {
            None => [self.qkv, norms, table, row_table, blocks, self.q, k_cache, v_cache],
            Some((heads, shrunk)) => [norms, table, row_table, blocks, &shrunk.pool, &heads.whole, k_cache, v_cache],
        };
        let grid = Grid::folded(((s.heads + 2 * s.kv_heads) as u32).div_ceil(heads_at_once), self.rows as u32);
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(())
    }
}
