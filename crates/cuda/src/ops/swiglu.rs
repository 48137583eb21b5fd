//! SwiGLU: `kernels/swiglu.cu`.

use super::{Op, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Result, View, ViewMut};

const FILE: &str = "swiglu.cu";

pub fn forward(c: &Cuda, y: ViewMut, gate_up: View) -> Result<()> {
    let op = Op("swiglu");
    let dtype = op.activation("y", y.dtype())?;
    let [t, i] = op.dims("y", y.as_view())?;
    let (y, g) = (op.address("y", y.as_view())?, op.input("gate_up", gate_up, dtype, &[t, 2 * i])?);
    let v = Variant::of(dtype, vectors(dtype, i, &[y, g]));
    let grid = Grid::line(c.flat_blocks(t * i / v.width()), 256);
    Ok(c.kernels.launch(FILE, v, "swiglu", grid, args![y, g, t * i, i])?)
}

pub fn backward(c: &Cuda, dgate_up: ViewMut, dy: View, gate_up: View) -> Result<()> {
    let op = Op("swiglu_grad");
    let dtype = op.activation("dy", dy.dtype())?;
    let [t, i] = op.dims("dy", dy)?;
    let (d, g) = (op.output("dgate_up", &dgate_up, dtype, &[t, 2 * i])?, op.input("gate_up", gate_up, dtype, &[t, 2 * i])?);
    let dy = op.address("dy", dy)?;
    let v = Variant::of(dtype, vectors(dtype, i, &[d, g, dy]));
    let grid = Grid::line(c.flat_blocks(t * i / v.width()), 256);
    Ok(c.kernels.launch(FILE, v, "swiglu_grad", grid, args![d, dy, g, t * i, i])?)
}

pub fn weighted_backward(
    c: &Cuda,
    dgate_up: ViewMut,
    act: ViewMut,
    dweights: ViewMut,
    dact: View,
    gate_up: View,
    weights: View,
    place: View,
) -> Result<()> {
    let op = Op("moe_act_grad");
    let dtype = op.activation("dact", dact.dtype())?;
    let ([n, k], [r, i]) = (op.dims("place", place)?, op.dims("dact", dact)?);
    let (d, a) = (op.output("dgate_up", &dgate_up, dtype, &[r, 2 * i])?, op.output("act", &act, dtype, &[r, i])?);
    let dw = op.output("dweights", &dweights, DType::F32, &[n, k])?;
    let (da, g) = (op.address("dact", dact)?, op.input("gate_up", gate_up, dtype, &[r, 2 * i])?);
    let (w, p) = (op.input("weights", weights, DType::F32, &[n, k])?, op.input("place", place, DType::I32, &[n, k])?);
    let v = Variant::of(dtype, vectors(dtype, i, &[d, a, da, g]));
    let grid = Grid::line(n * k, Cuda::row_threads(i / v.width()));
    Ok(c.kernels.launch(FILE, v, "moe_act_grad", grid, args![d, a, dw, da, g, w, p, i, r])?)
}
