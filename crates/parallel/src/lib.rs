//! How a model is trained over ranks.
//!
//! Owns: the optimizer over a model's parameters, which layers a pipeline stage has ([`Stages`]), the order of its work
//! ([`schedule`]) (and, as more ranks arrive, layouts and gradient buckets).
//!
//! Must not know: losses, data sets.

mod optimizer;
mod pipeline;
mod refusal;
pub mod schedule;
mod stages;

pub use optimizer::{AdamWConfig, Optimizer, Settled};
pub use pipeline::{Micro, Pipeline, Stage};
pub use refusal::{PipelineRule, Refusal};
pub use stages::{Stages, balanced_split};
