//! Attention of single rows, their context split over workgroups, and the join of the splits.

use crate::error::Result;
use crate::kernels::attention::Attention;
use crate::kernels::attention_matrix::scale;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording};
use crate::plan::attention::{SPLITS, split_heads};

/// The shader.
pub static ATTENTION_SPLIT: Kernel = Kernel { stem: "attention_split", reads: 5, writes: 1 };
/// The shader that joins the splits.
pub static ATTENTION_COMBINE: Kernel = Kernel { stem: "attention_combine", reads: 2, writes: 1 };

params! {
    /// Sizes of the heads, of the cache and of the splits.
    AttentionSplitParams {
        /// Query heads.
        heads: u32,
        /// Key and value heads.
        kv_heads: u32,
        /// Positions of a cache block.
        block_size: u32,
        /// Blocks a sequence may have.
        max_blocks: u32,
        /// First row in the table.
        base: u32,
        /// Rows.
        count: u32,
        /// Positions of a split.
        chunk: u32,
        /// Splits of a row.
        splits: u32,
        /// log2(e) / sqrt(head_dim).
        scale: f32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
    }
}

params! {
    /// Sizes of the splits.
    AttentionCombineParams {
        /// Query heads.
        heads: u32,
        /// First row in the table.
        base: u32,
        /// Rows.
        count: u32,
        /// Positions of a split.
        chunk: u32,
        /// Splits of a row.
        splits: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
    }
}

/// Invocations of a workgroup: one for each score of 16 positions and 8 heads.
const LANES: u32 = 128;
/// Invocations of a workgroup that joins: many splits are loaded at once.
const COMBINE_LANES: u32 = 256;

/// Semantics: those of [`Attention`] for the single rows, in f32.
pub(crate) struct AttentionSplit<'a>(pub &'a Attention<'a>);

/// The variables for heads of `head_dim`, `heads` of which a workgroup takes; `aligned`: a block of the cache holds a
/// multiple of 16 positions; `whole`: a row is not split.
pub fn vars(head_dim: usize, heads: usize, aligned: bool, whole: bool) -> Vars {
    let positions = if head_dim <= 128 { 16u32 } else { 8 };
    let heads = heads as u32;
    // Scores are summed two positions times two heads at a time, where heads are even, each by as many lanes as there are.
    let tiles = positions / 2 * if heads.is_multiple_of(2) { heads / 2 } else { heads };
    let fits = |n: &u32| tiles * n <= LANES && (head_dim as u32 / 4).is_multiple_of(*n);
    let slices = [16, 8, 4, 2].into_iter().find(fits).unwrap_or(1);
    vec![
        ("head_dim", (head_dim as u32).into()),
        ("heads", heads.into()),
        ("positions", positions.into()),
        ("lanes", LANES.into()),
        ("slices", slices.into()),
        ("aligned", aligned.into()),
        ("whole", whole.into()),
    ]
}

/// The variables of the join.
pub fn combine_vars(head_dim: usize) -> Vars {
    vec![("head_dim", (head_dim as u32).into()), ("splits", (SPLITS as u32).into()), ("lanes", COMBINE_LANES.into())]
}

impl AttentionSplit<'_> {
    /// Records the stage: one dispatch, a second one where rows are split, or nothing without single rows.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let (a, s, work) = (self.0, &self.0.shape, self.0.work);
        if work.singles == 0 {
            return Ok(());
        }
        let whole = work.splits == 1;
        let heads = split_heads(s);
        let split =
            pipeline(rec.gpu(), &ATTENTION_SPLIT, vars(s.head_dim, heads, s.block_size.is_multiple_of(16), whole))?;
        let base = (work.packs + work.tiles) as u32;
        let params = AttentionSplitParams {
            heads: s.heads as u32,
            kv_heads: s.kv_heads as u32,
            block_size: s.block_size as u32,
            max_blocks: s.max_blocks as u32,
            base,
            count: work.singles as u32,
            chunk: work.chunk as u32,
            splits: work.splits as u32,
            scale: scale(s.head_dim),
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let runs = if whole {
            a.out.clone()
        } else {
            let bytes = work.singles * s.heads * work.splits * (s.head_dim + 4) * 4;
            rec.scratch("attention runs", bytes as u64)?
        };
        let grid = Grid::folded((s.heads / heads * work.splits) as u32, work.singles as u32);
        let buffers = [a.q, a.k_cache, a.v_cache, a.items, a.blocks, &runs];
        rec.dispatch(pass, &split, bytemuck::bytes_of(&params), &buffers, &grid);
        if whole {
            return Ok(());
        }
        let combine = pipeline(rec.gpu(), &ATTENTION_COMBINE, combine_vars(s.head_dim))?;
        let params = AttentionCombineParams {
            heads: s.heads as u32,
            base,
            count: work.singles as u32,
            chunk: work.chunk as u32,
            splits: work.splits as u32,
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let grid = Grid::folded(s.heads as u32, work.singles as u32);
        let buffers = [&runs, a.items, a.out];
        rec.dispatch(pass, &combine, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(())
    }
}
