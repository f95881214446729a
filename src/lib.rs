//! Portable compute runtime for mixture-of-experts models with mixed LoRA adapters.

pub mod adapter;
pub mod checkpoint;
pub mod dtype;
pub mod error;
pub mod family;
pub mod placement;
pub mod shape;

pub use error::{Error, ErrorKind, Result};
