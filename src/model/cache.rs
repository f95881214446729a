//! Keys and values of all sequences, in blocks, so that sequences of any length share the memory.

use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernels::View;
use crate::placement::HeadShare;

/// Positions of a block.
pub const BLOCK_SIZE: usize = 16;

/// The paged cache: f32 `[blocks, BLOCK_SIZE, kv_heads, head_dim]` for keys and for values of each layer, with the heads of
/// this rank.
#[derive(Debug)]
pub struct KvCache {
    /// (keys, values) of each layer.
    pub layers: Vec<(View, View)>,
}

impl KvCache {
    /// Blocks that `positions` positions need.
    pub fn blocks_for(positions: usize) -> usize {
        positions.div_ceil(BLOCK_SIZE)
    }

    /// Bytes of one block in one layer, keys or values alone.
    pub fn block_bytes(heads: &HeadShare) -> u64 {
        (BLOCK_SIZE * heads.kv_range().len() * 4) as u64
    }

    /// A cache of `blocks` blocks for each of `layers` layers.
    ///
    /// # Errors
    /// When the device has no room for it.
    pub fn new(gpu: &Gpu, heads: &HeadShare, layers: usize, blocks: usize) -> Result<Self> {
        let bytes = Self::block_bytes(heads) * blocks as u64;
        let layers = (0..layers)
            .map(|_| {
                let k = gpu.buffer("keys", bytes, wgpu::BufferUsages::empty())?;
                let v = gpu.buffer("values", bytes, wgpu::BufferUsages::empty())?;
                Ok((View::whole(&k), View::whole(&v)))
            })
            .collect::<Result<_>>()?;
        Ok(Self { layers })
    }
}
