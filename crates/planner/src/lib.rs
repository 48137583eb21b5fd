//! Memory, time and layout of a training run, computed before a GPU is touched.
//!
//! Owns: the layout and its constraints ([`Layout`], [`check`]), the account of memory ([`memory`]) and of time ([`time`]), the
//! search over layouts ([`search`]), and how all of it is told ([`Plan`], [`explain`], [`svg`]).
//!
//! Must not know: devices (as things to run on), files of weights, schedules in execution. Everything here is a pure function.
//!
//! How a question becomes a [`Plan`]: [`Network`] reads a `config.json` and takes every parameter from `temper_model::declare`;
//! `shard` divides them over a [`Layout`] by each parameter's `Shard` rule; `memory` and `time` add what a step needs;
//! `search` tries the legal layouts; `advice` says what is wrong with one; `plan` puts it together.
//! docs/PLAN.md has the formulas with their sources.

mod advice;
mod check;
mod cluster;
mod error;
pub mod explain;
mod flops;
mod job;
mod layout;
pub mod memory;
mod network;
mod plan;
mod search;
mod shard;
mod stages;
pub mod svg;
pub mod time;
pub mod units;
mod waste;

pub use advice::{Advice, advise};
pub use check::{Problem, Rule, check, nearest};
pub use cluster::Cluster;
pub use error::{Error, Result};
pub use flops::{ModelFlops, mfu};
pub use job::{Account, Job, Precision};
pub use layout::{Axis, Group, Layout, LayoutRequest, Offload, Recompute};
pub use network::{BUILTIN, Hybrid, Network};
pub use plan::{Beside, Checkpoint, Heaviest, Plan, Refused, Run, StagePlan, layout_json, plan};
pub use search::{Candidate, Found, Space, search};
pub use shard::{RankParams, rank_params};
pub use stages::{Stage, stages};
pub use waste::waste;
