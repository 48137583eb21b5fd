//! Making tensors, and moving elements between types and between host and backend.

use super::{Cpu, args::Op, tasks::rows_per_task};
use crate::{Buffer, DType, Error, FromSlice, OutOfMemory, Result, Slice, SliceMut, Tensor, View, ViewMut};
use half::{bf16, f16};

impl Cpu {
    /// A pooled tensor with unspecified contents.
    pub(super) fn pooled(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let asked = shape.iter().fold(dtype.size(), |n, &d| n.saturating_mul(d));
        let refused = || self.out_of_memory(asked);
        let bytes = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d)).filter(|&n| isize::try_from(n).is_ok());
        let n = bytes.ok_or_else(refused)? / dtype.size();
        fn buffer<T: FromSlice>(cpu: &Cpu, n: usize) -> Option<Buffer> {
            cpu.buffers.take::<T>(n).map(T::buffer)
        }
        let buffer = match dtype {
            DType::F64 => buffer::<f64>(self, n),
            DType::F32 => buffer::<f32>(self, n),
            DType::BF16 => buffer::<bf16>(self, n),
            DType::F16 => buffer::<f16>(self, n),
            DType::I32 => buffer::<i32>(self, n),
        };
        let buffer = buffer.ok_or_else(refused)?;
        Ok(Tensor::new(buffer, shape))
    }

    fn out_of_memory(&self, wanted: usize) -> Error {
        let (usage, purpose) = (self.buffers.usage(), self.buffers.purpose());
        let (total, held) = (usage.capacity, usage.now);
        Error::OutOfMemory(Box::new(OutOfMemory { of: "host", purpose, wanted, total, free: None, held, largest: None }))
    }

    /// A pooled tensor with the elements of `x`.
    pub(super) fn duplicate(&self, x: View) -> Result<Tensor> {
        let mut out = self.pooled(x.dtype(), x.shape())?;
        copy(self, out.view_mut(), x)?;
        Ok(out)
    }
}

/// See [`Ops::fill`](crate::Ops::fill); every dtype.
pub(super) fn fill(cpu: &Cpu, out: ViewMut, value: f64) -> Result<()> {
    fn run<T: Copy + Send + Sync>(cpu: &Cpu, out: &mut [T], value: T) {
        cpu.each(
            out.len(),
            out.chunks_mut(rows_per_task(1)),
            #[inline(always)]
            |c| c.fill(value),
        );
    }
    match out.data {
        SliceMut::F64(s) => run(cpu, s, value),
        SliceMut::F32(s) => run(cpu, s, value as f32),
        SliceMut::BF16(s) => run(cpu, s, bf16::from_f64(value)),
        SliceMut::F16(s) => run(cpu, s, f16::from_f64(value)),
        SliceMut::I32(s) => run(cpu, s, value as i32),
        SliceMut::Device(_, _, found, _) => return Err(on_device("fill", "out", found)),
    }
    Ok(())
}

/// See [`Ops::copy`](crate::Ops::copy); between any two float dtypes, and I32 to I32.
pub(super) fn copy(cpu: &Cpu, out: ViewMut, x: View) -> Result<()> {
    Op("copy").shape("out", out.shape(), x.shape())?;
    match x.data {
        Slice::F64(s) => convert(cpu, out, s, |v| v as f32, |v| v, bf16::from_f64, f16::from_f64),
        Slice::F32(s) => convert(cpu, out, s, |v| v, f64::from, bf16::from_f32, f16::from_f32),
        Slice::BF16(s) => convert(cpu, out, s, bf16::to_f32, bf16::to_f64, |v| v, |v| f16::from_f32(v.to_f32())),
        Slice::F16(s) => convert(cpu, out, s, f16::to_f32, f16::to_f64, |v| bf16::from_f32(v.to_f32()), |v| v),
        Slice::I32(s) => {
            let out = Op("copy").write::<i32>("out", out, x.shape())?;
            out.copy_from_slice(s);
            Ok(())
        }
        Slice::Device(_, _, found, _) => Err(on_device("copy", "x", found)),
    }
}

fn convert<S: Copy + Send + Sync>(
    cpu: &Cpu,
    out: ViewMut,
    x: &[S],
    f32: impl Fn(S) -> f32 + Sync,
    f64: impl Fn(S) -> f64 + Sync,
    bf16: impl Fn(S) -> bf16 + Sync,
    f16: impl Fn(S) -> f16 + Sync,
) -> Result<()> {
    fn run<S: Copy + Send + Sync, D: Send>(cpu: &Cpu, out: &mut [D], x: &[S], f: impl Fn(S) -> D + Sync) {
        let step = rows_per_task(1);
        cpu.each(
            x.len(),
            out.chunks_mut(step).zip(x.chunks(step)),
            #[inline(always)]
            |(out, x)| {
                for (o, &x) in out.iter_mut().zip(x) {
                    *o = f(x);
                }
            },
        );
    }
    match out.data {
        SliceMut::F32(o) => run(cpu, o, x, f32),
        SliceMut::F64(o) => run(cpu, o, x, f64),
        SliceMut::BF16(o) => run(cpu, o, x, bf16),
        SliceMut::F16(o) => run(cpu, o, x, f16),
        SliceMut::I32(_) => {
            return Err(Error::DType { op: "copy", what: "out", found: DType::I32, expected: "a float dtype, as x".into() });
        }
        SliceMut::Device(_, _, found, _) => return Err(on_device("copy", "out", found)),
    }
    Ok(())
}

fn on_device(op: &'static str, what: &'static str, found: DType) -> Error {
    Error::DType { op, what, found, expected: "host memory (it is on a device)".into() }
}
