//! A stream beside the compute stream, and the events that tie the two together.
#![allow(unsafe_code)] // calls into the driver

use crate::Result;
use crate::device::Device;
use crate::sys::driver::{CUevent, CUstream, NOT_READY};
use std::sync::{Arc, Mutex, PoisonError};

/// Events without timing, reused. What a wait waits for is settled when it is enqueued, so an event may be recorded anew then.
struct Pool {
    device: Arc<Device>,
    events: Mutex<Vec<Event>>,
}

struct Event(CUevent);
// SAFETY: used through the driver only, which may be called from any thread.
unsafe impl Send for Event {}
unsafe impl Sync for Event {}

impl Pool {
    fn take(&self) -> Result<Event> {
        if let Some(event) = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(event);
        }
        const DISABLE_TIMING: u32 = 2;
        let mut event = std::ptr::null_mut();
        // SAFETY: destroyed with the pool.
        self.device.driver.check(unsafe { (self.device.driver.cuEventCreate)(&mut event, DISABLE_TIMING) }, "cuEventCreate")?;
        Ok(Event(event))
    }

    fn give(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            for event in self.events.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
                // SAFETY: made by `take`, and nobody holds it.
                unsafe { (self.device.driver.cuEventDestroy_v2)(event.0) };
            }
        }
    }
}

/// The stream of a group.
pub(super) struct SideStream {
    device: Arc<Device>,
    stream: CUstream,
    pool: Arc<Pool>,
}

// SAFETY: as for `Event`.
unsafe impl Send for SideStream {}
unsafe impl Sync for SideStream {}

impl SideStream {
    /// A stream whose work goes before that of the compute stream, where both have work: others wait for what it does.
    pub fn new(device: &Arc<Device>) -> Result<SideStream> {
        device.bind()?;
        let driver = &device.driver;
        let (mut least, mut greatest, mut stream) = (0, 0, std::ptr::null_mut());
        const NON_BLOCKING: u32 = 1;
        // SAFETY: plain queries; the stream is destroyed in `drop`.
        unsafe {
            driver.check((driver.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest), "cuCtxGetStreamPriorityRange")?;
            driver.check((driver.cuStreamCreateWithPriority)(&mut stream, NON_BLOCKING, greatest), "cuStreamCreateWithPriority")?;
        }
        let pool = Arc::new(Pool { device: device.clone(), events: Mutex::default() });
        Ok(SideStream { device: device.clone(), stream, pool })
    }

    /// The stream, for NCCL.
    pub fn raw(&self) -> CUstream {
        self.stream
    }

    /// What comes next here comes after what is on the compute stream now.
    pub fn after_compute(&self) -> Result<()> {
        self.device.bind()?;
        let driver = &self.device.driver;
        let event = self.pool.take()?;
        // SAFETY: all three live.
        let tied = unsafe {
            driver
                .check((driver.cuEventRecord)(event.0, self.device.stream()), "cuEventRecord")
                .and_then(|()| driver.check((driver.cuStreamWaitEvent)(self.stream, event.0, 0), "cuStreamWaitEvent"))
        };
        self.pool.give(event);
        tied
    }

    /// Marks the present end of this stream.
    pub fn mark(&self) -> Result<Mark> {
        let event = self.pool.take()?;
        // SAFETY: both live.
        let recorded = unsafe { (self.device.driver.cuEventRecord)(event.0, self.stream) };
        let mark = Mark { event: Some(event), pool: self.pool.clone() };
        self.device.driver.check(recorded, "cuEventRecord").map(|()| mark)
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the last user is gone; the driver ends the stream when its work is done.
            unsafe { (self.device.driver.cuStreamDestroy_v2)(self.stream) };
        }
    }
}

/// A place in a [`SideStream`].
pub(super) struct Mark {
    event: Option<Event>,
    pool: Arc<Pool>,
}

impl Mark {
    fn raw(&self) -> CUevent {
        self.event.as_ref().map_or(std::ptr::null_mut(), |e| e.0)
    }

    /// Whether the stream has come past it.
    pub fn passed(&self) -> Result<bool> {
        let device = &self.pool.device;
        device.bind()?;
        // SAFETY: the event lives.
        match unsafe { (device.driver.cuEventQuery)(self.raw()) } {
            NOT_READY => Ok(false),
            status => device.driver.check(status, "cuEventQuery").map(|()| true),
        }
    }

    /// What comes next on the compute stream comes after it.
    pub fn before_compute(&self) -> Result<()> {
        let device = &self.pool.device;
        device.bind()?;
        // SAFETY: both live.
        device.driver.check(unsafe { (device.driver.cuStreamWaitEvent)(device.stream(), self.raw(), 0) }, "cuStreamWaitEvent")
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.pool.give(event);
        }
    }
}
