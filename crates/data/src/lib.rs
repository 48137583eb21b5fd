//! From files to batches.
//!
//! Owns: readers, row formats, chat templates, tokenisation, loss masks, packing, the order of samples, the
//! role-play builder.
//!
//! Must not know: devices.

mod batch;
mod cache;
mod conversation;
mod dataset;
mod error;
mod mask;
mod pack;
mod preview;
mod read;
mod roleplay;
mod rows;
mod stats;
mod template;
#[cfg(test)]
mod testing;
mod tokenizer;

pub use batch::{IGNORE, MicroBatch, SampleId, StepBatch};
pub use conversation::{Conversation, Message, Role};
pub use dataset::{CutCounts, Dataset, Loader};
pub use error::{BadRow, Error};
pub use mask::{Masked, Masker, Span, TokenSpan};
pub use preview::{PreviewItem, PreviewLine, Run, preview, preview_batch, runs};
pub use read::{MAX_ROW_BYTES, SourceReport, read_source};
pub use roleplay::{Language, Removed, RoleplayOptions, RoleplayReport, TableReport, Tidied, build_roleplay};
pub use rows::RowFormat;
pub use stats::{Lengths, Packing, Report, SourceStats};
pub use template::{ChatTemplate, Rendered, TemplateError};
pub use tokenizer::{Encoded, Tokenizer};
