//! The driver: libcuda.

use super::{Spec, library};
use crate::{Error, Result};
pub use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle,
    CUmemLocationType, CUmodule, CUstream, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// Where the driver is and what to do without it.
pub const SPEC: Spec = Spec {
    name: "NVIDIA's driver (libcuda.so.1)",
    files: &["libcuda.so.1"],
    remedy: "install NVIDIA's driver 570 or newer; in a container, start it with the GPU passed through",
    in_folders: false,
};

library!(
    /// Functions of libcuda.
    Driver, SPEC, {
        fn cuInit(flags: c_uint) -> c_int;
        fn cuDriverGetVersion(version: *mut c_int) -> c_int;
        fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int;
        fn cuDeviceGetCount(count: *mut c_int) -> c_int;
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> c_int;
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) -> c_int;
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> c_int;
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) -> c_int;
        fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) -> c_int;
        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> c_int;
        fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> c_int;
        fn cuCtxSetCurrent(context: CUcontext) -> c_int;
        fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> c_int;
        fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int) -> c_int;
        fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int;
        fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> c_int;
        fn cuStreamDestroy_v2(stream: CUstream) -> c_int;
        fn cuStreamSynchronize(stream: CUstream) -> c_int;
        fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> c_int;
        fn cuEventDestroy_v2(event: CUevent) -> c_int;
        fn cuEventRecord(event: CUevent, stream: CUstream) -> c_int;
        fn cuEventQuery(event: CUevent) -> c_int;
        fn cuEventSynchronize(event: CUevent) -> c_int;
        fn cuEventElapsedTime(ms: *mut f32, start: CUevent, end: CUevent) -> c_int;
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
        fn cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize) -> c_int;
        fn cuMemFreeHost(pointer: *mut c_void) -> c_int;
        fn cuMemAddressReserve(pointer: *mut CUdeviceptr, size: usize, alignment: usize, address: CUdeviceptr, flags: c_ulonglong) -> c_int;
        fn cuMemAddressFree(pointer: CUdeviceptr, size: usize) -> c_int;
        fn cuMemGetAllocationGranularity(size: *mut usize, prop: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags) -> c_int;
        fn cuMemCreate(handle: *mut CUmemGenericAllocationHandle, size: usize, prop: *const CUmemAllocationProp, flags: c_ulonglong) -> c_int;
        fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> c_int;
        fn cuMemMap(pointer: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong) -> c_int;
        fn cuMemUnmap(pointer: CUdeviceptr, size: usize) -> c_int;
        fn cuMemSetAccess(pointer: CUdeviceptr, size: usize, desc: *const CUmemAccessDesc, count: usize) -> c_int;
        fn cuMemsetD8Async(pointer: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) -> c_int;
        fn cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream) -> c_int;
        fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream) -> c_int;
        fn cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) -> c_int;
        fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> c_int;
        fn cuModuleUnload(module: CUmodule) -> c_int;
        fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> c_int;
        fn cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction) -> c_int;
        fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int) -> c_int;
        fn cuLaunchKernel(
            function: CUfunction,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared: c_uint, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void,
        ) -> c_int;
        fn cuTensorMapEncodeTiled(
            map: *mut CUtensorMap, dtype: CUtensorMapDataType, rank: c_uint, address: *mut c_void,
            dims: *const u64, strides: *const u64, box_dims: *const u32, steps: *const u32,
            interleave: CUtensorMapInterleave, swizzle: CUtensorMapSwizzle, promotion: CUtensorMapL2promotion, fill: CUtensorMapFloatOOBfill,
        ) -> c_int;
    }
);

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: c_int = 2;

/// `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: c_int = 600;

impl Driver {
    /// Turns a status into an error that names the call.
    pub fn check(&self, status: c_int, call: &str) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(Error::Call { call: call.to_string(), status, text: self.text(status) }) }
    }

    #[allow(unsafe_code)]
    fn text(&self, status: c_int) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: writes a pointer to a static string, or nothing.
        unsafe {
            if (self.cuGetErrorString)(status, &mut text) != 0 || text.is_null() {
                return "unknown error".to_string();
            }
            std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}
