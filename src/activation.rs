//! The nonlinearity between the first and the second product of an expert.

/// What an expert does with its gate and up halves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// silu(gate)·up; gate is columns 0..F, up is F..2F.
    Silu,
    /// gelu(gate)·up with the tanh approximation; halves as for [`Activation::Silu`].
    Gelu,
    /// (up + 1)·gate·sigmoid(alpha·gate) with gate <= limit and |up| <= limit; gate is the even columns, up the odd ones.
    SwigluClamped {
        /// Slope of the sigmoid (1.702 in gpt-oss).
        alpha: f32,
        /// Bound of both halves (7 in gpt-oss).
        limit: f32,
    },
    /// max(x, 0)²; there is no gate, the input has F columns.
    ReluSquared,
}

impl Activation {
    /// Whether the input holds a gate beside the up half.
    pub const fn gated(self) -> bool {
        !matches!(self, Self::ReluSquared)
    }

    /// Whether gate and up columns alternate.
    pub const fn interleaved(self) -> bool {
        matches!(self, Self::SwigluClamped { .. })
    }

    /// Columns of the input for expert width F: 2F, or F without a gate.
    pub const fn input_columns(self, expert_width: usize) -> usize {
        if self.gated() { 2 * expert_width } else { expert_width }
    }
}
