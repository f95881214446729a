//! Token ids to hidden rows.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::operands::Weights;
use crate::kernels::params::params;
use crate::kernels::{Recording, View, cover};

/// The shader.
pub static EMBED: Kernel = Kernel { stem: "embed", reads: 3, writes: 1 };

params! {
    /// Sizes of one look-up in one piece of the table.
    EmbedParams {
        /// T.
        rows: u32,
        /// D / 8.
        groups: u32,
        /// First entry of the piece.
        first: u32,
        /// Entries of the piece.
        count: u32,
    }
}

/// Semantics: `hidden[t] = table[rows[t].token, or last_ids[rows[t].sequence] where the token is negative]`.
pub struct Embed<'a> {
    /// T.
    pub rows: usize,
    /// i32 `[T, 4]`: token, position, sequence, slot.
    pub row_table: &'a View,
    /// i32 `[sequences]`: the last sampled ids.
    pub last_ids: &'a View,
    /// One matrix `[vocab, D]`.
    pub table: &'a Weights,
    /// f32 `[T, D]`, written.
    pub hidden: &'a View,
}

/// The variables for tables of one storage type.
pub fn vars(dtype: DType) -> Vars {
    vec![("dtype", dtype.name().into())]
}

impl Embed<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &EMBED, vars(self.table.dtype))?;
        let groups = self.table.in_dim / 8;
        for (piece, view) in &self.table.pieces {
            let params = EmbedParams {
                rows: self.rows as u32,
                groups: groups as u32,
                first: piece.row_begin as u32,
                count: piece.rows as u32,
            };
            let buffers = [self.row_table, self.last_ids, view, self.hidden];
            rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &cover(self.rows * groups));
        }
        Ok(())
    }
}
