//! One NCCL communicator. Making one can block for ever when another rank does not come, so it happens on a thread of its own with a
//! limit; operations are enqueued by the caller's thread (NCCL's way of not blocking costs a thread per operation, and CUDA graphs).
#![allow(unsafe_code)] // calls into NCCL

use super::transport;
use crate::device::Device;
use crate::sys::nccl::{Comm, Config, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, NO_COLOR, Nccl, UniqueId};
use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, Once, TryLockError};
use std::time::{Duration, Instant};
use temper_comm::{Error, Result};

/// How long an orderly end of a communicator may take.
const DESTROY: Duration = Duration::from_secs(5);
/// How long an abort waits for a call that is inside NCCL.
const BUSY: Duration = Duration::from_secs(2);

/// Sets what the process needs and the user has not set (see [`super::ENVIRONMENT`]).
pub(super) fn prepare_environment() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (key, value) in &super::ENVIRONMENT[..2] {
            if std::env::var_os(key).is_none() {
                // SAFETY: Rust's own accesses are locked against this one, and NCCL, which reads these, is not loaded yet. What is
                // left is other C code that reads the environment at this very moment, when a process opens its GPU.
                unsafe { std::env::set_var(key, value) };
            }
        }
    });
}

/// A new identifier, for rank 0 to hand out.
pub(super) fn new_id(library: &Nccl) -> crate::Result<UniqueId> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: writes the identifier.
    library.check(unsafe { (library.ncclGetUniqueId)(&mut id) }, "ncclGetUniqueId").map(|()| id)
}

/// Runs `work` on a thread; `None` when it takes longer than `limit`, after which the thread is left alone.
fn within<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Result<Option<T>> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name("temper-nccl".into());
    thread.spawn(move || drop(sender.send(work()))).map_err(transport)?;
    Ok(receiver.recv_timeout(limit).ok())
}

/// A handle that may go from thread to thread.
struct Handle(Comm);
// SAFETY: NCCL's communicators may be used from any thread, one at a time.
unsafe impl Send for Handle {}

/// A communicator.
pub(super) struct Communicator {
    library: Arc<Nccl>,
    device: Arc<Device>,
    /// Null after an abort.
    handle: AtomicPtr<std::ffi::c_void>,
    /// Held by the call that is inside NCCL.
    inside: Mutex<()>,
}

impl Communicator {
    fn new(library: &Arc<Nccl>, device: &Arc<Device>, handle: Handle) -> Communicator {
        Communicator { library: library.clone(), device: device.clone(), handle: AtomicPtr::new(handle.0), inside: Mutex::default() }
    }

    /// Makes the communicator of all ranks.
    pub fn join(
        library: &Arc<Nccl>,
        device: &Arc<Device>,
        id: UniqueId,
        size: usize,
        rank: usize,
        limit: Duration,
    ) -> Result<Communicator> {
        let (l, d) = (library.clone(), device.clone());
        let made = within(limit, move || -> crate::Result<Handle> {
            d.bind()?;
            let mut handle = std::ptr::null_mut();
            let mut config = Config::default();
            // SAFETY: the device of this thread is the rank's; the pointers outlive the call.
            let status = unsafe { (l.ncclCommInitRankConfig)(&mut handle, size as c_int, id, rank as c_int, &mut config) };
            l.check(status, &format!("ncclCommInitRankConfig (rank {rank} of {size})")).map(|()| Handle(handle))
        })?;
        match made {
            Some(handle) => Ok(Communicator::new(library, device, handle.map_err(transport)?)),
            None => Err(transport(format!(
                "rank {rank}: NCCL did not connect the GPUs of {size} ranks within {} s. NCCL_DEBUG=INFO shows what it tries; the usual cause is a \
                 network interface that other hosts do not reach (NCCL_SOCKET_IFNAME)",
                limit.as_secs()
            ))),
        }
    }

    /// Makes a communicator of the ranks that give the same `color`, in the order of their `key`s; `None` for ranks without one.
    /// Every rank of this communicator calls it.
    pub fn split(&self, color: Option<usize>, key: usize, limit: Duration, name: &str) -> Result<Option<Communicator>> {
        let (library, device, parent) = (self.library.clone(), self.device.clone(), Handle(self.handle.load(Ordering::Acquire)));
        let color = color.map_or(NO_COLOR, |c| c as c_int);
        let what = format!("ncclCommSplit (group {name})");
        let call = what.clone();
        let made = within(limit, move || -> crate::Result<Handle> {
            let parent = parent; // as a whole, for the pointer within cannot be sent
            device.bind()?;
            let mut handle = std::ptr::null_mut();
            let mut config = Config::default();
            // SAFETY: as for `join`; the parent is not used by another thread meanwhile, as groups are made one after another.
            let status = unsafe { (library.ncclCommSplit)(parent.0, color, key as c_int, &mut handle, &mut config) };
            library.check(status, &call).map(|()| Handle(handle))
        })?;
        match made {
            Some(Ok(handle)) if handle.0.is_null() => Ok(None),
            Some(handle) => Ok(Some(Communicator::new(&self.library, &self.device, handle.map_err(transport)?))),
            None => Err(transport(format!(
                "{what} did not end within {} s: a rank does not take part, or the network stands still",
                limit.as_secs()
            ))),
        }
    }

    /// Runs a call of NCCL. The error says whether the communicator is broken by it.
    pub fn call(&self, what: &str, call: impl FnOnce(&Nccl, Comm) -> c_int) -> std::result::Result<(), CallError> {
        let _inside = self.inside.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            return Err(CallError { broken: true, text: format!("{what}: the communicator was aborted") });
        }
        let status = call(&self.library, handle);
        let broken = !matches!(status, INVALID_ARGUMENT | INVALID_USAGE);
        self.library.check(status, what).map_err(|e| CallError { broken, text: e.to_string() })
    }

    /// An error that NCCL found by itself, since.
    pub fn asynchronous_error(&self) -> Option<String> {
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            return None;
        }
        let mut error = 0;
        // SAFETY: the handle is alive: only the caller, the watchdog, aborts, and `drop` needs the last reference.
        let status = unsafe { (self.library.ncclCommGetAsyncError)(handle, &mut error) };
        let found = if status != 0 { status } else { error };
        (found != 0 && found != IN_PROGRESS).then(|| self.library.text(found))
    }

    /// Ends all operations under way, without their work being done.
    pub fn abort(&self) {
        let handle = self.handle.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if handle.is_null() {
            return;
        }
        let begun = Instant::now();
        // A call inside NCCL that waits for another rank leaves it only when aborted.
        while let Err(TryLockError::WouldBlock) = self.inside.try_lock() {
            if begun.elapsed() > BUSY {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let library = self.library.clone();
        let (device, handle) = (self.device.clone(), Handle(handle));
        let aborted = within(DESTROY, move || {
            let handle = handle;
            let _ = device.bind();
            // SAFETY: nobody finds the handle any more.
            unsafe { (library.ncclCommAbort)(handle.0) }
        });
        if !matches!(aborted, Ok(Some(_))) {
            tracing::warn!("NCCL did not abort a communicator within {} s", DESTROY.as_secs());
        }
    }
}

/// Why a call failed.
pub(super) struct CallError {
    /// The communicator is of no use any more.
    pub broken: bool,
    pub text: String,
}

impl CallError {
    /// As an error at a place.
    pub fn at(self, place: String) -> Error {
        Error::Call { place, what: self.text }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let handle = Handle(*self.handle.get_mut());
        if handle.0.is_null() {
            return;
        }
        let (library, device) = (self.library.clone(), self.device.clone());
        let destroyed = within(DESTROY, move || {
            let handle = handle;
            let _ = device.bind();
            // SAFETY: this was the last reference.
            unsafe { (library.ncclCommDestroy)(handle.0) }
        });
        if !matches!(destroyed, Ok(Some(0))) {
            tracing::warn!("an NCCL communicator did not end in order, perhaps because another rank is gone");
        }
    }
}
