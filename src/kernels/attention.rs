//! Causal grouped-query attention over the paged cache.

use crate::error::Result;
use crate::kernels::attention_matrix::AttentionMatrix;
use crate::kernels::attention_split::AttentionSplit;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::rope::AttentionShape;
use crate::kernels::{Grid, Recording, View};
use crate::plan::attention::AttentionWork;
use crate::plan::capabilities::Capabilities;

/// The shader.
pub static ATTENTION: Kernel = Kernel { stem: "attention", reads: 5, writes: 1 };

params! {
    /// Sizes of the heads and of the cache.
    AttentionParams {
        /// T.
        rows: u32,
        /// Query heads.
        heads: u32,
        /// Key and value heads.
        kv_heads: u32,
        /// head_dim / 4.
        quads: u32,
        /// Positions of a cache block.
        block_size: u32,
        /// Blocks a sequence may have.
        max_blocks: u32,
        /// 1 / sqrt(head_dim).
        scale: f32,
        /// Padding.
        pad0: u32,
    }
}

/// Semantics: `out[t,h] = softmax(q[t,h] · K / sqrt(head_dim)) · V` over positions 0 to the row's own.
pub struct Attention<'a> {
    /// T.
    pub rows: usize,
    /// Heads and cache.
    pub shape: AttentionShape,
    /// f32 `[T, heads, head_dim]`.
    pub q: &'a View,
    /// f32 `[blocks, block_size, kv_heads, head_dim]`.
    pub k_cache: &'a View,
    /// As `k_cache`.
    pub v_cache: &'a View,
    /// i32 `[T, 4]`: token, position, sequence, slot.
    pub row_table: &'a View,
    /// u32 `[sequences, max_blocks]`.
    pub blocks: &'a View,
    /// How the rows are shared out.
    pub work: &'a AttentionWork,
    /// Its table on the device.
    pub items: &'a View,
    /// f32 `[T, heads, head_dim]`, written.
    pub out: &'a View,
}

/// The variables on one device for heads of `head_dim`.
pub fn vars(caps: &Capabilities, head_dim: usize) -> Vars {
    let slices = if caps.one_subgroup { (head_dim / 4).div_ceil(caps.row_lanes as usize) } else { 0 };
    vec![
        ("slices", (slices as u32).into()),
        ("lanes", caps.row_lanes.into()),
        ("one_subgroup", caps.one_subgroup.into()),
    ]
}

impl Attention<'_> {
    /// Records the stage: tiles and single rows as they were shared out, or each row on its own where nothing is split.
    ///
    /// # Errors
    /// When the device refuses a shader or has no room for scratch.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        if rec.gpu().capabilities().split_attention {
            AttentionMatrix(self).record(rec, pass)?;
            return AttentionSplit(self).record(rec, pass);
        }
        let s = &self.shape;
        let vars = vars(rec.gpu().capabilities(), s.head_dim);
        let pipeline = pipeline(rec.gpu(), &ATTENTION, vars)?;
        let params = AttentionParams {
            rows: self.rows as u32,
            heads: s.heads as u32,
            kv_heads: s.kv_heads as u32,
            quads: (s.head_dim / 4) as u32,
            block_size: s.block_size as u32,
            max_blocks: s.max_blocks as u32,
            scale: 1.0 / (s.head_dim as f32).sqrt(),
            pad0: 0,
        };
        let buffers = [self.q, self.k_cache, self.v_cache, self.row_table, self.blocks, self.out];
        rec.dispatch(
            pass,
            &pipeline,
            bytemuck::bytes_of(&params),
            &buffers,
            &Grid::folded(s.heads as u32, self.rows as u32),
        );
        Ok(())
    }
}
