//! Moving rows between tokens and experts: `kernels/moe.cu`, `kernels/sort.cu`. T tokens, K experts a token, S = T*K rows.

use super::embedding::{Scattered, sort_pass};
use super::{Op, elementwise, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Result, View, ViewMut};

const FILE: &str = "moe.cu";
/// Most experts the counting sort and the grouped products take.
pub const MAX_EXPERTS: usize = 256;

pub fn sort(c: &Cuda, offsets: ViewMut, source: ViewMut, place: ViewMut, experts: View) -> Result<()> {
    let op = Op("moe_sort");
    let [t, k] = op.dims("experts", experts)?;
    let e = offsets.numel().saturating_sub(1);
    if e == 0 || e > MAX_EXPERTS {
        return op.wrong("offsets", offsets.as_view(), format!("[E+1] with E in 1..={MAX_EXPERTS}"));
    }
    let o = op.output("offsets", &offsets, DType::I32, &[e + 1])?;
    let (s, p) = (op.output("source", &source, DType::I32, &[t * k])?, op.output("place", &place, DType::I32, &[t, k])?);
    let x = op.input("experts", experts, DType::I32, &[t, k])?;
    if t * k == 0 {
        return elementwise::fill(c, offsets, 0.0);
    }
    sort_pass(c, x, 0, t * k, 0, (0, s), Scattered { inverse: p, offsets: Some((o, e)) })
}

pub fn gather(c: &Cuda, out: ViewMut, x: View, source: View) -> Result<()> {
    let op = Op("moe_gather");
    let dtype = op.activation("x", x.dtype())?;
    let [t, h] = op.dims("x", x)?;
    let [s] = op.dims("source", source)?;
    if s == 0 {
        return Ok(());
    }
    if t == 0 || s % t != 0 {
        return op.wrong("source", source, format!("a multiple of T = {t} rows"));
    }
    let (o, i) = (op.output("out", &out, dtype, &[s, h])?, op.input("source", source, DType::I32, &[s])?);
    let x = op.address("x", x)?;
    let v = Variant::of(dtype, vectors(dtype, h, &[o, x]));
    let row = h / v.width();
    let place = c.scratch(s * 4)?;
    let p = place.address();
    c.kernels.launch(FILE, v, "moe_places", Grid::line(s.div_ceil(256), 256), args![p, i, s])?;
    Ok(c.kernels.launch(FILE, v, "moe_gather", Grid::line(t, Cuda::row_threads(row)), args![o, x, p, s / t, row])?)
}

pub fn combine(c: &Cuda, out: ViewMut, y: View, weights: Option<View>, place: View) -> Result<()> {
    let op = Op("moe_combine");
    let dtype = op.activation("y", y.dtype())?;
    let [t, k] = op.dims("place", place)?;
    let [_, h] = op.dims("out", out.as_view())?;
    let (o, y) = (op.output("out", &out, dtype, &[t, h])?, op.input("y", y, dtype, &[t * k, h])?);
    let w = weights.map(|w| op.input("weights", w, DType::F32, &[t, k])).transpose()?.unwrap_or(0);
    let p = op.input("place", place, DType::I32, &[t, k])?;
    let v = Variant::of(dtype, vectors(dtype, h, &[o, y]));
    let grid = Grid::line(t, Cuda::row_threads(h / v.width()));
    Ok(c.kernels.launch(FILE, v, "moe_combine", grid, args![o, y, w, p, k, h])?)
}

pub fn combine_grad(c: &Cuda, dy: ViewMut, dweights: ViewMut, dout: View, y: View, weights: View, source: View, place: View) -> Result<()> {
    let op = Op("moe_combine_grad");
    let dtype = op.activation("y", y.dtype())?;
    let [t, k] = op.dims("place", place)?;
    let [_, h] = op.dims("dout", dout)?;
    let (d, dw) = (op.output("dy", &dy, dtype, &[t * k, h])?, op.output("dweights", &dweights, DType::F32, &[t, k])?);
    let (g, y) = (op.input("dout", dout, dtype, &[t, h])?, op.input("y", y, dtype, &[t * k, h])?);
    let w = op.input("weights", weights, DType::F32, &[t, k])?;
    op.input("source", source, DType::I32, &[t * k])?;
    let p = op.input("place", place, DType::I32, &[t, k])?;
    let v = Variant::of(dtype, vectors(dtype, h, &[d, g, y]));
    let grid = Grid::line(t, Cuda::row_threads(h / v.width()));
    Ok(c.kernels.launch(FILE, v, "moe_combine_grad", grid, args![d, dw, g, y, w, p, k, h])?)
}
