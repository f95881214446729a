//! Where a checkpoint keeps one projection of one expert: in a tensor of its own or fused with all others, in either
//! orientation, gate and up one after the other or row by row.

use std::ops::Range;

use super::block::Block;
use super::window::Window;
use super::{Checkpoint, ExpertPart, TensorView};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::family::Role;
use crate::plan::read::StoredLayout;

impl Checkpoint {
    /// All of the tensor with `role`, which is a matrix.
    ///
    /// Errors: `Tensor` when it is missing.
    pub(crate) fn block(&self, role: Role) -> Result<Block<'_>> {
        let view = self.role(role)?;
        let rows = view.shape.first().copied().unwrap_or(1);
        let cols = view.shape.iter().skip(1).product();
        Block::of(view, Window::dense([rows, cols], 0))
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
        let layout = StoredLayout::of(self.config());
        let [out, inn] = self.expert_shape(part);
        let (view, fused) = self.expert_tensor(layer, expert, part)?;
        // Of the stored outputs, which are those of this projection.
        let (stored_out, first, every) = match (part, fused, layout.interleaved) {
            (ExpertPart::Gate, true, false) => (2 * out, 0, 1),
            (ExpertPart::Up, true, false) => (2 * out, out, 1),
            (ExpertPart::Gate, true, true) => (2 * out, 0, 2),
            (ExpertPart::Up, true, true) => (2 * out, 1, 2),
            _ => (out, 0, 1),
        };
        let begin = if fused { expert * stored_out * inn } else { 0 };
        let stored = if fused && layout.transposed {
            Window::dense([inn, stored_out], begin).transposed()
        } else {
            Window::dense([stored_out, inn], begin)
        };
        let whole = stored.rows(first, out, every);
        let window = match part {
            ExpertPart::Gate | ExpertPart::Up => whole.rows(width.start, width.len(), 1),
            ExpertPart::Down => whole.cols(width),
        };
        Block::of(view, window)
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
