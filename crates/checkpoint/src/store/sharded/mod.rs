//! The checkpoint of a run of several ranks.
//!
//! ```text
//! RUN/checkpoints/step-000050/
//!   rank-00003.bin      what rank 3 wrote: parts of weights and moments, one after another, little-endian, each at a multiple of 8 bytes
//!   rank-00003.json     which parts, and the BLAKE3 of every 4 MiB of rank-00003.bin
//!   tensors.json        every logical (Hugging Face) tensor: shape, type, and which parts of it lie where
//!   config.json, …      the side files of the model, and state.json, as in a checkpoint of one rank
//!   manifest.json       size and BLAKE3 of every file but the .bin, sizes of those; written last
//! ```
//!
//! So every byte is vouched for by the manifest: through `rank-N.json` in the case of the tensors, so that a reader checks just the
//! blocks that it reads, and damage is located to a block and the tensors in it.
//!
//! A save has three stages, on each of which all ranks agree (`agree.rs`) before the next begins: rank 0 makes a temporary folder; every
//! rank writes and syncs its two files; rank 0 checks that the parts cover every tensor exactly once (`cover.rs`), writes the rest
//! and renames the folder. A failure in any stage, on any rank, is an error on all of them and leaves earlier checkpoints alone.

mod agree;
mod checkpoint;
mod cover;
mod fragment;
mod packing;
mod record;
mod resume;
mod saver;
mod verify;
mod write;

pub(crate) use agree::agree;
pub use agree::on_first;
pub use checkpoint::Checkpoint;
pub use fragment::{Entry, own_ranges};
use fragment::{Fragment, Named};
pub use packing::Snapshot;
pub use saver::{Committed, Request, Saver};
pub(crate) use verify::verify_shards;

/// Bytes that have a checksum of their own.
pub(crate) const BLOCK: usize = 4 << 20;
/// Version of the layout of the folder.
pub(crate) const FORMAT: u32 = 2;
/// Name of the index of tensors.
pub(crate) const TENSORS: &str = "tensors.json";

/// Name of the file with what a rank wrote.
fn data_name(rank: usize) -> String {
    format!("rank-{rank:05}.bin")
}

/// Name of the file that says what it wrote.
fn record_name(rank: usize) -> String {
    format!("rank-{rank:05}.json")
}
