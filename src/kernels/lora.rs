//! Un-merged adapters: shrink to the rank, expand and add. Pairs of different adapters and ranks share one batch.

use crate::error::Result;
use crate::kernels::lanes::{self, carriers};
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::operands::Rows;
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;

/// x to u.
pub static LORA_SHRINK: Kernel = Kernel { stem: "lora_shrink", reads: 4, writes: 1 };
/// u to y.
pub static LORA_EXPAND: Kernel = Kernel { stem: "lora_expand", reads: 4, writes: 1 };

params! {
    /// Sizes of one shrink.
    LoraShrinkParams {
        /// P.
        rows: u32,
        /// Pairs that share a row of x.
        row_div: u32,
        /// Row of x in vec4.
        x_stride: u32,
        /// Groups of eight in a row of A.
        groups: u32,
        /// First entry of the site in the index.
        index_base: u32,
        /// Projections of the site.
        projections: u32,
        /// Rank that u has room for.
        max_rank: u32,
        /// V.
        buckets: u32,
        /// Word of `expert_ids`.
        expert_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
    }
}

params! {
    /// Sizes of one expand.
    LoraExpandParams {
        /// P.
        rows: u32,
        /// 1.
        row_div: u32,
        /// Row of u in vec4.
        x_stride: u32,
        /// First entry of the site in the index.
        index_base: u32,
        /// Projections of the site.
        projections: u32,
        /// Rank that u has room for.
        max_rank: u32,
        /// V.
        buckets: u32,
        /// Row of y in elements.
        y_stride: u32,
        /// Word of `expert_ids`.
        expert_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// From a column of a projection to the next in y.
        step: u32,
        /// Padding.
        pad0: u32,
        /// First column tile of each projection.
        tile_begin: [u32; 4],
        /// First column in y of each projection.
        out_begin: [u32; 4],
        /// Columns of each projection.
        out_rows: [u32; 4],
    }
}

/// Projections that share an input at most.
pub(crate) const MOST_PROJECTIONS: usize = 4;

/// One place in the network whose input several projections share, such as q, k and v, or gate and up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoraSite {
    /// Its number among the sites of its layer: which of [`Factors::pools`] has its factors.
    pub ordinal: usize,
    /// First entry in the layer's index: entry `index_base + v · projections + i` for virtual expert v.
    pub index_base: usize,
    /// Columns of each projection in y, at most four; without gaps one after the other, unless they alternate.
    pub out_dims: Vec<usize>,
    /// The projections, which have equally many columns, alternate column by column in y, as gate and up of the clamped swiglu.
    pub alternating: bool,
    /// Columns of x: a multiple of 8.
    pub in_dim: usize,
}

/// Where the columns of a site's projections lie, for an expand whose workgroups have some columns each.
#[derive(Clone, Copy)]
pub(crate) struct Spans {
    /// First column tile of each projection.
    pub tile_begin: [u32; 4],
    /// First column in y of each projection.
    pub out_begin: [u32; 4],
    /// Columns of each projection.
    pub out_rows: [u32; 4],
    /// From a column of a projection to the next, in columns of y.
    pub step: u32,
    /// Column tiles of all.
    pub tiles: u32,
}

impl LoraSite {
    /// The columns in tiles of `width`.
    pub(crate) fn spans(&self, width: u32) -> Spans {
        let step = if self.alternating { self.out_dims.len() as u32 } else { 1 };
        let mut spans = Spans { tile_begin: [0; 4], out_begin: [0; 4], out_rows: [0; 4], step, tiles: 0 };
        let mut columns = 0;
        for (i, n) in self.out_dims.iter().enumerate() {
            spans.tile_begin[i] = spans.tiles;
            spans.out_begin[i] = columns;
            spans.out_rows[i] = *n as u32;
            spans.tiles += (*n as u32).div_ceil(width);
            columns += if self.alternating { 1 } else { *n as u32 };
        }
        spans
    }
}

/// The factors of one layer. Each site has a binding of its own, so that the device's limit bounds a site, not a layer.
#[derive(Debug, Clone)]
pub struct Factors {
    /// 16-byte words of the factors of each site, by [`LoraSite::ordinal`].
    pub pools: Vec<View>,
    /// An entry for each (slot, expert, projection) of each site: `[a, b, rank | type << 16 | bias << 18 | n << 24, scale]`;
    /// a and b are words of the site's pool; with a bias the rank counts it, as the last column of B; A times 2^n lies in the
    /// range of f16.
    pub index: View,
    /// Ordinals of the sites for which no adapter here has a factor: nothing is recorded for them.
    pub empty: Vec<usize>,
}

impl Factors {
    /// Whether some adapter has a factor for `site`.
    pub fn any(&self, site: &LoraSite) -> bool {
        !self.empty.contains(&site.ordinal)
    }

    /// The words of the factors of `site`, which must be one of this layer.
    pub fn pool(&self, site: &LoraSite) -> &View {
        &self.pools[site.ordinal]
    }
}

/// Semantics: `y[p] += s · (B · (A · x[p / row_div]) + bias)` with the factors of virtual expert `id(p)`; nothing where rank is 0.
pub struct Lora<'a> {
    /// P.
    pub rows: usize,
    /// Pairs that share a row of x.
    pub row_div: usize,
    /// Virtual ids; never dense.
    pub select: Rows<'a>,
    /// V of the site: slots, times experts where there are any.
    pub buckets: usize,
    /// Largest rank among the adapters of this batch, a bias counted.
    pub max_rank: usize,
    /// The site.
    pub site: &'a LoraSite,
    /// The layer's factors.
    pub factors: &'a Factors,
    /// f32 `[rows / row_div, in]`.
    pub x: &'a View,
    /// f32 `[rows, y_stride]`, added to.
    pub y: &'a View,
    /// Row of y in elements.
    pub y_stride: usize,
}

/// Rows of A that a subgroup of the shrink takes when its lanes lie along the depth: one for single pairs, which are few.
fn shrink_rows(tile: usize) -> u32 {
    if tile == 1 { 1 } else { 4 }
}

/// The variables of one variant of the shrink, whose rows are long.
pub fn shrink_vars(caps: &Capabilities, rows: &'static str, tile: usize) -> Vars {
    let [lanes, depth_lanes] = lanes::lanes(caps, tile);
    vec![
        ("rows", rows.into()),
        ("tile", (tile as u32).into()),
        ("per_lane", if depth_lanes > 0 { shrink_rows(tile) } else { 1 }.into()),
        ("lanes", lanes.into()),
        ("depth_lanes", depth_lanes.into()),
        ("carriers", carriers(caps).into()),
    ]
}

/// The variables of one variant of the expand, whose rows are as short as the rank.
pub fn expand_vars(caps: &Capabilities, rows: &'static str, tile: usize) -> Vars {
    vec![
        ("rows", rows.into()),
        ("tile", (tile as u32).into()),
        ("lanes", caps.gemm_lanes.into()),
        ("carriers", carriers(caps).into()),
    ]
}

/// Column tiles of the shrink and of the expand, to announce to an alignment.
pub fn column_tiles(caps: &Capabilities, site: &LoraSite, max_rank: usize, tile: usize) -> [u32; 2] {
    let lanes = caps.gemm_lanes as usize;
    let [width, depth_lanes] = lanes::lanes(caps, tile);
    let block = width.checked_div(depth_lanes).map_or(lanes, |subgroups| (subgroups * shrink_rows(tile)) as usize);
    let shrink = site.out_dims.len() * max_rank.next_multiple_of(8).div_ceil(block);
    [shrink as u32, site.spans(caps.gemm_lanes).tiles]
}

impl Lora<'_> {
    /// Records both halves.
    ///
    /// # Errors
    /// When the device refuses a shader or has no room for the intermediate.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        if self.max_rank == 0 || self.rows == 0 || !self.factors.any(self.site) {
            return Ok(());
        }
        let caps = rec.gpu().capabilities().clone();
        let tile = self.tile();
        let shrink = pipeline(rec.gpu(), &LORA_SHRINK, shrink_vars(&caps, self.select.name(), tile))?;
        let projections = self.site.out_dims.len();
        let max_rank = self.max_rank.next_multiple_of(8);
        let u = rec.scratch("lora u", (self.rows * projections * max_rank * 4) as u64)?;
        let (ids, expert_base, sorted_base) = self.select.ids(self.x);
        let [columns, _] = column_tiles(&caps, self.site, max_rank, tile);
        let params = LoraShrinkParams {
            rows: self.rows as u32,
            row_div: self.row_div as u32,
            x_stride: (self.site.in_dim / 4) as u32,
            groups: (self.site.in_dim / 8) as u32,
            index_base: self.site.index_base as u32,
            projections: projections as u32,
            max_rank: max_rank as u32,
            buckets: self.buckets as u32,
            expert_base,
            sorted_base,
            pad0: 0,
            pad1: 0,
        };
        let factors = self.factors;
        let buffers = [self.x, factors.pool(self.site), &factors.index, ids, &u];
        rec.dispatch(pass, &shrink, bytemuck::bytes_of(&params), &buffers, &self.grid(columns)?);
        self.record_expand(rec, pass, &u)
    }

    /// Records the second half alone: `y[p] += B · u[p]`, and u carries the scale. `u` is f32 `[P, projections, max_rank]`
    /// with `max_rank` rounded up to 8, each factor's part filled up to its rank, likewise rounded up.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record_expand(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>, u: &View) -> Result<()> {
        let caps = rec.gpu().capabilities().clone();
        let tile = self.tile();
        let expand = pipeline(rec.gpu(), &LORA_EXPAND, expand_vars(&caps, self.select.name(), tile))?;
        let projections = self.site.out_dims.len();
        let max_rank = self.max_rank.next_multiple_of(8);
        let (ids, expert_base, sorted_base) = self.select.ids(self.x);
        let Spans { tile_begin, out_begin, out_rows, step, tiles } = self.site.spans(caps.gemm_lanes);
        let params = LoraExpandParams {
            rows: self.rows as u32,
            row_div: 1,
            x_stride: (projections * max_rank / 4) as u32,
            index_base: self.site.index_base as u32,
            projections: projections as u32,
            max_rank: max_rank as u32,
            buckets: self.buckets as u32,
            y_stride: self.y_stride as u32,
            expert_base,
            sorted_base,
            step,
            pad0: 0,
            tile_begin,
            out_begin,
            out_rows,
        };
        let buffers = [u, self.factors.pool(self.site), &self.factors.index, ids, self.y];
        rec.dispatch(pass, &expand, bytemuck::bytes_of(&params), &buffers, &self.grid(tiles)?);
        Ok(())
    }

    fn tile(&self) -> usize {
        if let Rows::Tiles(aligned) = self.select { aligned.tile } else { 1 }
    }

    fn grid(&self, columns: u32) -> Result<Grid> {
        match self.select {
            Rows::Tiles(aligned) => aligned.grid(columns),
            _ => Ok(Grid::folded(columns, self.rows as u32)),
        }
    }
}
