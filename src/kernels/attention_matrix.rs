//! Attention of prompts on cooperative matrices: tiles of consecutive rows over keys and values packed as f16.

use crate::error::Result;
use crate::kernels::attention::Attention;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording};
use crate::plan::attention::{AttentionCut, WEIGHT_COLUMNS};
use crate::plan::capabilities::Capabilities;

/// The shader that packs keys and values.
pub static ATTENTION_PACK: Kernel = Kernel { stem: "attention_pack", reads: 4, writes: 1 };
/// The shader of the tiles.
pub static ATTENTION_MATRIX: Kernel = Kernel { stem: "attention_matrix", reads: 3, writes: 1 };

params! {
    /// Sizes of the cache and of what is packed.
    AttentionPackParams {
        /// Key and value heads.
        kv_heads: u32,
        /// Positions of a cache block.
        block_size: u32,
        /// Blocks a sequence may have.
        max_blocks: u32,
        /// Blocks to pack.
        count: u32,
    }
}

params! {
    /// Sizes of the heads and where the tiles are.
    AttentionMatrixParams {
        /// Query heads.
        heads: u32,
        /// Key and value heads.
        kv_heads: u32,
        /// Query heads of a key head.
        group: u32,
        /// First tile in the table.
        base: u32,
        /// Tiles.
        count: u32,
        /// log2(e) / sqrt(head_dim).
        scale: f32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
    }
}

/// Invocations of a workgroup that packs a block of one head.
const PACK_LANES: u32 = 128;
/// The largest exponents that rows and blocks are scaled by: for scores (queries, keys) and for values. What they keep
/// of very small numbers is enough, and no product of them leaves the range of f32.
const SHIFTS: [u32; 2] = [40, 80];

/// Semantics: those of [`Attention`] for the rows in tiles, with f16 operands and f32 sums.
pub(crate) struct AttentionMatrix<'a>(pub &'a Attention<'a>);

/// The variables of the packing shader for heads of `head_dim`.
pub fn pack_vars(cut: AttentionCut, head_dim: usize) -> Vars {
    vec![
        ("head_dim", (head_dim as u32).into()),
        ("positions", cut.positions.into()),
        ("lanes", PACK_LANES.into()),
        ("one_subgroup", false.into()),
        ("most_score_shift", SHIFTS[0].into()),
        ("most_value_shift", SHIFTS[1].into()),
    ]
}

/// The variables of the tiles' shader on one device for heads of `head_dim`.
pub fn vars(caps: &Capabilities, cut: AttentionCut, head_dim: usize) -> Vars {
    vec![
        ("edge", caps.edge.into()),
        ("head_dim", (head_dim as u32).into()),
        ("positions", cut.positions.into()),
        ("subgroups", cut.subgroups.into()),
        ("strip", cut.strip.into()),
        ("weight_columns", WEIGHT_COLUMNS.into()),
        ("width", caps.row_lanes.into()),
        ("most_score_shift", SHIFTS[0].into()),
    ]
}

/// The factor on q·k: scores are powers of two.
pub(crate) fn scale(head_dim: usize) -> f32 {
    std::f32::consts::LOG2_E / (head_dim as f32).sqrt()
}

impl AttentionMatrix<'_> {
    /// Records the stage: one dispatch that packs and one for all tiles, or nothing without tiles.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let (a, s, work) = (self.0, &self.0.shape, self.0.work);
        if work.tiles == 0 {
            return Ok(());
        }
        let bytes = work.packs * s.kv_heads * work.cut.block_bytes(s.head_dim);
        let packed = rec.scratch("packed keys and values", bytes as u64)?;
        let pack = pipeline(rec.gpu(), &ATTENTION_PACK, pack_vars(work.cut, s.head_dim))?;
        let params = AttentionPackParams {
            kv_heads: s.kv_heads as u32,
            block_size: s.block_size as u32,
            max_blocks: s.max_blocks as u32,
            count: work.packs as u32,
        };
        let grid = Grid::folded(s.kv_heads as u32, work.packs as u32);
        let buffers = [a.k_cache, a.v_cache, a.items, a.blocks, &packed];
        rec.dispatch(pass, &pack, bytemuck::bytes_of(&params), &buffers, &grid);

        let vars = vars(rec.gpu().capabilities(), work.cut, s.head_dim);
        let tiles = pipeline(rec.gpu(), &ATTENTION_MATRIX, vars)?;
        let params = AttentionMatrixParams {
            heads: s.heads as u32,
            kv_heads: s.kv_heads as u32,
            group: (s.heads / s.kv_heads) as u32,
            base: work.packs as u32,
            count: work.tiles as u32,
            scale: scale(s.head_dim),
            pad0: 0,
            pad1: 0,
        };
        let grid = Grid::folded(s.kv_heads as u32, work.tiles as u32);
        rec.dispatch(pass, &tiles, bytemuck::bytes_of(&params), &[a.q, &packed, a.items, a.out], &grid);
        Ok(())
    }
}
