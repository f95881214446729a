//! Rows of f32 as f16, each times a power of two of its own: the left operand of the matrix tier.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Grid, Recording, View};
use crate::plan::matrix::{EDGE, MatrixTile};

/// The shader.
pub static PACK: Kernel = Kernel { stem: "pack", reads: 1, writes: 1 };
/// The same shader where it writes blocks, too.
pub static PACK_BLOCKS: Kernel = Kernel { stem: "pack", reads: 1, writes: 2 };

params! {
    /// Sizes of one packing.
    PackParams {
        /// Rows.
        rows: u32,
        /// K / 4.
        quads: u32,
        /// Blocks in a row.
        blocks: u32,
        /// Where the exponents begin behind them, in words of eight bytes.
        block_exponents: u32,
    }
}

/// Invocations of a workgroup, which packs a row.
const LANES: u32 = 128;

/// In which form a product reads rows that are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// What rounding took is multiplied, too.
    pub twice: bool,
    /// Somebody reads the rows themselves: else only their exponents.
    pub by_row: bool,
    /// The direct cut of a product that reads blocks.
    pub cut: Option<MatrixTile>,
}

impl Form {
    /// Rows alone, rounded to f16.
    pub const ROWS: Self = Self { twice: false, by_row: true, cut: None };
    /// Rows alone, with what rounding takes.
    pub const TWICE: Self = Self { twice: true, ..Self::ROWS };
}

/// In which forms the readers of some rows take them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reads {
    /// One reads f32.
    pub plain: bool,
    /// One reads rows that are packed, in this form.
    pub packed: Option<Form>,
}

impl Reads {
    /// Only f32.
    pub const PLAIN: Self = Self { plain: true, packed: None };
}

/// Packed rows: f16 `[rows, stride]`, then for each row eight bytes: its exponent, as f16, and of rows that no activation made the power
/// of two that the norm of what is packed is below. With `twice`, what
/// rounding to f16 took from the values of a row lies behind them as f16, too, and who multiplies them once passes over it.
#[derive(Debug, Clone)]
pub struct Packed {
    /// Both parts.
    pub view: View,
    /// Rows.
    pub rows: usize,
    /// K: a multiple of 8.
    pub width: usize,
    /// Whether what rounding took lies behind them.
    pub twice: bool,
    /// Whether the rows themselves are written: else only their exponents.
    pub by_row: bool,
    /// The same rows for matrices to load straight from memory.
    pub blocks: Option<Blocks>,
}

/// Packed rows as blocks of 16 rows and 16 values: f16 `[R / 16, per_row, 16, 16]`. The values end with zeros.
#[derive(Debug, Clone)]
pub struct Blocks {
    /// All rows; behind them, where they are in the order of [`Packed`], the exponents again.
    pub view: View,
    /// Blocks in a row: whole steps of a product.
    pub per_row: usize,
    /// Where the exponents begin, in words of eight bytes.
    pub exponents: u32,
}

/// Most blocks of a row that a shrink takes in a round, and loads ahead.
pub(crate) const BLOCKS_AHEAD: usize = 8;

impl Blocks {
    /// Bytes that products with a `cut`, and shrinks, load past the end of the last row.
    pub fn ahead_bytes(cut: &MatrixTile) -> usize {
        (cut.x_ahead as usize).max(BLOCKS_AHEAD) * (EDGE * EDGE * 2) as usize
    }

    /// Room for `rows` rows of `width` values for products with a `cut`, and for as many exponents.
    ///
    /// # Errors
    /// Those of [`Recording::scratch`].
    pub fn scratch(
        rec: &mut Recording,
        label: &'static str,
        rows: usize,
        width: usize,
        cut: &MatrixTile,
    ) -> Result<Self> {
        let rows = rows.next_multiple_of(cut.height as usize);
        let per_row = cut.blocks(width);
        // Blocks are loaded ahead past the end of the last row, too.
        let ahead = Self::ahead_bytes(cut);
        let view = rec.scratch(label, (rows * (per_row * EDGE as usize * 2 + 8) + ahead) as u64)?;
        Ok(Self { view, per_row, exponents: (rows * per_row * EDGE as usize / 4) as u32 })
    }

    /// The rows alone, and what stands behind them: bindings for a stage that stores more than eight bytes of a row at a time.
    pub fn split(&self) -> [View; 2] {
        // A block of 16 rows is a multiple of what the offset of a view is.
        let behind = u64::from(self.exponents) * 8;
        [self.view.part(0, behind), self.view.part(behind, self.view.size - behind)]
    }
}

impl Packed {
    /// Room for `rows` rows of `width` values, rounded to f16.
    ///
    /// # Errors
    /// Those of [`Recording::scratch`].
    pub fn scratch(rec: &mut Recording, label: &'static str, rows: usize, width: usize) -> Result<Self> {
        Self::scratch_for(rec, [label; 2], rows, width, &Form::ROWS)
    }

    /// The same in any form; the second label is that of its blocks.
    ///
    /// # Errors
    /// Those of [`Recording::scratch`].
    pub fn scratch_for(
        rec: &mut Recording,
        labels: [&'static str; 2],
        rows: usize,
        width: usize,
        form: &Form,
    ) -> Result<Self> {
        let Form { twice, by_row, cut } = *form;
        let stride = if twice { 2 * width } else { width };
        // Shaders read it in words of 16 bytes.
        let view = rec.scratch(labels[0], (rows * (stride / 4 + 1) * 8).next_multiple_of(16) as u64)?;
        let blocks = cut.map(|cut| Blocks::scratch(rec, labels[1], rows, width, &cut)).transpose()?;
        Ok(Self { view, rows, width, twice, by_row, blocks })
    }

    /// Whether a product that reads `form` finds it here.
    pub fn serve(&self, form: &Form) -> bool {
        (self.twice || !form.twice) && (self.by_row || !form.by_row) && (self.blocks.is_some() || form.cut.is_none())
    }

    /// From a row to the next, in values.
    pub fn stride(&self) -> usize {
        if self.twice { 2 * self.width } else { self.width }
    }

    /// Where the exponents begin, in words of eight bytes.
    pub fn exponents(&self) -> u32 {
        (self.rows * self.stride() / 4) as u32
    }
}

/// Semantics: `packed[r] = f16(x[r] · 2^e[r])` with e = 0 where the largest magnitude of the row lies in 2^-5 to 2^7, else
/// such that it lies just below 2^7 ([`ROW_EXPONENT`](crate::plan::matrix::ROW_EXPONENT)); twice: there always.
pub struct Pack<'a> {
    /// f32 `[rows, width]`.
    pub x: &'a View,
    /// Written.
    pub packed: &'a Packed,
}

/// The variables of the shaders that pack a row a workgroup.
pub(crate) fn row_vars() -> Vars {
    vec![("lanes", LANES.into()), ("one_subgroup", false.into())]
}

/// The variables of one variant: whether rows come twice, as rows, and as blocks.
pub fn vars(twice: bool, [by_row, blocks]: [bool; 2]) -> Vars {
    let mut all = row_vars();
    all.extend([("twice", twice.into()), ("by_row", by_row.into()), ("blocks", blocks.into())]);
    all
}

/// Which forms of rows a variant writes: rows, blocks or both.
pub const FORMS: [[bool; 2]; 3] = [[true, false], [false, true], [true, true]];

/// Records the packing of x, f32 `[rows, width]`, in one form.
///
/// # Errors
/// When the device refuses the shader or has no room for scratch.
pub fn pack(
    rec: &mut Recording,
    pass: &mut wgpu::ComputePass<'_>,
    labels: [&'static str; 2],
    x: &View,
    [rows, width]: [usize; 2],
    form: &Form,
) -> Result<Packed> {
    let packed = Packed::scratch_for(rec, labels, rows, width, form)?;
    Pack { x, packed: &packed }.record(rec, pass)?;
    Ok(packed)
}

impl Pack<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let Packed { rows, width, twice, by_row, ref blocks, .. } = *self.packed;
        let kernel = if blocks.is_some() { &PACK_BLOCKS } else { &PACK };
        let pipeline = pipeline(rec.gpu(), kernel, vars(twice, [by_row, blocks.is_some()]))?;
        let quads = (width / 4) as u32;
        let [per_row, block_exponents] = blocks.as_ref().map_or([0; 2], |b| [b.per_row as u32, b.exponents]);
        let params = PackParams { rows: rows as u32, quads, blocks: per_row, block_exponents };
        let mut buffers = vec![self.x, &self.packed.view];
        buffers.extend(blocks.as_ref().map(|b| &b.view));
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &Grid::folded(1, rows as u32));
        Ok(())
    }
}
