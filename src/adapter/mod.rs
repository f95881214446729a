//! LoRA adapters: a PEFT folder becomes canonical factors (config, names, layout); the pool holds them on the device.

use std::path::PathBuf;
use std::sync::Arc;

use crate::dtype::DType;

/// A place in the model that an adapter can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Site {
    /// Query projection, `[heads·head_dim, D]`.
    Q,
    /// Key projection, `[kv_heads·head_dim, D]`.
    K,
    /// Value projection, `[kv_heads·head_dim, D]`.
    V,
    /// Output projection, `[D, heads·head_dim]`.
    O,
    /// Router, `[E, D]`.
    Router,
    /// Gate projection of a dense MLP, `[dense_width, D]`.
    Gate,
    /// Up projection of a dense MLP, `[dense_width, D]`.
    Up,
    /// Down projection of a dense MLP, `[D, dense_width]`.
    Down,
    /// Gate projection of one routed expert, `[F, D]`.
    ExpertGate,
    /// Up projection of one routed expert, `[F, D]`.
    ExpertUp,
    /// Down projection of one routed expert, `[D, F]`.
    ExpertDown,
}

/// A dense row-major matrix as stored in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    /// Storage type: f32, f16 or bf16.
    pub dtype: DType,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// `rows · cols` elements, little-endian, without padding.
    pub bytes: Vec<u8>,
}

/// One low-rank change `W += scale · B · A` of one projection of one layer (and expert).
#[derive(Debug, Clone)]
pub struct Factor {
    /// Decoder layer, from 0.
    pub layer: usize,
    /// Which projection.
    pub site: Site,
    /// Global expert id for the `Expert*` sites, otherwise 0.
    pub expert: usize,
    /// R, at least 1.
    pub rank: usize,
    /// alpha / R, or alpha / sqrt(R) with rsLoRA.
    pub scale: f32,
    /// `[R, in]`; factors that share A (fused gate and up) share the allocation.
    pub a: Arc<Matrix>,
    /// `[out, R]`.
    pub b: Arc<Matrix>,
}

/// An adapter in canonical form, checked against one model.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// The folder it came from.
    pub path: PathBuf,
    /// Every factor, sorted by (layer, site, expert); at most one for each.
    pub factors: Vec<Factor>,
    /// Bytes of tensor data read from the file.
    pub bytes_read: u64,
}
