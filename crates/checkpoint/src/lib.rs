//! Weights and checkpoints on disk.
//!
//! Owns: the safetensors format ([`safetensors`]), Hugging Face model folders in ([`WeightsFolder`]) and
//! out ([`export`]), models by Hub id ([`hub`]), and the step checkpoints of a run ([`Store`]).
//!
//! Must not know: layers, data sets, schedules. A model is to this crate a list of [`temper_model::param::Param`]
//! declarations and the host tensors that go with them, in the same order.

mod convert;
mod error;
mod folder;
mod load;
pub mod safetensors;

pub use error::{Error, Result};
pub use folder::WeightsFolder;
