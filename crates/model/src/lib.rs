//! The networks.
//!
//! Owns: layers with explicit forward and backward, the architectures, and the declaration of every parameter
//! (Hugging Face names, shapes, sharding rule, decay, initialisation).
//!
//! Must not know: files, schedules, data parallelism.
//!
//! Every layer has three methods, one beneath the other: `forward` returns the output and what it saved,
//! `backward_input` consumes that and returns the gradient of the input and the work left for the weights, and
//! `backward_weight` does that work now or later. Activation gradients are overwritten, weight gradients accumulate.
pub mod attention;
pub mod aux;
mod batch;
mod buckets;
mod cache;
mod context;
mod cx;
mod declare;
pub mod decoder;
mod dispatch;
mod embed;
mod error;
mod head;
pub mod linear;
pub mod mlp;
mod model;
pub mod moe;
pub mod norm;
pub mod param;
mod ranks;
mod recompute;
mod rope;
mod shard;
mod weights;

pub use aux::{AuxLoss, AuxSettings, AuxStats};
pub use batch::{Batch, IGNORE, Labels};
pub use buckets::{ALIGN, Slot, Slots};
pub use cache::{CachedStep, KvCache, StepTokens};
pub use context::Segment;
pub use cx::{Act, Cx};
pub use declare::{Names, Place, declare};
pub use embed::Embedding;
pub use error::{Error, Result};
pub use head::{CHUNK_ROWS, Head, chunk_rows, largest_chunk};
pub use model::{Kept, Model, Objective, Outputs, Portion, finish_aux, loss_sum, read_floats};
pub use ranks::{Operand, Ranks, token_multiple};
pub use recompute::{Parts, Recompute};
pub use rope::RopeTables;
pub use shard::{AxisRank, Seat};
pub use weights::{Grads, Weights, init_piece};
