//! Exchange between GPUs: libnccl. Signatures and constants are those of `nccl.h`, 2.18 (which brought `ncclCommSplit`) and later.

use super::{Spec, driver::CUstream, library};
use crate::{Error, Result};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Where NCCL is and what to do without it.
pub const SPEC: Spec = Spec {
    name: "NVIDIA's library for exchange between GPUs (libnccl)",
    files: &["libnccl.so.2"],
    remedy: "`pip install nvidia-nccl-cu13` (or nvidia-nccl-cu12 for a CUDA 12 driver), 2.18 or newer, or install the package libnccl2",
    in_folders: true,
};

/// `ncclComm_t`.
pub type Comm = *mut c_void;

/// `ncclUniqueId`: how the ranks of a communicator find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` as of 2.18; newer libraries read the fields that the version in it has.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Default for Config {
    /// Calls return when they are done; all else is left to NCCL (`NCCL_CONFIG_INITIALIZER`).
    fn default() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
/// `NCCL_SPLIT_NOCOLOR`: this rank takes part in the split without belonging to a new communicator.
pub const NO_COLOR: c_int = -1;
/// `ncclInvalidArgument`.
pub const INVALID_ARGUMENT: c_int = 4;
/// `ncclInvalidUsage`.
pub const INVALID_USAGE: c_int = 5;
/// `ncclInProgress`.
pub const IN_PROGRESS: c_int = 7;

/// `ncclDataType_t`.
pub mod dtype {
    use std::ffi::c_int;
    /// 32-bit integers.
    pub const INT32: c_int = 2;
    /// IEEE half precision.
    pub const FLOAT16: c_int = 6;
    /// Single precision.
    pub const FLOAT32: c_int = 7;
    /// Double precision.
    pub const FLOAT64: c_int = 8;
    /// bfloat16.
    pub const BFLOAT16: c_int = 9;
}

/// `ncclRedOp_t`.
pub mod reduce {
    use std::ffi::c_int;
    /// Sum.
    pub const SUM: c_int = 0;
    /// Maximum.
    pub const MAX: c_int = 2;
}

library!(
    /// Functions of libnccl.
    Nccl, SPEC, {
        fn ncclGetVersion(version: *mut c_int) -> c_int;
        fn ncclGetErrorString(result: c_int) -> *const c_char;
        fn ncclGetLastError(comm: Comm) -> *const c_char;
        fn ncclGetUniqueId(id: *mut UniqueId) -> c_int;
        fn ncclCommInitRankConfig(comm: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int, config: *mut Config) -> c_int;
        fn ncclCommSplit(comm: Comm, color: c_int, key: c_int, new: *mut Comm, config: *mut Config) -> c_int;
        fn ncclCommGetAsyncError(comm: Comm, error: *mut c_int) -> c_int;
        fn ncclCommAbort(comm: Comm) -> c_int;
        fn ncclCommDestroy(comm: Comm) -> c_int;
        fn ncclGroupStart() -> c_int;
        fn ncclGroupEnd() -> c_int;
        fn ncclAllReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Comm, stream: CUstream) -> c_int;
        fn ncclAllGather(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, comm: Comm, stream: CUstream) -> c_int;
        fn ncclReduceScatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Comm, stream: CUstream)
            -> c_int;
        fn ncclBroadcast(send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: CUstream)
            -> c_int;
        fn ncclSend(send: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: CUstream) -> c_int;
        fn ncclRecv(recv: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: CUstream) -> c_int;
    }
);

impl Nccl {
    /// The version, as 10000 x major + 100 x minor + patch.
    #[allow(unsafe_code)]
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: plain query.
        self.check(unsafe { (self.ncclGetVersion)(&mut version) }, "ncclGetVersion").map(|()| version)
    }

    /// Turns a status into an error that names the call.
    pub fn check(&self, status: c_int, call: &str) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(Error::Call { call: call.to_string(), status, text: self.text(status) }) }
    }

    /// A status in NCCL's words, with the last warning that NCCL wrote (its log has all of them with `NCCL_DEBUG=WARN`).
    #[allow(unsafe_code)]
    pub fn text(&self, status: c_int) -> String {
        let words = |text: *const c_char| {
            // SAFETY: NCCL returns static or thread-local strings, or none.
            if text.is_null() { String::new() } else { unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned() }
        };
        // SAFETY: as above; the communicator is not looked at.
        let (text, last) = unsafe { (words((self.ncclGetErrorString)(status)), words((self.ncclGetLastError)(std::ptr::null_mut()))) };
        if last.is_empty() { text } else { format!("{text}: {}", last.trim()) }
    }
}
