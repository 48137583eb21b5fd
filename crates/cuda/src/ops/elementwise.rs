//! Memory and element-wise operations: `kernels/elementwise.cu`, `kernels/convert.cu`.
#![allow(unsafe_code)] // copies between addresses that were checked against their shapes

use super::{Op, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Error, FromSlice, Result, Slice, Tensor, View, ViewMut};

pub fn zeros(c: &Cuda, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let mut t = c.tensor(dtype, shape)?;
    let address = Op("zeros").address("out", t.view_mut().as_view())?;
    // SAFETY: the tensor's own memory.
    unsafe { c.device.memset(address, 0, t.numel() * dtype.size())? };
    Ok(t)
}

/// The bytes of a host view.
fn bytes<'a>(x: &View<'a>) -> Result<&'a [u8]> {
    Ok(match x.data {
        Slice::F64(s) => bytemuck::cast_slice(s),
        Slice::F32(s) => bytemuck::cast_slice(s),
        Slice::BF16(s) => bytemuck::cast_slice(s),
        Slice::F16(s) => bytemuck::cast_slice(s),
        Slice::I32(s) => bytemuck::cast_slice(s),
        Slice::Device(..) => return Err(Error::Backend("from_host: x is already in device memory".into())),
    })
}

pub fn from_host(c: &Cuda, x: View) -> Result<Tensor> {
    let bytes = bytes(&x)?;
    let t = c.tensor(x.dtype(), x.shape())?;
    let address = Op("from_host").address("out", t.view())?;
    // SAFETY: the tensor holds as many bytes.
    unsafe { c.staging.upload(address, bytes)? };
    Ok(t)
}

pub fn to_host(c: &Cuda, x: View) -> Result<Tensor> {
    fn fetch<E: FromSlice>(c: &Cuda, x: View) -> Result<Tensor> {
        let mut data = vec![E::default(); x.numel()];
        c.device.download(bytemuck::cast_slice_mut(&mut data), Op("to_host").address("x", x)?)?;
        Ok(Tensor::from_vec(data, x.shape()))
    }
    match x.dtype() {
        DType::F64 => fetch::<f64>(c, x),
        DType::F32 => fetch::<f32>(c, x),
        DType::BF16 => fetch::<half::bf16>(c, x),
        DType::F16 => fetch::<half::f16>(c, x),
        DType::I32 => fetch::<i32>(c, x),
    }
}

pub fn fill(c: &Cuda, out: ViewMut, value: f64) -> Result<()> {
    let op = Op("fill");
    let n = out.numel();
    let p = op.address("out", out.as_view())?;
    let dtype = out.dtype();
    // All-zero bits are zero in every type.
    if value.to_bits() == 0 {
        // SAFETY: the view's own memory.
        unsafe { c.device.memset(p, 0, n * dtype.size())? };
        return Ok(());
    }
    let raw = match dtype {
        DType::I32 => Some(("fill_i32", value as i32 as u32 as u64)),
        DType::F64 => Some(("fill_f64", value.to_bits())),
        DType::F16 => Some(("fill_f16", half::f16::from_f64(value).to_bits() as u64)),
        DType::F32 | DType::BF16 => None,
    };
    if let Some((kernel, bits)) = raw {
        return Ok(c.kernels.launch("convert.cu", Variant::PLAIN, kernel, Grid::line(c.flat_blocks(n), 256), args![p, bits, n])?);
    }
    op.activation("out", dtype)?;
    let v = Variant::of(dtype, vectors(dtype, n, &[p]));
    Ok(c.kernels.launch("elementwise.cu", v, "fill", Grid::line(c.flat_blocks(n / v.width()), 256), args![p, value as f32, n])?)
}

pub fn add(c: &Cuda, out: ViewMut, a: View, b: View) -> Result<()> {
    let op = Op("add");
    let dtype = op.activation("out", out.dtype())?;
    let n = out.numel();
    let p = op.address("out", out.as_view())?;
    let (a, b) = (op.input("a", a, dtype, out.shape())?, op.input("b", b, dtype, out.shape())?);
    let v = Variant::of(dtype, vectors(dtype, n, &[p, a, b]));
    Ok(c.kernels.launch("elementwise.cu", v, "add", Grid::line(c.flat_blocks(n / v.width()), 256), args![p, a, b, n])?)
}

pub fn scale(c: &Cuda, out: ViewMut, factor: f64) -> Result<()> {
    let op = Op("scale");
    let dtype = op.activation("out", out.dtype())?;
    let n = out.numel();
    let p = op.address("out", out.as_view())?;
    let v = Variant::of(dtype, vectors(dtype, n, &[p]));
    Ok(c.kernels.launch("elementwise.cu", v, "scale", Grid::line(c.flat_blocks(n / v.width()), 256), args![p, factor as f32, n])?)
}

pub fn copy(c: &Cuda, out: ViewMut, x: View) -> Result<()> {
    let op = Op("copy");
    op.shape("x", x, out.shape())?;
    let (to, from) = (op.address("out", out.as_view())?, op.address("x", x)?);
    if out.dtype() == x.dtype() {
        // SAFETY: both views hold as many bytes, and the borrow checker keeps them apart.
        unsafe { c.device.copy(to, from, x.numel() * x.dtype().size())? };
        return Ok(());
    }
    convert(c, op, out, x, false)
}

/// `out += a`; the two may differ in dtype, so that a bf16 gradient can be added to an f32 one.
pub fn add_assign(c: &Cuda, out: ViewMut, a: View) -> Result<()> {
    let op = Op("add_assign");
    op.shape("a", a, out.shape())?;
    convert(c, op, out, a, true)
}

/// Kernels by output and input type, in the order of `FLOATS`; an empty name is a pair that has none.
const FLOATS: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];
const COPY: [[&str; 4]; 4] = [
    ["copy_f32_f32", "copy_f32_bf16", "copy_f32_f16", "copy_f32_f64"],
    ["copy_bf16_f32", "copy_bf16_bf16", "copy_bf16_f16", "copy_bf16_f64"],
    ["copy_f16_f32", "copy_f16_bf16", "copy_f16_f16", "copy_f16_f64"],
    ["copy_f64_f32", "copy_f64_bf16", "copy_f64_f16", ""],
];
const ADD: [[&str; 3]; 3] = [
    ["add_f32_f32", "add_f32_bf16", "add_f32_f16"],
    ["add_bf16_f32", "add_bf16_bf16", "add_bf16_f16"],
    ["add_f16_f32", "add_f16_bf16", "add_f16_f16"],
];

fn convert(c: &Cuda, op: Op, out: ViewMut, x: View, accumulate: bool) -> Result<()> {
    let kinds = if accumulate { &FLOATS[..3] } else { &FLOATS[..] };
    let place = |what, d| op.one_of(what, d, kinds).map(|d| FLOATS.iter().position(|f| *f == d).unwrap_or(0));
    let (o, i) = (place("out", out.dtype())?, place("x", x.dtype())?);
    let kernel = if accumulate { ADD[o][i] } else { COPY[o][i] };
    let (to, from) = (op.address("out", out.as_view())?, op.address("x", x)?);
    let n = x.numel();
    let by4 = to.is_multiple_of(16) && from.is_multiple_of(16);
    let grid = Grid::line(c.flat_blocks(n.div_ceil(4)), 256);
    Ok(c.kernels.launch("convert.cu", Variant::PLAIN, kernel, grid, args![to, from, n, by4])?)
}
