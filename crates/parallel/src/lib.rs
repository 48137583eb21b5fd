//! How a model is trained over ranks.
//!
//! Owns: the optimizer, divided over ranks ([`Optimizer`], [`Buckets`]), which layers a pipeline stage has ([`Stages`]), the order of
//! its work ([`schedule`]), and where in it a value is not finite ([`diagnose`]).
//!
//! Must not know: losses, data sets.

mod buckets;
mod optimizer;
mod pipeline;
mod refusal;
pub mod schedule;
mod stages;

pub use buckets::{Buckets, Segment};
pub use optimizer::{AdamWConfig, Optimizer, Settled};
pub use pipeline::{Micro, NonFinite, Pipeline, Ready, Stage, diagnose};
pub use refusal::{PipelineRule, Refusal};
pub use stages::{Stages, balanced_split};
