//! Matrix products: libcublasLt.

use super::{Spec, library};
use crate::{Error, Result};
pub use cudarc::cublas::sys::cublasOperation_t;
pub use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cudaDataType_t,
};
use std::ffi::{c_char, c_int, c_void};

/// Where cuBLASLt is and what to do without it.
pub const SPEC: Spec = Spec {
    name: "NVIDIA's matrix library (libcublasLt)",
    files: &["libcublasLt.so.13", "libcublasLt.so.12"],
    remedy: "`pip install nvidia-cublas` (or nvidia-cublas-cu12 for a CUDA 12 driver), or set CUDA_HOME to a CUDA toolkit",
    in_folders: true,
};

/// `cublasLtMatmulHeuristicResult_t` with its status as a plain integer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Heuristic {
    /// The algorithm.
    pub algo: cublasLtMatmulAlgo_t,
    /// Bytes of workspace it needs.
    pub workspace: usize,
    /// Whether it can be used (0).
    pub state: c_int,
    /// Waves of thread blocks.
    pub waves: f32,
    reserved: [c_int; 4],
}

library!(
    /// Functions of libcublasLt.
    CublasLt, SPEC, {
        fn cublasLtGetVersion() -> usize;
        fn cublasLtGetStatusString(status: c_int) -> *const c_char;
        fn cublasLtCreate(handle: *mut cublasLtHandle_t) -> c_int;
        fn cublasLtDestroy(handle: cublasLtHandle_t) -> c_int;
        fn cublasLtMatmulDescCreate(desc: *mut cublasLtMatmulDesc_t, compute: cublasComputeType_t, scale: cudaDataType_t) -> c_int;
        fn cublasLtMatmulDescDestroy(desc: cublasLtMatmulDesc_t) -> c_int;
        fn cublasLtMatmulDescSetAttribute(desc: cublasLtMatmulDesc_t, attribute: cublasLtMatmulDescAttributes_t, value: *const c_void, size: usize) -> c_int;
        fn cublasLtMatrixLayoutCreate(layout: *mut cublasLtMatrixLayout_t, dtype: cudaDataType_t, rows: u64, cols: u64, ld: i64) -> c_int;
        fn cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t) -> c_int;
        fn cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t) -> c_int;
        fn cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t) -> c_int;
        fn cublasLtMatmulPreferenceSetAttribute(preference: cublasLtMatmulPreference_t, attribute: cublasLtMatmulPreferenceAttributes_t, value: *const c_void, size: usize) -> c_int;
        fn cublasLtMatmulAlgoGetHeuristic(
            handle: cublasLtHandle_t, desc: cublasLtMatmulDesc_t, a: cublasLtMatrixLayout_t, b: cublasLtMatrixLayout_t,
            c: cublasLtMatrixLayout_t, d: cublasLtMatrixLayout_t, preference: cublasLtMatmulPreference_t,
            wanted: c_int, results: *mut Heuristic, got: *mut c_int,
        ) -> c_int;
        fn cublasLtMatmul(
            handle: cublasLtHandle_t, desc: cublasLtMatmulDesc_t, alpha: *const c_void, a: *const c_void, a_layout: cublasLtMatrixLayout_t,
            b: *const c_void, b_layout: cublasLtMatrixLayout_t, beta: *const c_void, c: *const c_void, c_layout: cublasLtMatrixLayout_t,
            d: *mut c_void, d_layout: cublasLtMatrixLayout_t, algo: *const cublasLtMatmulAlgo_t,
            workspace: *mut c_void, workspace_bytes: usize, stream: *mut c_void,
        ) -> c_int;
    }
);

impl CublasLt {
    /// Turns a status into an error that names the call.
    #[allow(unsafe_code)]
    pub fn check(&self, status: c_int, call: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string.
        let text = unsafe { std::ffi::CStr::from_ptr((self.cublasLtGetStatusString)(status)) };
        Err(Error::Call { call: call.to_string(), status, text: text.to_string_lossy().into_owned() })
    }
}
