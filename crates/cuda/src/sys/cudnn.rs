//! Fused attention: libcudnn, of which only the backend (graph) interface is used.

use super::{Spec, library};
use crate::{Error, Result};
pub use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, cudnnBackendDescriptor_t, cudnnBackendDescriptorType_t,
    cudnnBackendHeurMode_t, cudnnDataType_t, cudnnHandle_t, cudnnPointwiseMode_t, cudnnReduceTensorOp_t,
};
use std::ffi::{c_char, c_int, c_void};

/// Where cuDNN is and what to do without it.
pub const SPEC: Spec = Spec {
    name: "NVIDIA's cuDNN (libcudnn.so.9)",
    files: &["libcudnn.so.9"],
    remedy: "`pip install nvidia-cudnn-cu13` (or nvidia-cudnn-cu12 for a CUDA 12 driver), version 9.19 or newer",
    in_folders: true,
};

library!(
    /// Functions of libcudnn.
    Cudnn, SPEC, {
        fn cudnnGetVersion() -> usize;
        fn cudnnCreate(handle: *mut cudnnHandle_t) -> c_int;
        fn cudnnDestroy(handle: cudnnHandle_t) -> c_int;
        fn cudnnSetStream(handle: cudnnHandle_t, stream: *mut c_void) -> c_int;
        fn cudnnGetLastErrorString(text: *mut c_char, len: usize);
        fn cudnnBackendCreateDescriptor(kind: cudnnBackendDescriptorType_t, descriptor: *mut cudnnBackendDescriptor_t) -> c_int;
        fn cudnnBackendDestroyDescriptor(descriptor: cudnnBackendDescriptor_t) -> c_int;
        fn cudnnBackendFinalize(descriptor: cudnnBackendDescriptor_t) -> c_int;
        fn cudnnBackendSetAttribute(descriptor: cudnnBackendDescriptor_t, name: cudnnBackendAttributeName_t, kind: cudnnBackendAttributeType_t,
            count: i64, values: *const c_void) -> c_int;
        fn cudnnBackendGetAttribute(descriptor: cudnnBackendDescriptor_t, name: cudnnBackendAttributeName_t, kind: cudnnBackendAttributeType_t,
            wanted: i64, got: *mut i64, values: *mut c_void) -> c_int;
        fn cudnnBackendExecute(handle: cudnnHandle_t, plan: cudnnBackendDescriptor_t, pack: cudnnBackendDescriptor_t) -> c_int;
    }
);

impl Cudnn {
    /// Turns a status into an error that names the call.
    #[allow(unsafe_code)]
    pub fn check(&self, status: c_int, call: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut text = vec![0u8; 4096];
        // SAFETY: writes at most `len` bytes, NUL-terminated.
        unsafe { (self.cudnnGetLastErrorString)(text.as_mut_ptr().cast(), text.len()) };
        let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
        Err(Error::Call { call: format!("cuDNN {call}"), status, text: String::from_utf8_lossy(&text[..end]).into_owned() })
    }
}
