//! Host tensors as bytes, and arithmetic on such bytes.

use crate::Reduce;
use half::{bf16, f16};
use std::ops::Range;
use temper_tensor::{DType, Slice, SliceMut, View, ViewMut};

/// The bytes of host elements; `None` for device memory.
pub(crate) fn of(x: View<'_>) -> Option<&[u8]> {
    Some(match x.data {
        Slice::F64(s) => bytemuck::cast_slice(s),
        Slice::F32(s) => bytemuck::cast_slice(s),
        Slice::BF16(s) => bytemuck::cast_slice(s),
        Slice::F16(s) => bytemuck::cast_slice(s),
        Slice::I32(s) => bytemuck::cast_slice(s),
        Slice::Device(..) => return None,
    })
}

/// The bytes of host elements, to be written; `None` for device memory.
pub(crate) fn of_mut(x: ViewMut<'_>) -> Option<&mut [u8]> {
    Some(match x.data {
        SliceMut::F64(s) => bytemuck::cast_slice_mut(s),
        SliceMut::F32(s) => bytemuck::cast_slice_mut(s),
        SliceMut::BF16(s) => bytemuck::cast_slice_mut(s),
        SliceMut::F16(s) => bytemuck::cast_slice_mut(s),
        SliceMut::I32(s) => bytemuck::cast_slice_mut(s),
        SliceMut::Device(..) => return None,
    })
}

/// Elements `part` of `parts` of `len` nearly equal ones.
pub(crate) fn share(len: usize, part: usize, parts: usize) -> Range<usize> {
    len * part / parts..len * (part + 1) / parts
}

/// The reduction of several ranks' elements, in the order given. 16-bit floats are added in f32 and rounded once.
pub(crate) fn reduce(dtype: DType, op: Reduce, parts: &[&[u8]], out: &mut [u8]) {
    match dtype {
        DType::F64 => wide::<f64, f64>(op, parts, out, |x| x, |x| x, f64::max),
        DType::F32 => wide::<f32, f32>(op, parts, out, |x| x, |x| x, f32::max),
        DType::BF16 => wide::<bf16, f32>(op, parts, out, bf16::to_f32, bf16::from_f32, f32::max),
        DType::F16 => wide::<f16, f32>(op, parts, out, f16::to_f32, f16::from_f32, f32::max),
        DType::I32 => wide::<i32, i64>(op, parts, out, i64::from, |x| x as i32, i64::max),
    }
}

/// Elements that are added up at a time, so that their sums stay in the nearest cache.
const BLOCK: usize = 1024;

fn wide<T: bytemuck::Pod, W: Copy + std::ops::Add<Output = W>>(
    op: Reduce,
    parts: &[&[u8]],
    out: &mut [u8],
    widen: impl Fn(T) -> W,
    narrow: impl Fn(W) -> T,
    max: impl Fn(W, W) -> W,
) {
    let size = size_of::<T>();
    let Some((first, others)) = parts.split_first() else { return };
    let read = |x: &[u8]| widen(bytemuck::pod_read_unaligned(x));
    let mut joined: Vec<W> = Vec::with_capacity(BLOCK);
    for (block, out) in out.chunks_mut(BLOCK * size).enumerate() {
        let range = block * BLOCK * size..block * BLOCK * size + out.len();
        joined.clear();
        joined.extend(first[range.clone()].chunks_exact(size).map(read));
        for part in others {
            let pairs = joined.iter_mut().zip(part[range.clone()].chunks_exact(size));
            match op {
                Reduce::Sum => pairs.for_each(|(a, x)| *a = *a + read(x)),
                Reduce::Max => pairs.for_each(|(a, x)| *a = max(*a, read(x))),
            }
        }
        for (out, value) in out.chunks_exact_mut(size).zip(&joined) {
            out.copy_from_slice(bytemuck::bytes_of(&narrow(*value)));
        }
    }
}
