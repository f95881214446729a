//! Head norms, rotary position and the write to the paged cache.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;

/// The shader.
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
        /// Padding.
        pad0: u32,
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

/// Semantics: `q = rope(norm(q))`, `k_cache[block(t)] = rope(norm(k))`, `v_cache[block(t)] = v`.
pub struct Rope<'a> {
    /// T.
    pub rows: usize,
    /// Heads and cache.
    pub shape: AttentionShape,
    /// Added to the mean square.
    pub eps: f64,
    /// f32 `[T, (heads + 2 kv_heads) · head_dim]`.
    pub qkv: &'a View,
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
}

/// Elements of each half of a head that registers hold at most.
const MOST_PAIRS: u32 = 8;

/// The variables on one device for heads of `head_dim` columns.
pub fn vars(caps: &Capabilities, head_dim: usize) -> Vars {
    let pairs = (head_dim / 2).div_ceil(caps.row_lanes as usize).next_power_of_two() as u32;
    let pairs = if caps.along_depth && pairs <= MOST_PAIRS { pairs } else { 0 };
    vec![("pairs", pairs.into()), ("lanes", caps.row_lanes.into()), ("one_subgroup", caps.one_subgroup.into())]
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
        let vars = vars(rec.gpu().capabilities(), s.head_dim);
        let pipeline = pipeline(rec.gpu(), &ROPE, vars)?;
        let params = RopeParams {
            rows: self.rows as u32,
            heads: s.heads as u32,
            kv_heads: s.kv_heads as u32,
            head_dim: s.head_dim as u32,
            block_size: s.block_size as u32,
            max_blocks: s.max_blocks as u32,
            eps: self.eps as f32,
            pad0: 0,
        };
        let buffers =
            [self.qkv, self.norms, self.table, self.row_table, self.blocks, self.q, self.k_cache, self.v_cache];
        let grid = Grid::folded((s.heads + 2 * s.kv_heads) as u32, self.rows as u32);
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(())
    }
}
