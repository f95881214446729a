//! Pure decisions, without a device: which kernel variants run, how tensors are cut, how work is split.

pub mod attention;
pub mod capabilities;
pub mod classes;
pub mod exchange;
pub mod matrix;
pub mod memory;
pub mod pieces;
pub mod read;
pub mod resident;
pub mod rows;
pub mod tuning;
