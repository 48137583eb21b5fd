//! The GPU, its context and the one stream on which everything is enqueued.
#![allow(unsafe_code)] // calls into the driver

use crate::sys::driver::{CUcontext, CUdevice, CUdevice_attribute as Attribute, CUevent, CUstream, Driver};
use crate::{Error, Result};
use std::cell::Cell;
use std::ffi::c_void;

/// An open GPU.
pub struct Device {
    /// The driver's functions.
    pub driver: Driver,
    /// Name, for example `NVIDIA H200`.
    pub name: String,
    /// Compute capability, for example (9, 0).
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of device memory.
    pub memory: usize,
    /// Largest shared memory of a thread block, in bytes.
    pub max_shared: usize,
    /// Newest CUDA version the driver supports, for example 13000.
    pub driver_version: u32,
    ordinal: CUdevice,
    context: CUcontext,
    stream: CUstream,
}

// SAFETY: the handles are used through the driver only, which may be called from any thread.
unsafe impl Send for Device {}
unsafe impl Sync for Device {}

thread_local! {
    /// The context that is current on this thread.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Whether this machine has an NVIDIA GPU with a driver. A driver that is there but fails counts: opening it tells why.
pub fn present() -> bool {
    /// `CUDA_ERROR_STUB_LIBRARY` and `CUDA_ERROR_NO_DEVICE`.
    const NONE: [i32; 2] = [34, 100];
    let Ok(driver) = Driver::load() else { return false };
    let mut count = 0;
    // SAFETY: plain queries.
    match unsafe { (driver.cuInit)(0) } {
        0 => unsafe { (driver.cuDeviceGetCount)(&mut count) != 0 || count > 0 },
        status => !NONE.contains(&status),
    }
}

/// GPUs that this process sees; 0 without a driver or where it fails.
pub fn count() -> usize {
    let Ok(driver) = Driver::load() else { return 0 };
    let mut count = 0;
    // SAFETY: plain queries, which take no memory on a device.
    let found = unsafe { (driver.cuInit)(0) == 0 && (driver.cuDeviceGetCount)(&mut count) == 0 };
    if found { usize::try_from(count).unwrap_or(0) } else { 0 }
}

/// Name and bytes of memory of GPU number `ordinal`, without opening it.
pub fn card(ordinal: usize) -> Option<(String, u64)> {
    let driver = Driver::load().ok()?;
    let (mut device, mut memory, mut name) = (0, 0, [0u8; 256]);
    // SAFETY: plain queries with valid pointers, which take no memory on a device.
    let found = unsafe {
        (driver.cuInit)(0) == 0
            && (driver.cuDeviceGet)(&mut device, i32::try_from(ordinal).ok()?) == 0
            && (driver.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as i32, device) == 0
            && (driver.cuDeviceTotalMem_v2)(&mut memory, device) == 0
    };
    found.then(|| (text(&name), memory as u64))
}

/// Text that ends with a zero.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

impl Device {
    /// Opens GPU number `ordinal` of the visible ones.
    pub fn open(driver: Driver, ordinal: usize) -> Result<Device> {
        let mut version = 0;
        let mut count = 0;
        // SAFETY: plain queries with valid pointers.
        unsafe {
            driver.check((driver.cuInit)(0), "cuInit")?;
            driver.check((driver.cuDriverGetVersion)(&mut version), "cuDriverGetVersion")?;
            driver.check((driver.cuDeviceGetCount)(&mut count), "cuDeviceGetCount")?;
        }
        if ordinal >= count.max(0) as usize {
            return Err(Error::Unsupported(format!("GPU {ordinal} was asked for, but {count} are visible (see CUDA_VISIBLE_DEVICES)")));
        }
        let mut device = 0;
        let (mut context, mut stream): (CUcontext, CUstream) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut memory = 0;
        let mut name = [0u8; 256];
        // SAFETY: `device` is valid after the first call; the context is released in `drop`.
        unsafe {
            driver.check((driver.cuDeviceGet)(&mut device, ordinal as i32), "cuDeviceGet")?;
            driver.check((driver.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as i32, device), "cuDeviceGetName")?;
            driver.check((driver.cuDeviceTotalMem_v2)(&mut memory, device), "cuDeviceTotalMem")?;
            driver.check((driver.cuDevicePrimaryCtxRetain)(&mut context, device), "cuDevicePrimaryCtxRetain")?;
            driver.check((driver.cuCtxSetCurrent)(context), "cuCtxSetCurrent")?;
            const NON_BLOCKING: u32 = 1;
            driver.check((driver.cuStreamCreate)(&mut stream, NON_BLOCKING), "cuStreamCreate")?;
        }
        let mut d = Device {
            name: text(&name),
            capability: (0, 0),
            multiprocessors: 0,
            memory,
            max_shared: 0,
            driver_version: version as u32,
            ordinal: device,
            context,
            stream,
            driver,
        };
        d.capability = (
            d.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            d.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        );
        d.multiprocessors = d.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        d.max_shared = d.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        d.require()?;
        Ok(d)
    }

    /// Refuses devices that the kernels cannot run on.
    fn require(&self) -> Result<()> {
        if self.capability < (8, 0) {
            let (a, b) = self.capability;
            return Err(Error::Unsupported(format!("{} has compute capability {a}.{b}; 8.0 (A100) or newer is needed", self.name)));
        }
        if self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? == 0 {
            return Err(Error::Unsupported(format!("{}: the driver has no virtual memory management here", self.name)));
        }
        Ok(())
    }

    /// A device attribute.
    pub fn attribute(&self, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: plain query.
        self.driver
            .check(unsafe { (self.driver.cuDeviceGetAttribute)(&mut value, attribute, self.ordinal) }, "cuDeviceGetAttribute")
            .map(|()| value)
    }

    /// Ordinal of the device, as the driver's memory calls want it.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// What no other GPU in the world has.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: writes 16 bytes.
        self.driver.check(unsafe { (self.driver.cuDeviceGetUuid_v2)(&mut uuid, self.ordinal) }, "cuDeviceGetUuid").map(|()| uuid)
    }

    /// Makes the context current on this thread; cheap when it is already.
    pub fn bind(&self) -> Result<()> {
        let key = self.context as usize;
        if CURRENT.get() != key {
            // SAFETY: the context lives as long as `self`.
            self.driver.check(unsafe { (self.driver.cuCtxSetCurrent)(self.context) }, "cuCtxSetCurrent")?;
            CURRENT.set(key);
        }
        Ok(())
    }

    /// The stream.
    pub fn stream(&self) -> CUstream {
        self.stream
    }

    /// The name of the real architecture for NVRTC, for example `sm_90a` (Hopper's own instructions need the `a`).
    pub fn arch(&self) -> String {
        let (a, b) = self.capability;
        if (a, b) == (9, 0) { "sm_90a".to_string() } else { format!("sm_{a}{b}") }
    }

    /// Waits until the stream is empty.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        self.driver.check(unsafe { (self.driver.cuStreamSynchronize)(self.stream) }, "cuStreamSynchronize")
    }

    /// Bytes free on the device, and its total.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: plain query.
        self.driver.check(unsafe { (self.driver.cuMemGetInfo_v2)(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    /// Sets `bytes` bytes at `address`.
    ///
    /// # Safety
    /// The range must be device memory of this process.
    pub unsafe fn memset(&self, address: u64, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        self.driver.check(unsafe { (self.driver.cuMemsetD8Async)(address, value, bytes, self.stream) }, "cuMemsetD8Async")
    }

    /// Copies within device memory.
    ///
    /// # Safety
    /// Both ranges must be device memory of this process and must not overlap.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        self.driver.check(unsafe { (self.driver.cuMemcpyDtoDAsync_v2)(to, from, bytes, self.stream) }, "cuMemcpyDtoDAsync")
    }

    /// Copies to the device. From pageable memory the driver has taken the bytes when this returns.
    ///
    /// # Safety
    /// `to` must hold `bytes` bytes; pinned host memory must stay unchanged until the stream has passed.
    pub unsafe fn upload(&self, to: u64, from: *const c_void, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        self.driver.check(unsafe { (self.driver.cuMemcpyHtoDAsync_v2)(to, from, bytes, self.stream) }, "cuMemcpyHtoDAsync")
    }

    /// Copies to the host and waits.
    pub fn download(&self, to: &mut [u8], from: u64) -> Result<()> {
        if !to.is_empty() {
            self.bind()?;
            // SAFETY: `to` is valid for its length; the wait below ends the copy before it is used.
            let status = unsafe { (self.driver.cuMemcpyDtoHAsync_v2)(to.as_mut_ptr().cast(), from, to.len(), self.stream) };
            self.driver.check(status, "cuMemcpyDtoHAsync")?;
        }
        self.synchronize()
    }

    /// A new event.
    pub fn event(self: &std::sync::Arc<Self>) -> Result<Event> {
        self.bind()?;
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: destroyed in `drop`.
        self.driver.check(unsafe { (self.driver.cuEventCreate)(&mut event, 0) }, "cuEventCreate")?;
        Ok(Event { event, device: self.clone() })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: nothing uses the stream any more; errors at the end have no one to go to.
        unsafe {
            (self.driver.cuCtxSetCurrent)(self.context);
            (self.driver.cuStreamSynchronize)(self.stream);
            (self.driver.cuStreamDestroy_v2)(self.stream);
            (self.driver.cuDevicePrimaryCtxRelease_v2)(self.ordinal);
        }
        CURRENT.set(0);
    }
}

/// A point of the stream.
pub struct Event {
    event: CUevent,
    device: std::sync::Arc<Device>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Event {}
unsafe impl Sync for Event {}

impl Event {
    /// Marks the present end of the stream.
    pub fn record(&self) -> Result<()> {
        self.device.bind()?;
        self.device.driver.check(unsafe { (self.device.driver.cuEventRecord)(self.event, self.device.stream) }, "cuEventRecord")
    }

    /// Waits until the stream has passed the mark.
    pub fn wait(&self) -> Result<()> {
        self.device.bind()?;
        self.device.driver.check(unsafe { (self.device.driver.cuEventSynchronize)(self.event) }, "cuEventSynchronize")
    }

    /// Milliseconds from `earlier` to this one; both must have been waited for.
    pub fn since(&self, earlier: &Event) -> Result<f64> {
        let mut ms = 0f32;
        let driver = &self.device.driver;
        driver.check(unsafe { (driver.cuEventElapsedTime)(&mut ms, earlier.event, self.event) }, "cuEventElapsedTime")?;
        Ok(ms as f64)
    }
}

impl temper_tensor::Stamp for Event {
    fn ms_since(&self, earlier: &dyn temper_tensor::Stamp) -> temper_tensor::Result<f64> {
        let earlier = earlier.as_any().downcast_ref::<Event>();
        let earlier = earlier.ok_or_else(|| temper_tensor::Error::Backend("a mark of another backend".into()))?;
        self.wait()?;
        Ok(self.since(earlier)?)
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            unsafe { (self.device.driver.cuEventDestroy_v2)(self.event) };
        }
    }
}
