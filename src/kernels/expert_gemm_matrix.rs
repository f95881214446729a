//! The products of `expert_gemm` on cooperative matrices, for many rows.

use crate::activation::Activation;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::activation::constants;
use crate::kernels::expert_gemm_variant::{Flags, Sizes, variant};
use crate::kernels::fold_blocks::FoldBlocks;
use crate::kernels::linker::pipeline;
use crate::kernels::lora::Spans;
use crate::kernels::lora_matrix::Folded;
use crate::kernels::operands::{Rows, Weights};
use crate::kernels::pack::{Blocks, Packed};
use crate::kernels::params::params;
use crate::kernels::tile_rows::TileRows;
use crate::kernels::{Grid, Recording, View};
use crate::plan::matrix::{self, MatrixTile};

params! {
    /// Sizes of one product with one piece of the weights.
    ExpertGemmMatrixParams {
        /// P, or T when dense.
        rows: u32,
        /// Pairs that share a row of x.
        row_div: u32,
        /// Groups of eight in a row of W.
        groups: u32,
        /// Groups of eight of a row of x that are multiplied: as many, or twice as many; of a direct cut, blocks of 16, padded.
        x_groups: u32,
        /// Groups from a row of x to the next.
        x_stride: u32,
        /// Rows of W in this piece.
        out_rows: u32,
        /// First column of y.
        out_begin: u32,
        /// Row of y in elements.
        y_stride: u32,
        /// First matrix of this piece.
        first: u32,
        /// Matrices of this piece.
        count: u32,
        /// 1: add to y.
        accumulate: u32,
        /// Word of `expert_ids`.
        expert_base: u32,
        /// Word of `sorted_token_ids`.
        sorted_base: u32,
        /// Where the exponents begin in x, in words of eight bytes.
        exponents: u32,
        /// Power of two that a weight is multiplied by.
        w_scale: f32,
        /// Its inverse.
        w_unscale: f32,
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
        /// From a column of a projection to the next in y.
        step: u32,
        /// Blocks of u that a projection has room for.
        room: u32,
        /// Steps of a part of the depth.
        part_steps: u32,
        /// Entries of a tile among the factors that `fold_blocks` leaves.
        table_stride: u32,
        /// Groups of eight in a row of h.
        h_groups: u32,
        /// Blocks in a row of h.
        h_blocks: u32,
        /// Power of two that norms of rows of gate and up are below, adapters included.
        reach: i32,
        /// Power of two of what the clamped swiglu lets pass.
        h_cap: i32,
        /// Slope of the clamped swiglu.
        alpha: f32,
        /// Clamp of the clamped swiglu.
        limit: f32,
        /// What y is multiplied by where it is f16.
        y_scale: f32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
        /// First column in y of each projection.
        span_begin: [u32; 4],
        /// Columns of each projection.
        span_rows: [u32; 4],
    }
}

/// Semantics: `y[p] (+)= W[id(p)] · x[p / row_div]` with f16 operands and f32 sums. In tiles, y lies in their order and keeps
/// the powers of two of both operands; rows of negative ids are left alone, those of padding hold anything.
pub struct ExpertGemmMatrix<'a> {
    /// P, or T when dense.
    pub rows: usize,
    /// Pairs that share a row of x.
    pub row_div: usize,
    /// Which rows meet which matrix: dense, or tiles of a height that a [cut](crate::plan::matrix::Cuts) has.
    pub select: Rows<'a>,
    /// `[rows / row_div, in]`. What rounding took is multiplied, too, when dense; in tiles it is passed over. Its blocks, if it has any, lie in the order of [`select`](Self::select).
    pub x: &'a Packed,
    /// The matrices, with an exponent.
    pub weights: &'a Weights,
    /// f32 `[rows, y_stride]`, written or added to; in tiles `[C, y_stride]`, written.
    pub y: &'a View,
    /// Row of y in elements; in tiles a multiple of 16.
    pub y_stride: usize,
    /// Add to y; only when dense.
    pub accumulate: bool,
    /// Parts of the depth, whose sums lie behind each other: f32 `[parts, rows, y_stride]`. Several only when dense, and without adding
    /// to y.
    pub parts: usize,
    /// Adapters; only for weights whose exponent is 0.
    pub adapters: Option<&'a Folded<'a>>,
    /// What becomes of the sums.
    pub leaves: Leaves<'a>,
}

/// What a product makes of its sums. All but the first need tiles of a direct cut.
#[derive(Clone, Copy)]
pub enum Leaves<'a> {
    /// y, as they are.
    Sums,
    /// y as f16, times 2 to this power, which keeps them in its range ([`halves_exponent`](crate::plan::matrix::halves_exponent)).
    Halves(i32),
    /// The activation of gate and up, and y is not written: with a cut that [gates](MatrixTile::gates) and matrices that are whole.
    Activation(Gated<'a>),
}

/// The activation as a part of the product of gate and up: h as [`ActivatePack`](crate::kernels::activation::ActivatePack) leaves it, but
/// for its powers of two, which follow from a bound on gate and up.
#[derive(Clone, Copy)]
pub struct Gated<'a> {
    /// Which function: one with a gate.
    pub kind: Activation,
    /// Norms of rows of gate and up are below 2 to this power, adapters included
    /// ([`reach_exponent`](crate::plan::matrix::reach_exponent)).
    pub reach: i32,
    /// `[P, F]`, with blocks of the same cut, written.
    pub h: &'a Packed,
}

impl Gated<'_> {
    /// The power of two of the largest value that a clamped function makes of gate alone or of up.
    fn cap(&self) -> i32 {
        // x sigmoid(a x) is not below -0.28 / a.
        let (alpha, limit) = constants(self.kind);
        if alpha < 0.0 {
            // It has no bound.
            return i32::MAX;
        }
        (limit.max(0.3 / alpha) * 1.01).log2().ceil() as i32
    }
}

impl ExpertGemmMatrix<'_> {
    /// Records the stage: one dispatch for each piece of the weights.
    ///
    /// # Errors
    /// When the device refuses the shader; for weights or tiles that are none of this tier.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let w = self.weights;
        let twice = self.x.twice && matches!(self.select, Rows::Dense);
        let depth = if twice { 2 * self.x.width } else { self.x.width };
        let tile = match self.select {
            Rows::Tiles(aligned) => MatrixTile::of(rec.gpu().capabilities(), aligned.tile).filter(|_| !self.accumulate),
            Rows::Dense if twice || self.parts > 1 => {
                let cut = matrix::parted(rec.gpu().capabilities(), self.rows, w.out_dim);
                cut.filter(|_| self.parts == 1 || !self.accumulate)
            }
            Rows::Dense => {
                let staged = self.x.blocks.is_none();
                matrix::dense(rec.gpu().capabilities(), self.rows, w.out_dim, staged)
            }
            Rows::Pairs(_) => None,
        };
        let (Some(tile), Some(exponent)) = (tile, w.magnitude.exponent()) else {
            return Err(Error::new(ErrorKind::Unsupported, "matrix product: no tile or no exponent for these weights"));
        };
        if !tile.direct && !self.x.by_row {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "matrix product: this tile reads rows, and x is packed as blocks alone",
            ));
        }
        let caps = rec.gpu().capabilities().clone();
        let ragged = !depth.is_multiple_of((tile.ahead * tile.depth) as usize);
        let spans = self.adapters.map(|a| a.site.spans(tile.columns));
        // Where tiles begin: with each piece, and then every so many columns.
        let within = |column: &u32| {
            let of = w.pieces.iter().rfind(|(piece, _)| piece.row_begin <= *column as usize);
            of.is_some_and(|(piece, _)| (*column - piece.row_begin as u32).is_multiple_of(tile.columns))
        };
        let direct_tiles = tile.direct && matches!(self.select, Rows::Tiles(_));
        let gated = match &self.leaves {
            Leaves::Sums => None,
            Leaves::Halves(_) if direct_tiles && self.y_stride.is_multiple_of(8) => None,
            Leaves::Activation(Gated { kind, h, .. })
                if direct_tiles && kind.gated() && tile.gates() && w.whole() && h.blocks.is_some() =>
            {
                h.blocks.as_ref().map(|blocks| (*kind, *h, blocks))
            }
            _ => {
                let message = "matrix product: neither f16 nor an activation in this cut, or in parts of the matrices";
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
        };
        let flags = Flags {
            gated: gated.map(|(kind, h, _)| (kind, h.by_row)),
            halves: matches!(self.leaves, Leaves::Halves(_)),
            scaled: exponent != 0,
            ragged,
            twice,
            lora: self.adapters.is_some(),
            parted: twice || self.parts > 1,
            across: gated.is_none() && spans.as_ref().is_some_and(|s| s.step > 1 || !s.out_begin.iter().all(within)),
        };
        let rows = self.select.name();
        let blocks = match (self.select, &self.x.blocks) {
            _ if !tile.direct => None,
            (Rows::Tiles(aligned), None) => {
                let (rows, row_div, cut, x) = (self.rows, self.row_div, tile, self.x);
                Some(TileRows { rows, row_div, aligned, cut, x }.record(rec, pass)?)
            }
            (_, blocks) => blocks.clone(),
        };
        let folded = match self.adapters {
            Some(folded) if tile.direct => {
                let (rows, select, cut) = (self.rows, self.select, tile);
                Some(FoldBlocks { rows, select, cut, folded }.record(rec, pass)?)
            }
            _ => None,
        };
        debug_assert!(blocks.as_ref().is_none_or(|b| b.per_row == tile.blocks(self.x.width)), "blocks of another cut");
        let (x, x_groups, exponents) = match &blocks {
            Some(Blocks { view, per_row, exponents }) => (view, *per_row, *exponents),
            None => (&self.x.view, depth / 8, self.x.exponents()),
        };
        let (ids, expert_base, sorted_base) = self.select.ids(&self.x.view);
        for (piece, view) in &w.pieces {
            let sizes = Sizes {
                groups: (w.in_dim / 8) as u32,
                x_groups: x_groups as u32,
                // Rows in blocks are as long as they are multiplied.
                x_stride: if tile.direct { 0 } else { (self.x.stride() / 8) as u32 },
                out_rows: piece.rows as u32,
                y_stride: self.y_stride as u32,
            };
            let (kernel, vars) = variant(&caps, w.dtype, rows, tile, flags, &sizes);
            let pipeline = pipeline(rec.gpu(), kernel, vars)?;
            let mut params = ExpertGemmMatrixParams {
                rows: self.rows as u32,
                row_div: self.row_div as u32,
                groups: sizes.groups,
                x_groups: sizes.x_groups,
                x_stride: sizes.x_stride,
                out_rows: sizes.out_rows,
                out_begin: piece.row_begin as u32,
                y_stride: sizes.y_stride,
                first: piece.first as u32,
                count: piece.count as u32,
                accumulate: u32::from(self.accumulate),
                expert_base,
                sorted_base,
                exponents,
                w_scale: 2f32.powi(exponent),
                w_unscale: 2f32.powi(-exponent),
                part_steps: (x_groups as u32 * 8)
                    .div_ceil(tile.depth)
                    .div_ceil(self.parts as u32)
                    .next_multiple_of(tile.ahead),
                ..bytemuck::Zeroable::zeroed()
            };
            if let Leaves::Halves(exponent) = self.leaves {
                params.y_scale = 2f32.powi(exponent);
            }
            if let (Leaves::Activation(gated), Some((_, h, blocks))) = (&self.leaves, gated) {
                (params.h_groups, params.h_blocks) = ((h.width / 8) as u32, blocks.per_row as u32);
                (params.reach, params.h_cap) = (gated.reach, gated.cap());
                (params.alpha, params.limit) = constants(gated.kind);
            }
            if let Some((a, Spans { out_begin, out_rows, step, .. })) = self.adapters.zip(spans) {
                params.top_k = a.top_k as u32;
                params.slots = a.slots as u32;
                params.experts = a.experts as u32;
                params.index_base = a.site.index_base as u32;
                params.projections = a.site.out_dims.len() as u32;
                params.max_rank = a.max_rank as u32;
                if let Some(blocks) = &folded {
                    (params.room, params.table_stride) = (blocks.room as u32, blocks.table_stride as u32);
                }
                (params.step, params.span_begin, params.span_rows) = (step, out_begin, out_rows);
            }
            let columns = (piece.rows as u32).div_ceil(tile.columns);
            let grid = match self.select {
                Rows::Tiles(aligned) => aligned.grid(columns)?,
                _ => Grid::folded(columns * self.parts as u32, (self.rows as u32).div_ceil(tile.height)),
            };
            let mut buffers = vec![x, view, ids];
            if let Some(Folded { u, token_lora_mapping, site, factors, .. }) = self.adapters {
                match &folded {
                    Some(blocks) => buffers.extend([&blocks.view, factors.pool(site), &blocks.factors]),
                    None => buffers.extend([u, factors.pool(site), &factors.index, token_lora_mapping]),
                }
            }
            match gated {
                Some((_, h, blocks)) => buffers.extend([&blocks.view, &h.view]),
                None => buffers.push(self.y),
            }
            rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &grid);
        }
        Ok(())
    }
}
