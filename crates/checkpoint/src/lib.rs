//! Weights and checkpoints on disk.
//!
//! Owns: the safetensors format ([`safetensors`]), Hugging Face model folders in ([`WeightsFolder`]) and
//! out ([`export`]), models by Hub id ([`hub`]), and the step checkpoints of a run ([`Store`]).
//!
//! Must not know: layers, data sets, schedules. A model is to this crate a list of [`temper_model::param::Param`]
//! declarations and the host tensors that go with them, in the same order.

mod convert;
mod disk;
mod error;
mod export;
mod folder;
pub mod hub;
mod load;
mod runs;
pub mod safetensors;
mod sidecar;
pub mod store;
mod transfer;

pub use disk::{Hook, Op};
pub use error::{Class, Error, Result};
pub use export::{ExportOptions, export, export_checkpoint};
pub use folder::WeightsFolder;
pub use hub::resolve_model;
pub use sidecar::Sidecar;
pub use store::{Checkpoint, Entry, Kind, Saved, Saver, Snapshot, Store};
pub use transfer::{Slot, Traffic};
