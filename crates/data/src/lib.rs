//! From files to batches.
//!
//! Owns: readers, row formats, chat templates, tokenisation, loss masks, packing, the order of samples, the
//! role-play builder.
//!
//! Must not know: devices.

mod batch;
mod conversation;
mod error;
mod read;
mod rows;

pub use batch::{IGNORE, MicroBatch, SampleId, StepBatch};
pub use conversation::{Conversation, Message, Role};
pub use error::{BadRow, Error};
pub use read::{SourceReport, read_source};
pub use rows::RowFormat;
