//! Portable compute runtime for mixture-of-experts models with mixed LoRA adapters.

pub mod error;
pub mod shape;
pub mod dtype;
pub mod checkpoint;
pub mod family;
pub mod placement;
pub mod adapter;

pub use error::{Error, ErrorKind, Result};
