//! Expert ids and adapter slots to virtual expert ids.

use crate::error::Result;
use crate::kernels::linker::{Kernel, Vars, pipeline};
use crate::kernels::params::params;
use crate::kernels::{Recording, View, cover};
use crate::router::NoAdapter;

/// The shader.
pub static REMAP: Kernel = Kernel { stem: "remap", reads: 2, writes: 3 };

params! {
    /// Sizes of one remap.
    RemapParams {
        /// P.
        pairs: u32,
        /// A.
        top_k: u32,
        /// E_l.
        experts: u32,
        /// L.
        slots: u32,
        /// 1: ids of tokens without adapter stay, 0: they become -1.
        unshifted: u32,
        /// Padding.
        pad0: u32,
        /// Padding.
        pad1: u32,
        /// Padding.
        pad2: u32,
    }
}

/// Semantics: `virtual[p] = ids[p] + slot(p / A) · E_l`; negative ids come back bit for bit.
pub struct Remap<'a> {
    /// P.
    pub pairs: usize,
    /// A.
    pub top_k: usize,
    /// E_l.
    pub experts: usize,
    /// L.
    pub slots: usize,
    /// What becomes of tokens without adapter.
    pub no_adapter: NoAdapter,
    /// i32 `[P]`, local.
    pub topk_ids: &'a View,
    /// i32 `[T]`: slot, negative for none.
    pub token_lora_mapping: &'a View,
    /// i32 `[P]`, written.
    pub virtual_topk_ids: &'a View,
    /// u32 `[T]`, written: 1 where the token has an adapter.
    pub lora_mask: &'a View,
    /// u32 `[1]`: bit 1 for a slot past L, bit 2 for an id past E_l.
    pub status: &'a View,
}

impl Remap<'_> {
    /// Records the stage.
    ///
    /// # Errors
    /// When the device refuses the shader.
    pub fn record(&self, rec: &mut Recording, pass: &mut wgpu::ComputePass<'_>) -> Result<()> {
        let pipeline = pipeline(rec.gpu(), &REMAP, Vars::new())?;
        let params = RemapParams {
            pairs: self.pairs as u32,
            top_k: self.top_k as u32,
            experts: self.experts as u32,
            slots: self.slots as u32,
            unshifted: u32::from(self.no_adapter == NoAdapter::Unshifted),
            pad0: 0,
            pad1: 0,
            pad2: 0,
        };
        let buffers = [self.topk_ids, self.token_lora_mapping, self.virtual_topk_ids, self.lora_mask, self.status];
        rec.dispatch(pass, &pipeline, bytemuck::bytes_of(&params), &buffers, &cover(self.pairs));
        Ok(())
    }
}
