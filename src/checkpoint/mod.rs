//! Model folders on disk: names, types, shapes and byte ranges, validated once, never copied.

pub mod config;

pub use config::{MlpKind, ModelConfig};
