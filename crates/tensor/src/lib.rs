//! Tensors and the operations on them.
//!
//! Owns: [`DType`], [`Tensor`] and its borrowed forms [`View`] and [`ViewMut`], the contract every
//! backend fulfils ([`Ops`]), the CPU backend ([`cpu::Cpu`], which is the normative one), and the
//! counter-based random generator.
//!
//! Must not know: CUDA, ranks, layers, files.

pub mod cpu;
mod dtype;
mod error;
mod observe;
mod ops;
mod rng;
mod tensor;

pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use observe::{MemoryUse, Purpose, Stamp};
pub use ops::{AdamW, AdamWState, Balance, Beta, GroupedGemm, Ops, PackedSeqs, PagedSeqs, RopeTable, RouterGrad, Trans};
pub use rng::Rng;
pub use tensor::{Buffer, DeviceBuffer, FromSlice, Slice, SliceMut, Tensor, View, ViewMut, ViewOf};
