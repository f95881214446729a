//! RMS norm of rows for products on matrices: packed as it is made.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::norm::{self, Norm};
use crate::kernels::pack::{Packed, Reads};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::capabilities::Capabilities;
use crate::plan::matrix::DEPTH_PARTS;

/// The shader: where it writes rows alone, beside them blocks or f32, and all three.
pub static NORM_PACK: [Kernel; 3] = [of(3, 1), of(3, 2), of(3, 3)];
/// The same where parts are added to x, which is written.
pub static NORM_PACK_PARTS: [Kernel; 3] = [of(2, 2), of(2, 3), of(2, 4)];

const fn of(reads: usize, writes: usize) -> Kernel {
    Kernel { stem: "norm_pack", reads, writes }
}

params! {
    /// Sizes of one norm.
    NormPackParams {
        /// Rows written.
        rows: u32,
        /// D / 4.
        quads: u32,
        /// Added to the mean square.
        eps: f32,
        /// 1 / D.
        scale: f32,
        /// Blocks in a row.
        blocks: u32,
        /// Where the exponents begin behind them, in words of eight bytes.
        block_exponents: u32,
        /// 1: rows are gathered.
        gathered: u32,
        /// Padding.
        pad0: u32,
    }
}

/// Semantics: those of [`Norm`], and of [`Pack`](crate::kernels::pack::Pack) for what it writes.
pub struct NormPack<'a> {
    /// The norm; `out` is written only if it is `plain`.
    pub norm: Norm<'a>,
    /// Somebody reads f32, too.
    pub plain: bool,
    /// `[rows, D]`, written.
    pub packed: &'a Packed,
    /// f32 `[`[`DEPTH_PARTS`]`, rows, D]`, added to x first, which is written: for rows that a lane [`holds`], and that are not gathered.
    pub parts: Option<&'a View>,
}

/// Whether the lanes of a workgroup hold a row of `width` values, so that something can be added to it on the way.
pub fn holds(caps: &Capabilities, width: usize) -> bool {
    norm::loads(caps, width) > 0
}

/// The variant for rows of `width` columns: whether rows come twice, as rows, and as blocks; and in f32, too.
pub fn variant(
    caps: &Capabilities,
    width: usize,
    twice: bool,
    [by_row, blocks]: [bool; 2],
    [plain, parted]: [bool; 2],
) -> (&'static Kernel, Vars) {
    let mut all = norm::row_vars(caps, width);
    let of = [("twice", twice), ("by_row", by_row), ("blocks", blocks), ("plain", plain)];
    all.extend(of.map(|(name, on)| (name, on.into())));
    all.push(("parts", if parted { DEPTH_PARTS as u32 } else { 0 }.into()));
    let kernels = if parted { &NORM_PACK_PARTS } else { &NORM_PACK };
    (&kernels[usize::from(blocks) + usize::from(plain)], all)
}

impl NormPack<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let Norm { rows, width, eps, x, weight, gather, out } = self.norm;
        let Packed { view, twice, by_row, blocks, .. } = self.packed;
        let forms = [*by_row, blocks.is_some()];
        let (kernel, vars) =
            variant(rec.gpu().capabilities(), width, *twice, forms, [self.plain, self.parts.is_some()]);
        let pipeline = pipeline(rec.gpu(), kernel, vars)?;
        let [per_row, block_exponents] = blocks.as_ref().map_or([0; 2], |b| [b.per_row as u32, b.exponents]);
        let params = NormPackParams {
            rows: rows as u32,
            quads: (width / 4) as u32,
            eps: eps as f32,
            scale: 1.0 / width as f32,
            blocks: per_row,
            block_exponents,
            gathered: u32::from(gather.is_some()),
            pad0: 0,
        };
        let mut buffers = match self.parts {
            Some(parts) => vec![weight, parts, view],
            None => vec![x, weight, gather.unwrap_or(x), view],
        };
        buffers.extend(blocks.as_ref().map(|b| &b.view));
        buffers.extend(self.plain.then_some(out));
        buffers.extend(self.parts.map(|_| x));
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, rows as u32));
        Ok(())
    }
}

impl Norm<'_> {
    /// Records the norm as its readers take it, and returns what it packed for them. `out` is written where one reads f32. `parts` are
    /// those of [`NormPack`], for readers of packed rows alone.
    ///
    /// # Errors
    /// When the device refuses the shader or has no room for scratch.
    pub fn record_for(
        self,
        rec: &mut Recording,
        pass: &mut wgpu::ComputePass<'_>,
        reads: &Reads,
        parts: Option<&View>,
    ) -> Result<Option<Packed>> {
        let Some(form) = &reads.packed else {
            self.record(rec, pass)?;
            return Ok(None);
        };
        let labels = ["packed x", "packed x in blocks"];
        let packed = Packed::scratch_for(rec, labels, self.rows, self.width, form)?;
        NormPack { norm: self, plain: reads.plain, packed: &packed, parts }.record(rec, pass)?;
        Ok(Some(packed))
    }
}
