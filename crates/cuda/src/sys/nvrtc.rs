//! The run-time compiler: libnvrtc.

use super::{Spec, library};
use std::ffi::{c_char, c_int};

/// Where NVRTC is and what to do without it.
pub const SPEC: Spec = Spec {
    name: "NVIDIA's run-time compiler (libnvrtc)",
    files: &["libnvrtc.so.13", "libnvrtc.so.12"],
    remedy: "`pip install nvidia-cuda-nvrtc` (or nvidia-cuda-nvrtc-cu12 for a CUDA 12 driver), or set CUDA_HOME to a CUDA toolkit",
    in_folders: true,
};

/// An opaque program.
pub type Program = *mut std::ffi::c_void;

library!(
    /// Functions of libnvrtc.
    Nvrtc, SPEC, {
        fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int;
        fn nvrtcGetErrorString(result: c_int) -> *const c_char;
        fn nvrtcCreateProgram(program: *mut Program, source: *const c_char, name: *const c_char, headers: c_int,
            sources: *const *const c_char, names: *const *const c_char) -> c_int;
        fn nvrtcDestroyProgram(program: *mut Program) -> c_int;
        fn nvrtcCompileProgram(program: Program, count: c_int, options: *const *const c_char) -> c_int;
        fn nvrtcGetProgramLogSize(program: Program, size: *mut usize) -> c_int;
        fn nvrtcGetProgramLog(program: Program, log: *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize(program: Program, size: *mut usize) -> c_int;
        fn nvrtcGetCUBIN(program: Program, cubin: *mut c_char) -> c_int;
    }
);
