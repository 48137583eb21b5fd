//! Pinned host memory that the GPU reads and writes in place, over the bus: for state that is touched once a step.
#![allow(unsafe_code)] // calls into the driver

use crate::device::Device;
use crate::{Error, Result};
use std::sync::Arc;

/// A block of pinned host memory; its host address is its device address.
pub struct Pinned {
    device: Arc<Device>,
    base: *mut u8,
}

// SAFETY: the memory is reached through operations of the one stream only.
unsafe impl Send for Pinned {}
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` of zeros.
    ///
    /// # Errors
    /// When the system does not give as much pinned memory, with what to change.
    pub fn zeros(device: Arc<Device>, bytes: usize) -> Result<Pinned> {
        device.bind()?;
        let mut base = std::ptr::null_mut();
        // SAFETY: freed in `drop`.
        let status = unsafe { (device.driver.cuMemAllocHost_v2)(&mut base, bytes.max(1)) };
        device.driver.check(status, "cuMemAllocHost").map_err(|e| {
            Error::Unsupported(format!(
                "{:.2} GiB of pinned host memory for the optimizer (memory.offload_optimizer) were refused: {e}. Free host memory, raise the \
                 limit of locked memory (ulimit -l), or use precision.moments = \"bfloat16\"",
                bytes as f64 / (1u64 << 30) as f64
            ))
        })?;
        let pinned = Pinned { device, base: base.cast() };
        // SAFETY: the block is ours and as long as that.
        let block = unsafe { std::slice::from_raw_parts_mut(pinned.base, bytes) };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let part = bytes.div_ceil(threads).max(1 << 20);
        std::thread::scope(|scope| block.chunks_mut(part).for_each(|chunk| drop(scope.spawn(|| chunk.fill(0)))));
        Ok(pinned)
    }

    /// Address of the first byte, for host and device.
    pub fn address(&self) -> u64 {
        self.base as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Work that still uses it must be done first.
        if self.device.synchronize().is_ok() {
            // SAFETY: allocated in `zeros`, and nothing uses it any more.
            unsafe { (self.device.driver.cuMemFreeHost)(self.base.cast()) };
        }
    }
}
