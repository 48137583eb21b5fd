//! Numbers of a golden file as the host computes with them.

use temper_checkpoint::safetensors::{Stored, TensorRef};

/// Integer elements; `None` for other types.
pub(crate) fn integers(t: &TensorRef) -> Option<Vec<i64>> {
    match t.dtype {
        Stored::I64 => Some(t.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
        Stored::I32 => Some(t.bytes.as_chunks::<4>().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect()),
        _ => None,
    }
}

/// Float elements; `None` for other types.
pub(crate) fn floats(t: &TensorRef) -> Option<Vec<f64>> {
    match t.dtype {
        Stored::F64 => Some(t.bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()),
        Stored::F32 => Some(t.bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()),
        Stored::BF16 => Some(halves(t.bytes)),
        _ => None,
    }
}

/// bf16 is the upper half of an f32.
fn halves(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<2>().0.iter().map(|b| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))).collect()
}
