//! The stages on the device, one file each: its shader, parameter block and how it is recorded.
//!
//! A stage is a struct of named arguments with one verb, `record`, which takes the caller's compute pass. Nothing here
//! submits, waits or branches on device limits: variants come from [`crate::plan`].

pub mod barriers;
pub mod linker;
pub mod params;
pub mod recording;
pub mod variants;

pub mod route;
pub mod count;
pub mod localise;
pub mod remap;
pub mod align;
pub mod runs;
pub mod pack;
pub mod tile_rows;
pub mod operands;
pub mod lanes;
pub mod expert_gemm;
pub mod expert_gemm_variant;
pub mod expert_gemm_matrix;
pub mod lora;
pub mod lora_matrix;
pub mod fold_blocks;
pub mod lora_gather;
pub mod choice;
pub mod pair_shrink;
pub mod pair_gemm;
pub mod pair_gemm_shrink;
pub mod pair_expand_shrink;
pub mod dense_gemm;
pub mod down_combine;
pub mod activation;
pub mod activation_blocks;
pub mod combine;
pub mod embed;
pub mod norm;
pub mod norm_pack;
pub mod expand_norm;
pub mod rope;
pub mod attention;
pub mod attention_matrix;
pub mod attention_split;
pub mod sample;

pub mod matrix_probe;
pub mod random;
pub mod rate;
pub mod stream;

pub use recording::{Grid, Recording, View};

/// Workgroups of 64 invocations that cover `n` items, folded.
pub(crate) fn cover(n: usize) -> Grid {
    Grid::folded(1, n.div_ceil(64) as u32)
}
