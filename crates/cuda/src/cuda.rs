//! [`Cuda`]: the open GPU with everything an operation needs.

use crate::arena::{Arena, Block, Pinned};
use crate::device::Device;
use crate::gemm::Gemm;
use crate::kernels::{Compiler, Kernels};
use crate::sdpa::Sdpa;
use crate::sys::driver::Driver;
use crate::sys::{cublaslt::CublasLt, cudnn::Cudnn, nvrtc::Nvrtc};
use crate::{Error, Result};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use temper_tensor::{Buffer, DType, DeviceBuffer, Purpose, Tensor};

/// How to open the GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Number of the GPU among the visible ones.
    pub ordinal: usize,
    /// Bitwise equal results of equal runs: cuDNN's attention backward (which adds with atomics) is replaced by our own.
    pub deterministic: bool,
    /// Do without cuDNN.
    pub no_cudnn: bool,
}

/// The CUDA backend. Fields are in the order in which they must be dropped.
pub struct Cuda {
    pub(crate) kernels: Kernels,
    pub(crate) gemm: Gemm,
    pub(crate) sdpa: Option<Arc<Sdpa>>,
    pub(crate) staging: crate::arena::Staging,
    pub(crate) arena: Arc<Arena>,
    pub(crate) device: Arc<Device>,
    pub(crate) options: Options,
    purpose: AtomicU8,
}

impl Cuda {
    /// Finds the libraries, opens the GPU and compiles what is not in the kernel cache.
    ///
    /// All libraries are looked for before anything else, so that one error names all that are missing.
    pub fn open(options: Options) -> Result<Cuda> {
        let (driver, nvrtc, lt) = (Driver::load(), Nvrtc::load(), CublasLt::load());
        let mut missing = vec![];
        let mut note = |e: Option<&Error>| match e {
            Some(Error::Missing { missing: m }) => missing.extend(m.iter().cloned()),
            Some(e) => missing.push(e.to_string()),
            None => {}
        };
        note(driver.as_ref().err());
        // Without a driver there is no GPU to install the rest for.
        if driver.is_ok() {
            note(nvrtc.as_ref().err());
            note(lt.as_ref().err());
        }
        if !missing.is_empty() {
            return Err(Error::Missing { missing });
        }
        let device = Arc::new(Device::open(driver?, options.ordinal)?);
        let compiler = Compiler::new(nvrtc?, device.arch())?;
        require_driver(&device, compiler.version)?;
        let arena = Arc::new(Arena::new(device.clone())?);
        let gemm = Gemm::new(device.clone(), lt?, &arena)?;
        tracing::info!(
            gpu = device.name,
            arch = compiler.arch,
            driver = device.driver_version,
            multiprocessors = device.multiprocessors,
            memory_gib = device.memory as f64 / (1u64 << 30) as f64,
            nvrtc = format!("{}.{}", compiler.version.0, compiler.version.1),
            nvrtc_path = compiler.path(),
            cublaslt = gemm.version(),
            cublaslt_path = gemm.path(),
            "opened the GPU"
        );
        let sdpa = if options.no_cudnn { None } else { open_cudnn(&device).map(Arc::new) };
        Ok(Cuda {
            kernels: Kernels::new(device.clone(), compiler)?,
            gemm,
            sdpa,
            staging: crate::arena::Staging::new(device.clone())?,
            arena,
            device,
            options,
            purpose: AtomicU8::new(Purpose::Activations as u8),
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// See [`temper_tensor::Ops::account`].
    pub(crate) fn set_purpose(&self, purpose: Purpose) -> Purpose {
        Purpose::ALL[self.purpose.swap(purpose as u8, Ordering::Relaxed) as usize]
    }

    /// Which attention serves bf16, for logs.
    pub fn attention_library(&self) -> String {
        match &self.sdpa {
            Some(s) => format!("cuDNN {}", s.version_text()),
            None => "own kernels".to_string(),
        }
    }

    /// Memory for a tensor, of the current purpose.
    pub(crate) fn tensor(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let purpose = Purpose::ALL[self.purpose.load(Ordering::Relaxed) as usize];
        let len: usize = shape.iter().product();
        let block = self.arena.take(len * dtype.size(), purpose)?;
        Ok(Tensor::new(Buffer::Device(Box::new(CudaBuffer { memory: Memory::Device(block), dtype, len })), shape))
    }

    /// Zeros in pinned host memory, which kernels and copies reach at the same address.
    pub(crate) fn pinned_zeros(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let len: usize = shape.iter().product();
        let pinned = Pinned::zeros(self.device.clone(), len * dtype.size())?;
        Ok(Tensor::new(Buffer::Device(Box::new(CudaBuffer { memory: Memory::Host(pinned), dtype, len })), shape))
    }

    /// Scratch memory of one operation; it may be dropped as soon as the operation is enqueued.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<Block> {
        self.arena.take(bytes, Purpose::Workspace)
    }
}

enum Memory {
    Device(Block),
    Host(Pinned),
}

/// A tensor's memory, as the GPU reaches it.
struct CudaBuffer {
    memory: Memory,
    dtype: DType,
    len: usize,
}

impl DeviceBuffer for CudaBuffer {
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn len(&self) -> usize {
        self.len
    }
    fn address(&self) -> u64 {
        match &self.memory {
            Memory::Device(block) => block.address(),
            Memory::Host(pinned) => pinned.address(),
        }
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The driver must load what the compiler produces: machine code of a newer major version it refuses.
fn require_driver(device: &Device, nvrtc: (i32, i32)) -> Result<()> {
    let driver = device.driver_version / 1000;
    if (driver as i32) < nvrtc.0 {
        return Err(Error::Unsupported(format!(
            "the driver supports CUDA {driver}, but NVRTC {}.{} was found first; update the driver, or `pip install nvidia-cuda-nvrtc-cu{driver}`",
            nvrtc.0, nvrtc.1
        )));
    }
    Ok(())
}

/// cuDNN, or none with a warning: our own kernels then serve attention.
fn open_cudnn(device: &Arc<Device>) -> Option<Sdpa> {
    match Cudnn::load().and_then(|lib| Sdpa::new(device.clone(), lib)) {
        Ok(s) => {
            tracing::info!(cudnn = s.version_text(), path = s.path(), "attention by cuDNN");
            Some(s)
        }
        Err(e) => {
            tracing::warn!(error = %e, "attention without cuDNN: our own kernels serve, three to five times slower, fifty times at head size 256");
            None
        }
    }
}
