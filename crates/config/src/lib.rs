//! The typed configuration.
//!
//! Owns: the training configuration ([`Config`]), its validation and resolved form ([`Resolved`]), and [`Arch`], the
//! architecture read from a Hugging Face `config.json`, and the data sheets of devices ([`Device`]). Everything is parsed once, here, into types that cannot be wrong.
//!
//! Must not know: devices as things to run on, tensors.
//!
//! How a file becomes a [`Config`]: `tree` parses TOML with line numbers and lays `--set` over it; `section` holds the macro
//! with which `config` declares each key once; `spec`, `choices` and `keys` say what a key accepts; `suggest` answers unknown
//! keys; `resolve` finds paths and explains automatic values; `check` compares values with each other; `reference` writes
//! `docs/CONFIG.md`. `hf` reads [`Arch`].

mod arch;
mod benchmark;
mod check;
mod choices;
mod config;
mod device;
mod error;
mod hf;
mod keys;
mod reference;
mod resolve;
mod section;
mod spec;
mod suggest;
mod tree;

pub use arch::{Arch, ModelType, Moe};
pub use choices::{AuxLoss, FloatType, InitFrom, LossOn, LossReduction, OnNonFinite, OverLong, Recompute, RecomputePart, Schedule};
pub use config::{Checkpoint, Config, Data, Log, Memory, Model, Optim, Parallel, Precision, Source, Span, Template, Train};
pub use config::{RESERVE, expert_tensor};
pub use device::{Device, devices, devices_from_toml};
pub use error::{Error, Result};
pub use reference::reference;
pub use resolve::{Resolved, is_hub_id};
pub use section::Key;
