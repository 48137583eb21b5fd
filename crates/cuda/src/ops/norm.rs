//! RMSNorm: `kernels/norm.cu`. Rows N, width H.

use super::reduce::{ColumnSum, column_sum};
use super::{Op, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Result, View, ViewMut};

const FILE: &str = "norm.cu";

pub fn rms_norm(c: &Cuda, y: ViewMut, rstd: ViewMut, x: View, w: View, eps: f64) -> Result<()> {
    let op = Op("rms_norm");
    let dtype = op.activation("x", x.dtype())?;
    let [n, h] = op.dims("x", x)?;
    let (y, r) = (op.output("y", &y, dtype, &[n, h])?, op.output("rstd", &rstd, DType::F32, &[n])?);
    let (x, w) = (op.address("x", x)?, op.input("w", w, dtype, &[h])?);
    let v = Variant::of(dtype, vectors(dtype, h, &[x, y, w]));
    let grid = Grid::line(n, Cuda::row_threads(h / v.width()));
    Ok(c.kernels.launch(FILE, v, "rms_norm", grid, args![y, r, x, w, h, eps as f32])?)
}

pub fn add_rms_norm(c: &Cuda, sum: ViewMut, y: ViewMut, rstd: ViewMut, a: View, b: View, w: View, eps: f64) -> Result<()> {
    let op = Op("add_rms_norm");
    let dtype = op.activation("a", a.dtype())?;
    let [n, h] = op.dims("a", a)?;
    let (s, y) = (op.output("sum", &sum, dtype, &[n, h])?, op.output("y", &y, dtype, &[n, h])?);
    let r = op.output("rstd", &rstd, DType::F32, &[n])?;
    let (a, b, w) = (op.address("a", a)?, op.input("b", b, dtype, &[n, h])?, op.input("w", w, dtype, &[h])?);
    let v = Variant::of(dtype, vectors(dtype, h, &[a, b, s, y, w]));
    let grid = Grid::line(n, Cuda::row_threads(h / v.width()));
    Ok(c.kernels.launch(FILE, v, "add_rms_norm", grid, args![s, y, r, a, b, w, h, eps as f32])?)
}

pub fn grad_input(c: &Cuda, dx: ViewMut, dy: View, x: View, w: View, rstd: View, residual: Option<View>) -> Result<()> {
    let op = Op("rms_norm_grad_input");
    let dtype = op.activation("x", x.dtype())?;
    let [n, h] = op.dims("x", x)?;
    let (dx, dy) = (op.output("dx", &dx, dtype, &[n, h])?, op.input("dy", dy, dtype, &[n, h])?);
    let (x, w, r) = (op.address("x", x)?, op.input("w", w, dtype, &[h])?, op.input("rstd", rstd, DType::F32, &[n])?);
    let residual = residual.map(|v| op.input("residual", v, dtype, &[n, h])).transpose()?.unwrap_or(0);
    let v = Variant::of(dtype, vectors(dtype, h, &[dx, dy, x, w, residual]));
    let grid = Grid::line(n, Cuda::row_threads(h / v.width()));
    Ok(c.kernels.launch(FILE, v, "rms_norm_grad_input", grid, args![dx, dy, x, w, r, residual, h])?)
}

pub fn grad_weight(c: &Cuda, dw: ViewMut, dy: View, x: View, rstd: View) -> Result<()> {
    let op = Op("rms_norm_grad_weight");
    let dtype = op.activation("x", x.dtype())?;
    let [n, h] = op.dims("x", x)?;
    let out = op.one_of("dw", dw.dtype(), &[DType::F32, dtype])?;
    let (dw, dy) = (op.output("dw", &dw, out, &[h])?, op.input("dy", dy, dtype, &[n, h])?);
    let (x, r) = (op.address("x", x)?, op.input("rstd", rstd, DType::F32, &[n])?);
    column_sum(c, dw, out, dy, dtype, n, h, ColumnSum::Norm(x, r))
}
