//! Pinned host memory through which small uploads pass without waiting for the device.
#![allow(unsafe_code)] // calls into the driver

use crate::Result;
use crate::device::{Device, Event};
use std::sync::{Arc, Mutex, PoisonError};

/// Slots, and bytes of each. Larger uploads go directly, and wait.
const SLOTS: usize = 8;
const SLOT_BYTES: usize = 4 << 20;

/// A ring of pinned buffers.
pub struct Staging {
    device: Arc<Device>,
    base: *mut u8,
    ring: Mutex<Ring>,
}

struct Ring {
    next: usize,
    /// Passed when a slot's last upload is done.
    events: Vec<Event>,
}

// SAFETY: the memory is reached under the lock only.
unsafe impl Send for Staging {}
unsafe impl Sync for Staging {}

impl Staging {
    /// Allocates the ring.
    pub fn new(device: Arc<Device>) -> Result<Staging> {
        device.bind()?;
        let mut base = std::ptr::null_mut();
        // SAFETY: freed in `drop`.
        device.driver.check(unsafe { (device.driver.cuMemAllocHost_v2)(&mut base, SLOTS * SLOT_BYTES) }, "cuMemAllocHost")?;
        let events = (0..SLOTS).map(|_| device.event()).collect::<Result<_>>()?;
        Ok(Staging { device, base: base.cast(), ring: Mutex::new(Ring { next: 0, events }) })
    }

    /// Copies host bytes to device memory at `to`. The bytes are free for other use when this returns.
    ///
    /// # Safety
    /// `to` must hold as many bytes of device memory.
    pub unsafe fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        if bytes.len() > SLOT_BYTES {
            unsafe { self.device.upload(to, bytes.as_ptr().cast(), bytes.len())? };
            return self.device.synchronize();
        }
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = ring.next;
        ring.next = (slot + 1) % SLOTS;
        ring.events[slot].wait()?;
        // SAFETY: the slot is ours until its event is passed again.
        unsafe {
            let at = self.base.add(slot * SLOT_BYTES);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len());
            self.device.upload(to, at.cast(), bytes.len())?;
        }
        ring.events[slot].record()
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.device.synchronize().is_ok() {
            unsafe { (self.device.driver.cuMemFreeHost)(self.base.cast()) };
        }
    }
}
