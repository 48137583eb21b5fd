//! The NVIDIA backend: [`Cuda`] implements [`temper_tensor::Ops`] on one GPU.
//!
//! Owns: finding and opening NVIDIA's libraries ([`sys`]), the device and its stream ([`device`]), device memory
//! ([`arena`]), run-time compiled kernels ([`kernels`]), cuBLASLt matrix products ([`gemm`]), cuDNN attention
//! ([`sdpa`]), the launchers of every operation (`ops`). Nothing of NVIDIA is needed to build it: all libraries are
//! opened at run time, and kernels are compiled by NVRTC for the device found.
//!
//! Must not know: layers, configuration, ranks.
//!
//! Path of a call: `ops::X` checks shapes, picks a kernel of `kernels/X.cu` through [`kernels::Kernels`] and enqueues
//! it on the one stream. Nothing waits for the device except [`Ops::to_host`](temper_tensor::Ops::to_host).

pub mod arena;
mod cuda;
pub mod device;
mod error;
pub mod gemm;
pub mod kernels;
mod ops;
pub mod sdpa;
pub mod sys;

pub use cuda::{Cuda, Options};
pub use device::present;
pub use error::{Error, Result};
pub use ops::AdamWTypes;
