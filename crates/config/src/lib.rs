//! The typed configuration.
//!
//! Owns: the training configuration ([`Config`]), its validation and resolved form, and [`Arch`], the
//! architecture read from a Hugging Face `config.json`. Everything is parsed once, here, into types that cannot be wrong.
//!
//! Must not know: devices, tensors.

mod arch;
mod config;
mod error;

pub use arch::{Arch, ModelType, Moe};
pub use config::*;
pub use error::{Error, Result};
