//! Portable compute runtime for mixture-of-experts models with mixed LoRA adapters.
//!
//! One batch can hold sequences with different adapters, or none: the adapters are not merged into the weights. The
//! modules stand in the order in which data flows.
//!
//! 1. [`checkpoint`] opens a model folder; [`family`] says what its tensor names mean; [`placement`] which experts this
//!    rank holds
//! 2. [`plan`] decides variants and cuts; [`gpu`] opens the device; [`upload`] moves weights there
//! 3. [`adapter`] reads PEFT folders and keeps their factors on the device
//! 4. [`kernels`] are the stages, [`layer`] one mixture-of-experts layer made of them, [`model`] the decoder around it
//! 5. [`exchange`] adds up what several ranks computed, and takes tokens to the ranks of their experts
//! 6. [`engine`] runs sequences in a continuous batch; `text` turns tokens into text (feature `text`)
//!
//! [`mod@reference`] holds the same stages on the CPU: the oracle of the tests.

// The library logs through `log` and prints nothing.
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod error;
pub mod shape;
pub mod dtype;
pub mod router;
pub mod activation;

pub mod checkpoint;
pub mod family;
pub mod placement;
pub mod plan;
pub mod gpu;
pub mod upload;
pub mod adapter;
pub mod kernels;
pub mod layer;
pub mod exchange;
pub mod model;
pub mod engine;
#[cfg(feature = "text")]
pub mod text;

pub mod reference;
#[doc(hidden)]
pub mod fuzzing;

pub use adapter::Adapter;
pub use checkpoint::{Checkpoint, ModelConfig};
pub use engine::{Engine, EngineOptions, Event, FinishReason, Request, Sampling, Worker};
pub use error::{Error, ErrorKind, Result};
pub use gpu::{Gpu, GpuInfo, GpuOptions, Tier};
pub use layer::MoeLayer;
pub use model::{LoadOptions, Model};

/// Compiles the README's code.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
