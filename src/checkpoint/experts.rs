//! Where a checkpoint keeps one projection of one expert: in a tensor of its own or fused with all others, in either
//! orientation, gate and up one after the other or row by row.

use std::ops::Range;

use super::block::{Block, Strides};
use super::{Checkpoint, ExpertPart, TensorView};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::family::Role;
use crate::plan::read::ExpertLayout;

impl Checkpoint {
    /// All of the tensor with `role`, which is a matrix.
    ///
    /// Errors: `Tensor` when it is missing.
    pub(crate) fn block(&self, role: Role) -> Result<Block<'_>> {
        let view = self.role(role)?;
        let rows = view.shape.first().copied().unwrap_or(1);
        let cols = view.shape.iter().skip(1).product();
        Block::of(view, [rows, cols], Strides { begin: 0, row: cols, col: 1 })
    }

    /// The columns `width` of the width of one expert: `[width, D]` of gate or up, `[D, width]` of down.
    ///
    /// Only its own elements count as read, once they are.
    ///
    /// Errors: `Tensor` when the model has no such layer, expert or columns.
    pub fn expert_block(
        &self,
        layer: usize,
        expert: usize,
        part: ExpertPart,
        width: Range<usize>,
    ) -> Result<Block<'_>> {
        let full = self.config().moe.expert_width;
        if width.start > width.end || width.end > full {
            let message = format!("expected columns of an expert within 0..{full}, got {width:?}");
            return Err(Error::new(ErrorKind::Tensor, message));
        }
        let layout = ExpertLayout::of(self.config());
        let [out, inn] = self.expert_shape(part);
        let (view, fused) = self.expert_tensor(layer, expert, part)?;
        // Of the stored matrix that holds this projection: its outputs, and where those of this projection begin.
        let (stored_out, first, step) = match (part, fused, layout.interleaved) {
            (ExpertPart::Gate, true, false) => (2 * out, 0, 1),
            (ExpertPart::Up, true, false) => (2 * out, out, 1),
            (ExpertPart::Gate, true, true) => (2 * out, 0, 2),
            (ExpertPart::Up, true, true) => (2 * out, 1, 2),
            _ => (out, 0, 1),
        };
        let (per_out, per_in) = if fused && layout.transposed { (1, stored_out) } else { (inn, 1) };
        let (rows, cols) = match part {
            ExpertPart::Gate | ExpertPart::Up => (width, 0..inn),
            ExpertPart::Down => (0..out, width),
        };
        let skipped = if fused { expert * stored_out * inn } else { 0 };
        let begin = skipped + (first + rows.start * step) * per_out + cols.start * per_in;
        Block::of(view, [rows.len(), cols.len()], Strides { begin, row: step * per_out, col: per_in })
    }

    /// The storage type of one projection of one expert, without reading it; errors as [`expert_block`](Self::expert_block).
    pub fn expert_dtype(&self, layer: usize, expert: usize, part: ExpertPart) -> Result<DType> {
        Ok(self.expert_tensor(layer, expert, part)?.0.dtype)
    }

    /// `[out, in]` of one projection of an expert.
    fn expert_shape(&self, part: ExpertPart) -> [usize; 2] {
        let (d, f) = (self.config.hidden, self.config.moe.expert_width);
        match part {
            ExpertPart::Gate | ExpertPart::Up => [f, d],
            ExpertPart::Down => [d, f],
        }
    }

    /// The tensor that holds one projection of one expert, and whether it holds that of all experts.
    fn expert_tensor(&self, layer: usize, expert: usize, part: ExpertPart) -> Result<(TensorView<'_>, bool)> {
        let single = part.role(layer, expert);
        if self.config.family.shape(single, &self.config).is_none() {
            let message = format!("`{}`: no expert {expert} in layer {layer}", self.dir.display());
            return Err(Error::new(ErrorKind::Tensor, message));
        }
        let fused = part.fused_role(layer);
        if self.has(fused) {
            return Ok((self.role(fused)?, true));
        }
        Ok((self.role(single)?, false))
    }
}
