//! Global expert ids to the ids of this rank.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Recording, View, cover};

/// The shader.
pub static LOCALISE: Kernel = Kernel { stem: "localise", reads: 2, writes: 1 };

params! {
    /// Sizes of one localisation.
    LocaliseParams {
        /// P.
        pairs: u32,
        /// Pairs of real tokens; the rest becomes -1.
        valid_pairs: u32,
        /// E.
        experts: u32,
        /// A: pairs of a token.
        top_k: u32,
    }
}

/// Semantics: `local[p] = owners[ids[p]].local`; -1 past the real tokens, for ids that are no expert, and where another
/// rank's copy of the expert has its turn (of n copies of expert e, token t takes number (t + e) mod n); negative ids stay.
pub struct Localise<'a> {
    /// P.
    pub pairs: usize,
    /// Pairs of real tokens.
    pub valid_pairs: usize,
    /// E.
    pub experts: usize,
    /// i32 `[P]`, global.
    pub topk_ids: &'a View,
    /// A: pairs of a token.
    pub top_k: usize,
    /// [`Owner`](crate::placement::Owner) `[E]`.
    pub owners: &'a View,
    /// i32 `[P]`, written.
    pub local_ids: &'a View,
}

impl Localise<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &LOCALISE, Vars::new())?;
        let params = LocaliseParams {
            pairs: self.pairs as u32,
            valid_pairs: self.valid_pairs as u32,
            experts: self.experts as u32,
            top_k: self.top_k as u32,
        };
        let buffers = [self.topk_ids, self.owners, self.local_ids];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &cover(self.pairs));
        Ok(())
    }
}
