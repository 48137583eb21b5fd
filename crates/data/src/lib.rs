//! From files to batches.
//!
//! Owns: readers, row formats, chat templates, tokenisation, loss masks, packing, the order of samples, the
//! role-play builder.
//!
//! Must not know: devices.

mod batch;
mod conversation;

pub use batch::{IGNORE, MicroBatch, SampleId, StepBatch};
pub use conversation::{Conversation, Message, Role};
