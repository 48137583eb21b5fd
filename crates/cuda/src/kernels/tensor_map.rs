//! Tensor maps: what Hopper's copy engine knows of a matrix in device memory.
#![allow(unsafe_code)] // calls into the driver

use crate::Result;
use crate::device::Device;
use crate::sys::driver::*;

/// A row-major bf16 matrix cut into boxes of 64 columns (128 bytes, swizzled); a kernel argument passed by value.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct TensorMap(CUtensorMap);

impl TensorMap {
    /// For `rows` x `cols` elements at `base` (a multiple of 16 bytes, as is a row), in boxes of `box_rows` rows.
    pub fn new(device: &Device, base: u64, rows: usize, cols: usize, box_rows: u32) -> Result<TensorMap> {
        TensorMap::encode(device, base, &[cols as u64, rows as u64], &[cols as u64 * 2], &[64, box_rows])
    }

    /// The same, with `boxes` boxes that lie beside each other in one go; `cols` is a multiple of 64.
    pub fn beside(device: &Device, base: u64, rows: usize, cols: usize, box_rows: u32, boxes: u32) -> Result<TensorMap> {
        let dims = [64, rows as u64, cols as u64 / 64];
        TensorMap::encode(device, base, &dims, &[cols as u64 * 2, 128], &[64, box_rows, boxes])
    }

    /// Innermost dimension first; strides in bytes, without the innermost.
    fn encode(device: &Device, base: u64, dims: &[u64], strides: &[u64], boxes: &[u32]) -> Result<TensorMap> {
        // SAFETY: a plain C struct for which zero is valid; the call fills it.
        let mut map = TensorMap(unsafe { std::mem::zeroed() });
        let steps = [1u32; 3];
        // SAFETY: all arrays have as many entries as the rank asks for.
        let status = unsafe {
            (device.driver.cuTensorMapEncodeTiled)(
                &mut map.0,
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                dims.len() as u32,
                base as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        device.driver.check(status, "cuTensorMapEncodeTiled")?;
        Ok(map)
    }
}
