//! The safetensors format: eight bytes of header length (little-endian), a JSON header that gives dtype,
//! shape and byte range of every tensor, then the tensors' bytes without gaps.

mod file;
mod header;
mod write;

pub use file::{File, TensorRef};
pub use header::{Entry, Header, MAX_HEADER, Stored};
pub(crate) use write::{Data, Far, Item, Want, write_sharded};
