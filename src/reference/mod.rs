//! The oracle: every stage once more on the CPU, in plain loops with f64 sums.
//!
//! One file a stage, under the name of its kernel. Tests compare a shader with the file of the same stem; the runtime
//! never falls back to this code. Slices are row-major, letters as in [`crate::shape`]. Integer stages are exact; float
//! stages sum in f64 and round once, on store. Wrong lengths are bugs of the caller and panic with a message.
//!
//! A layer in order: [`route()`] → [`localise()`] → [`remap()`] → [`align()`] → [`expert_gemm()`] and [`lora()`] (gate, up) →
//! [`activation()`] → [`expert_gemm()`] and [`lora()`] (down) → [`combine()`]. [`moe_layer()`] is that line as code.
#![expect(
    clippy::needless_range_loop,
    clippy::too_many_arguments,
    reason = "loops and argument lists stay comparable to the shaders line by line"
)]

pub mod activation;
pub mod align;
pub mod attention;
pub mod combine;
pub mod count;
pub mod embed;
pub mod expert_gemm;
pub mod localise;
pub mod lora;
pub mod lora_gather;
pub mod moe_layer;
pub mod norm;
pub mod remap;
pub mod rope;
pub mod route;
pub mod runs;
pub mod sample;

pub use activation::activation;
pub use align::{Aligned, align};
pub use attention::{AttentionShape, attention};
pub use combine::combine;
pub use count::count;
pub use embed::embed;
pub use expert_gemm::{expert_bias, expert_gemm};
pub use localise::localise;
pub use lora::{Factors, lora};
pub use lora_gather::lora_gather;
pub use moe_layer::{MoeLayer, MoeOutput, moe_layer};
pub use norm::rms_norm;
pub use remap::{Remapped, remap};
pub use rope::{inverse_frequencies, rope};
pub use route::{Routed, route};
pub use runs::{Runs, align_runs};
pub use sample::{argmax, sample};

/// The row of a non-negative `id`, or None for the ids that mean none.
fn index(id: i32) -> Option<usize> {
    usize::try_from(id).ok()
}

/// NaN as -inf and +inf as the largest finite, tested by bits as the shaders do.
fn cleaned(value: f32) -> f32 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        f32::NEG_INFINITY
    } else if value == f32::INFINITY {
        f32::MAX
    } else {
        value
    }
}

/// 1 / (1 + exp(-x)).
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
