//! Device memory: one address range as large as the card, backed by physical memory from its front as the heap grows.
//!
//! All blocks belong to the one stream, so a freed block may be handed out at once: whatever still uses it was enqueued
//! before whatever will. After warm-up the heap no longer grows, and no allocation reaches the driver.
#![allow(unsafe_code)] // calls into the driver

mod heap;
mod pinned;
mod staging;

use crate::device::Device;
use crate::sys::driver::*;
use crate::{Error, Result};
use heap::Heap;
pub use pinned::Pinned;
pub use staging::Staging;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use temper_tensor::{MemoryUse, OutOfMemory, Purpose};

/// Blocks are multiples of this many bytes and start at multiples of it.
const ALIGN: usize = 512;
/// The heap grows by at least this many bytes.
const GROWTH: usize = 256 << 20;

/// The heap.
pub struct Arena {
    device: Arc<Device>,
    base: CUdeviceptr,
    capacity: usize,
    granularity: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    heap: Heap,
    usage: MemoryUse,
    /// (offset, bytes, handle) of each piece of physical memory.
    pieces: Vec<(usize, usize, CUmemGenericAllocationHandle)>,
}

/// A block of device memory, given back on drop.
pub struct Block {
    arena: Arc<Arena>,
    offset: usize,
    size: usize,
    purpose: Purpose,
}

impl Block {
    /// Device address.
    pub fn address(&self) -> u64 {
        self.arena.base + self.offset as u64
    }

    /// Bytes, rounded up.
    pub fn size(&self) -> usize {
        self.size
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut s = self.arena.lock();
        s.heap.give(self.offset, self.size);
        s.usage.give(self.purpose, self.size);
    }
}

impl Arena {
    /// Reserves the address range; takes no memory yet.
    pub fn new(device: Arc<Device>) -> Result<Arena> {
        device.bind()?;
        let mut granularity = 0;
        let mut base = 0;
        let driver = &device.driver;
        let flag = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: plain queries and a reservation that `drop` frees.
        unsafe {
            driver.check(
                (driver.cuMemGetAllocationGranularity)(&mut granularity, &properties(&device), flag),
                "cuMemGetAllocationGranularity",
            )?;
        }
        let granularity = granularity.max(2 << 20);
        let capacity = device.memory.next_multiple_of(granularity);
        unsafe {
            driver.check((driver.cuMemAddressReserve)(&mut base, capacity, 0, 0, 0), "cuMemAddressReserve")?;
        }
        Ok(Arena { base, capacity, granularity, state: Mutex::default(), device })
    }

    /// A block of at least `bytes` bytes with unspecified contents.
    pub fn take(self: &Arc<Self>, bytes: usize, purpose: Purpose) -> Result<Block> {
        let size = bytes.max(1).next_multiple_of(ALIGN);
        let mut s = self.lock();
        let offset = match s.heap.take(size) {
            Some(offset) => offset,
            None => {
                self.grow(&mut s, size, purpose)?;
                s.heap.take(size).ok_or_else(|| self.out_of_memory(&s, size, purpose))?
            }
        };
        s.usage.take(purpose, size);
        Ok(Block { arena: self.clone(), offset, size, purpose })
    }

    /// Bytes by purpose.
    pub fn usage(&self) -> MemoryUse {
        MemoryUse { capacity: self.device.memory, ..self.lock().usage }
    }

    /// Starts the peaks anew.
    pub fn reset_peak(&self) {
        self.lock().usage.reset_peak();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Backs more of the range, so that `size` bytes fit at its end.
    fn grow(&self, s: &mut State, size: usize, purpose: Purpose) -> Result<()> {
        let least = (size - s.heap.tail().min(size)).next_multiple_of(self.granularity);
        let room = self.capacity - s.heap.end();
        if least > room {
            return Err(self.out_of_memory(s, size, purpose));
        }
        let generous = least.max(GROWTH).min(room);
        for bytes in [generous, least] {
            match self.map(s.heap.end(), bytes) {
                Ok(handle) => {
                    s.pieces.push((s.heap.end(), bytes, handle));
                    s.heap.grow(bytes);
                    s.usage.reserved += bytes;
                    s.usage.growths += 1;
                    return Ok(());
                }
                Err(Error::Call { status: OUT_OF_MEMORY, .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Err(self.out_of_memory(s, size, purpose))
    }

    /// Maps fresh physical memory at an offset of the range.
    fn map(&self, offset: usize, bytes: usize) -> Result<CUmemGenericAllocationHandle> {
        self.device.bind()?;
        let driver = &self.device.driver;
        let at = self.base + offset as u64;
        let prop = properties(&self.device);
        let access = CUmemAccessDesc { location: prop.location, flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        let mut handle = 0;
        // SAFETY: the range lies in our reservation and is not mapped yet; a failure undoes what was done before it.
        unsafe {
            driver.check((driver.cuMemCreate)(&mut handle, bytes, &prop, 0), "cuMemCreate")?;
            let mapped = driver.check((driver.cuMemMap)(at, bytes, 0, handle, 0), "cuMemMap");
            if let Err(e) = mapped {
                (driver.cuMemRelease)(handle);
                return Err(e);
            }
            let allowed = driver.check((driver.cuMemSetAccess)(at, bytes, &access, 1), "cuMemSetAccess");
            if let Err(e) = allowed {
                (driver.cuMemUnmap)(at, bytes);
                (driver.cuMemRelease)(handle);
                return Err(e);
            }
        }
        Ok(handle)
    }

    fn out_of_memory(&self, s: &State, wanted: usize, purpose: Purpose) -> Error {
        let (free, total) = self.device.memory_info().unwrap_or((0, self.device.memory));
        let (held, largest) = (s.usage.now, Some(s.heap.largest()));
        Error::OutOfMemory(Box::new(OutOfMemory { of: "GPU", purpose, wanted, total, free: Some(free), held, largest }))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        let driver = &self.device.driver;
        for (offset, bytes, handle) in self.lock().pieces.drain(..) {
            // SAFETY: every block is gone, since each holds the arena.
            unsafe {
                (driver.cuMemUnmap)(self.base + offset as u64, bytes);
                (driver.cuMemRelease)(handle);
            }
        }
        unsafe { (driver.cuMemAddressFree)(self.base, self.capacity) };
    }
}

/// Plain memory of this device.
fn properties(device: &Device) -> CUmemAllocationProp {
    // SAFETY: a plain C struct for which zero is valid.
    let mut prop: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device.ordinal();
    prop
}
