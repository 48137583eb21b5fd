//! Tensors and the operations on them.
//!
//! Owns: [`DType`], [`Tensor`] and its borrowed forms [`View`] and [`ViewMut`], the contract every
//! backend fulfils ([`Ops`]), the CPU backend ([`cpu::Cpu`], which is the normative one), the backend that
//! records another ([`Traced`]), and the counter-based random generator.
//!
//! Must not know: CUDA, ranks, layers, files.

pub mod cpu;
mod dtype;
mod error;
mod observe;
mod ops;
mod rng;
mod tensor;
mod traced;

pub use dtype::{DType, Element};
pub use error::{Error, OutOfMemory, Result};
pub use observe::{MemoryUse, Phase, Purpose, Stamp};
pub use ops::{AdamW, AdamWState, AttentionSizes, Balance, Beta, GroupedGemm, Ops, PackedSeqs, PagedSeqs, RopeTable, RouterGrad, Trans};
pub use rng::Rng;
pub use tensor::{Buffer, DeviceBuffer, FromSlice, Slice, SliceMut, Tensor, View, ViewMut, ViewOf};
pub use traced::{Call, Level, Rates, Recording, Span, Timed, Traced};
