//! How a model is trained over ranks.
//!
//! Owns: the optimizer over a model's parameters (and, as more ranks arrive, layouts, pipeline schedules and gradient buckets).
//!
//! Must not know: losses, data sets.

mod optimizer;

pub use optimizer::{AdamWConfig, Optimizer, Settled};
