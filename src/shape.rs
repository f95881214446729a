//! The letters of every shape comment in this crate, and the sizes of one mixture-of-experts layer.
//!
//! | letter | meaning |
//! |---|---|
//! | T | tokens (rows) of a step |
//! | A | active experts of a token (top-k) |
//! | P | pairs of token and expert, P = T·A; pair p belongs to token p / A |
//! | E | experts of the layer |
//! | E_l | experts this rank holds |
//! | D | hidden width |
//! | F | expert width |
//! | R | LoRA rank |
//! | L | adapter slots |
//! | V | virtual experts, V = L·E_l |
//! | B | tile height: pairs that one workgroup handles together (block size) |
//! | N | buckets of an alignment |
//!
//! Weights are `[E, out, in]`, LoRA A is `[R, in]` and LoRA B is `[out, R]` for each slot, expert and projection.
//! M, N and K have their usual meaning inside matrix-product code only.

/// Sizes of one mixture-of-experts layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// E: routed experts of the layer.
    pub experts: usize,
    /// A: experts a token is sent to.
    pub top_k: usize,
    /// D: hidden width.
    pub hidden: usize,
    /// F: width of one expert.
    pub expert_width: usize,
}

/// C: slots that an alignment of P pairs over N buckets with tile height B can need, a multiple of B:
/// roundup(P + min(P, N + 1)·(B - 1), B). The bucket beyond N is the sentinel's.
pub const fn align_capacity(pairs: usize, buckets: usize, tile: usize) -> usize {
    assert!(tile > 0, "the tile height must not be 0");
    let filled = if pairs < buckets + 1 { pairs } else { buckets + 1 };
    (pairs + filled * (tile - 1)).next_multiple_of(tile)
}
