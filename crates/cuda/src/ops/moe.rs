//! Moving rows between tokens and experts: `kernels/moe.cu`, `kernels/sort.cu`. T tokens, K experts a token, R rows of the experts that
//! are here (T*K unless some are elsewhere), N ranks.

use super::embedding::{By, Sorted, sort_pass};
use super::{Op, elementwise, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Result, View, ViewMut};

const FILE: &str = "moe.cu";
/// Most experts the counting sort and the grouped products take.
pub const MAX_EXPERTS: usize = 256;
/// Most ranks of [`ranks`]: as many as the sort takes beside those that are nowhere.
const MAX_RANKS: usize = 255;

pub fn sort(c: &Cuda, offsets: ViewMut, place: ViewMut, experts: View, first: usize) -> Result<()> {
    let op = Op("moe_sort");
    let [t, k] = op.dims("experts", experts)?;
    let e = offsets.numel().saturating_sub(1);
    if e == 0 || e > MAX_EXPERTS {
        return op.wrong("offsets", offsets.as_view(), format!("[E+1] with E in 1..={MAX_EXPERTS}"));
    }
    if e == MAX_EXPERTS && first > 0 {
        return op.wrong("offsets", offsets.as_view(), format!("fewer than {MAX_EXPERTS} experts where others lie elsewhere"));
    }
    let o = op.output("offsets", &offsets, DType::I32, &[e + 1])?;
    let p = op.output("place", &place, DType::I32, &[t, k])?;
    let x = op.input("experts", experts, DType::I32, &[t, k])?;
    if t * k == 0 {
        return elementwise::fill(c, offsets, 0.0);
    }
    sort_pass(c, (x, 0), t * k, By::Class { first, count: e }, Sorted { places: p, offsets: o, ..Sorted::default() })
}

pub fn ranks(c: &Cuda, ranks: ViewMut, rows: ViewMut, experts: View, per_rank: usize, slices: usize) -> Result<()> {
    let op = Op("moe_ranks");
    let [t, k] = op.dims("experts", experts)?;
    let n = rows.numel();
    if n == 0 || n > MAX_RANKS || per_rank == 0 || slices == 0 || !n.is_multiple_of(slices) {
        return op.wrong("rows", rows.as_view(), format!("[N] with N in 1..={MAX_RANKS}, a multiple of slices"));
    }
    let (o, m) = (op.output("ranks", &ranks, DType::I32, &[t, n])?, op.output("rows", &rows, DType::I32, &[n])?);
    let x = op.input("experts", experts, DType::I32, &[t, k])?;
    elementwise::fill(c, rows, 0.0)?;
    let grid = Grid::line((t * n).div_ceil(256), 256);
    Ok(c.kernels.launch("sort.cu", Variant::PLAIN, "moe_ranks", grid, args![o, m, x, t, k, n, per_rank, slices])?)
}

pub fn gather(c: &Cuda, out: ViewMut, x: View, place: View) -> Result<()> {
    let op = Op("moe_gather");
    let dtype = op.one_of("x", x.dtype(), &[DType::F32, DType::BF16, DType::I32])?;
    let ([t, k], [r, h]) = (op.dims("place", place)?, op.dims("out", out.as_view())?);
    let (o, x) = (op.output("out", &out, dtype, &[r, h])?, op.input("x", x, dtype, &[t, h])?);
    let p = op.input("place", place, DType::I32, &[t, k])?;
    // Whole numbers are moved as if they were f32.
    let moved = if dtype == DType::I32 { DType::F32 } else { dtype };
    let v = Variant::of(moved, vectors(moved, h, &[o, x]));
    let row = h / v.width();
    Ok(c.kernels.launch(FILE, v, "moe_gather", Grid::line(t, Cuda::row_threads(row)), args![o, x, p, k, row, r])?)
}

pub fn combine(c: &Cuda, out: ViewMut, y: View, weights: Option<View>, place: View) -> Result<()> {
    let op = Op("moe_combine");
    let dtype = op.activation("y", y.dtype())?;
    let ([t, k], [r, h]) = (op.dims("place", place)?, op.dims("y", y)?);
    let (o, y) = (op.output("out", &out, dtype, &[t, h])?, op.input("y", y, dtype, &[r, h])?);
    let w = weights.map(|w| op.input("weights", w, DType::F32, &[t, k])).transpose()?.unwrap_or(0);
    let p = op.input("place", place, DType::I32, &[t, k])?;
    let v = Variant::of(dtype, vectors(dtype, h, &[o, y]));
    let grid = Grid::line(t, Cuda::row_threads(h / v.width()));
    Ok(c.kernels.launch(FILE, v, "moe_combine", grid, args![o, y, w, p, k, h, r])?)
}
