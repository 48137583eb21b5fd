//! Between the element types of files and those of host tensors.

use crate::safetensors::Stored;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use temper_tensor::{DType, FromSlice, Tensor};

/// Elements converted by one task: large enough to hide the cost of a task, small enough to share out evenly.
pub(crate) const CHUNK: usize = 1 << 18;

/// A host element type that weights can be converted to.
pub(crate) trait Float: FromSlice {
    /// Rounds to nearest even.
    fn of_f32(x: f32) -> Self;
    /// Rounds to nearest even.
    fn of_f64(x: f64) -> Self;
}

macro_rules! float {
    ($t:ty, $x32:ident => $e32:expr, $x64:ident => $e64:expr) => {
        impl Float for $t {
            fn of_f32($x32: f32) -> Self {
                $e32
            }
            fn of_f64($x64: f64) -> Self {
                $e64
            }
        }
    };
}
float!(f64, x => x as f64, x => x);
float!(f32, x => x, x => x as f32);
float!(bf16, x => bf16::from_f32(x), x => bf16::from_f32(to_odd(x)));
float!(f16, x => f16::from_f32(x), x => f16::from_f32(to_odd(x)));

/// Rounds towards zero, with the last bit set when anything was lost: a second rounding, to a type at least two bits
/// shorter, then gives what one rounding would have given. (`half`'s own conversion looks at the upper 32 bits only.)
fn to_odd(x: f64) -> f32 {
    let y = x as f32;
    if f64::from(y) == x || !y.is_finite() {
        return y;
    }
    let towards_zero = if f64::from(y).abs() > x.abs() { y.to_bits() - 1 } else { y.to_bits() };
    f32::from_bits(towards_zero | 1)
}

/// The host type equal to a stored one, for the four float types that weights may have.
pub(crate) fn host_dtype(stored: Stored) -> Option<DType> {
    match stored {
        Stored::F64 => Some(DType::F64),
        Stored::F32 => Some(DType::F32),
        Stored::BF16 => Some(DType::BF16),
        Stored::F16 => Some(DType::F16),
        _ => None,
    }
}

/// The stored type equal to a host one.
pub(crate) fn stored_dtype(dtype: DType) -> Stored {
    match dtype {
        DType::F64 => Stored::F64,
        DType::F32 => Stored::F32,
        DType::BF16 => Stored::BF16,
        DType::F16 => Stored::F16,
        DType::I32 => Stored::I32,
    }
}

/// A host tensor to be read into.
pub(crate) fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    fn of<T: FromSlice>(shape: &[usize]) -> Tensor {
        Tensor::from_vec(vec![T::default(); shape.iter().product()], shape)
    }
    match dtype {
        DType::F64 => of::<f64>(shape),
        DType::F32 => of::<f32>(shape),
        DType::BF16 => of::<bf16>(shape),
        DType::F16 => of::<f16>(shape),
        DType::I32 => of::<i32>(shape),
    }
}

/// Reads little-endian elements of type `stored` into `dst`; equal types are copied bit for bit.
/// `bytes` must hold `dst.len()` elements of a type that [`host_dtype`] knows (the caller has checked).
pub(crate) fn decode<T: Float>(stored: DType, bytes: &[u8], dst: &mut [T]) {
    debug_assert_eq!(bytes.len(), dst.len() * stored.size());
    if stored == T::DTYPE && cfg!(target_endian = "little") {
        bytemuck::cast_slice_mut::<T, u8>(dst).copy_from_slice(bytes);
        return;
    }
    match stored {
        DType::F64 => each(bytes, dst, |b| T::of_f64(f64::from_le_bytes(b))),
        DType::F32 => each(bytes, dst, |b| T::of_f32(f32::from_le_bytes(b))),
        DType::BF16 => each(bytes, dst, |b| T::of_f32(f32::from_bits((u16::from_le_bytes(b) as u32) << 16))),
        DType::F16 => decode_f16(bytes, dst),
        DType::I32 => each(bytes, dst, |b| T::of_f64(i32::from_le_bytes(b) as f64)),
    }
}

fn each<const N: usize, T>(bytes: &[u8], dst: &mut [T], f: impl Fn([u8; N]) -> T) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (d, b) in dst.iter_mut().zip(elements) {
        *d = f(*b);
    }
}

/// Half precision goes through small aligned blocks, for the conversion instructions of the processor.
fn decode_f16<T: Float>(bytes: &[u8], dst: &mut [T]) {
    const BLOCK: usize = 256;
    let (mut halves, mut singles) = ([f16::ZERO; BLOCK], [0f32; BLOCK]);
    for (d, b) in dst.chunks_mut(BLOCK).zip(bytes.chunks(2 * BLOCK)) {
        let (h, s) = (&mut halves[..d.len()], &mut singles[..d.len()]);
        each(b, h, f16::from_le_bytes);
        h.convert_to_f32_slice(s);
        for (d, s) in d.iter_mut().zip(s) {
            *d = T::of_f32(*s);
        }
    }
}
