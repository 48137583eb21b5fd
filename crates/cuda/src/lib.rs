//! The NVIDIA backend: [`Cuda`] implements [`temper_tensor::Ops`] on one GPU.
//!
//! Owns: finding and opening NVIDIA's libraries ([`sys`]), the device and its stream ([`device`]), device memory
//! ([`arena`]), run-time compiled kernels ([`kernels`]), cuBLASLt matrix products ([`gemm`]), cuDNN attention
//! ([`sdpa`]), the launchers of every operation (`ops`), exchange between GPUs ([`nccl`]). Nothing of NVIDIA is needed to
//! build it: all libraries are opened at run time, and kernels are compiled by NVRTC for the device found.
//!
//! Must not know: layers, configuration, what a group of ranks is for.
//!
//! Path of a call: `ops::X` checks shapes, picks a kernel of `kernels/X.cu` through [`kernels::Kernels`] and enqueues
//! it on the one stream. Nothing waits for the device except [`Ops::to_host`](temper_tensor::Ops::to_host). Each group of ranks has a
//! stream of its own beside it, tied to it by events.

pub mod arena;
mod cuda;
pub mod device;
mod error;
pub mod gemm;
pub mod kernels;
pub mod nccl;
mod ops;
pub mod sdpa;
pub mod sys;

pub use cuda::{Cuda, Options};
pub use device::{card, count, present};
pub use error::{Error, Result};
pub use ops::AdamWTypes;
