//! What a tensor name means in each model family: one table file a family, from name to [`Role`].

pub mod qwen3_moe;

/// A supported model family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// Qwen3-MoE: q/k norms, softmax router, no shared expert.
    Qwen3Moe,
}
