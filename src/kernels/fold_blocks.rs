//! u of the adapters of many rows as blocks: what a product loads straight into matrices to add them.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::lora_matrix::Folded;
use crate::kernels::operands::Rows;
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::{EDGE, MatrixTile};

/// The shader.
pub static FOLD_BLOCKS: Kernel = Kernel { stem: "fold_blocks", reads: 4, writes: 2 };

params! {
    /// Sizes of one rearrangement.
    FoldBlocksParams {
        /// P, or T when dense.
        rows: u32,
        /// A.
        top_k: u32,
        /// L.
        slots: u32,
        /// E_l.
        experts: u32,
        /// First entry of the site in the index.
        index_base: u32,
        /// Projections of the site.
        projections: u32,
        /// Rank that u has room for.
        max_rank: u32,
        /// Blocks that a projection has room for.
        room: u32,
        /// Word of `expert_ids`.
        expert_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// Entries of a tile among the factors.
        table_stride: u32,
        /// Padding.
        pad0: u32,
    }
}

/// Semantics: for each slot that a tile of the cut has, in order, and each 16 ranks of it, `blocks[r / 16, projection, n]` holds u of
/// the rows with that slot and zeros for the others. `factors[tile]` has an entry for every 32 rows: how many
/// slots the tile has, and the first and the end of those that these rows have, by their number; and then, slot by slot, the factors of
/// each projection.
pub struct FoldBlocks<'a> {
    /// P, or T when dense.
    pub rows: usize,
    /// The order of the rows: tiles, or dense.
    pub select: Rows<'a>,
    /// The cut of the product.
    pub cut: MatrixTile,
    /// The adapters, with u by pair.
    pub folded: &'a Folded<'a>,
}

/// What it writes.
pub struct FoldedBlocks {
    /// f16 `[R / 16, projections, room, 16, 16]`.
    pub view: View,
    /// Blocks that a projection has room for.
    pub room: usize,
    /// Factors as in the index `[tiles, table_stride]`.
    pub factors: View,
    /// Entries of a tile.
    pub table_stride: usize,
}

/// The variables of one variant.
pub fn vars(caps: &Capabilities, rows: &'static str, cut: &MatrixTile) -> Vars {
    vec![("rows", rows.into()), ("height", cut.height.into()), ("width", caps.row_lanes.into())]
}

/// Groups of rows of a tile, each of which has an entry that says which slots it has.
pub(crate) fn groups(cut: &MatrixTile) -> usize {
    cut.height.div_ceil(GROUP) as usize
}

/// Rows of such a group: one a lane of a subgroup.
const GROUP: u32 = 32;

/// Blocks of a projection for tiles of a `cut` that meet up to `used` slots of `max_rank`.
pub fn room(cut: &MatrixTile, used: usize, max_rank: usize) -> usize {
    used.min(cut.height as usize) * max_rank.div_ceil(EDGE as usize)
}

/// Bytes of the blocks of `rows` rows.
pub fn bytes(rows: usize, projections: usize, room: usize) -> u64 {
    (rows.div_ceil(EDGE as usize) * projections * room) as u64 * u64::from(EDGE * EDGE * 2)
}

impl FoldBlocks<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader or a buffer of that size.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<FoldedBlocks> {
        let Folded { ref u, max_rank, token_lora_mapping, top_k, slots, used, experts, site, factors } = *self.folded;
        let projections = site.out_dims.len();
        let room = room(&self.cut, used, max_rank);
        let height = self.cut.height as usize;
        let (capacity, grid) = match self.select {
            Rows::Tiles(aligned) => (aligned.capacity, aligned.grid(1)?),
            _ => (self.rows.next_multiple_of(height), Grid::folded(1, self.rows.div_ceil(height) as u32)),
        };
        let view = rec.scratch("u in blocks", bytes(capacity, projections, room))?;
        let table_stride = groups(&self.cut) + used.min(height) * projections;
        let tile_factors = rec.scratch("factors of tiles", (capacity / height * table_stride * 16) as u64)?;
        let vars = vars(rec.gpu().capabilities(), self.select.name(), &self.cut);
        let pipeline = pipeline(rec.gpu(), &FOLD_BLOCKS, vars)?;
        let (ids, expert_base, sorted_base) = self.select.ids(u);
        let params = FoldBlocksParams {
            rows: self.rows as u32,
            top_k: top_k as u32,
            slots: slots as u32,
            experts: experts as u32,
            index_base: site.index_base as u32,
            projections: projections as u32,
            max_rank: max_rank as u32,
            room: room as u32,
            expert_base,
            sorted_base,
            table_stride: table_stride as u32,
            pad0: 0,
        };
        let buffers = [u, &factors.index, ids, token_lora_mapping, &view, &tile_factors];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        Ok(FoldedBlocks { view, room, factors: tile_factors, table_stride })
    }
}
