//! Cross-entropy: `kernels/loss.cu`.

use super::{Op, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Result, View, ViewMut};

/// Blocks that share a row; as in `loss.cu`.
const CLUSTER: usize = 8;
/// Rows up to so many bytes stay in the caches between two reads.
const LONG_ROW: usize = 32 << 10;

pub fn cross_entropy(c: &Cuda, losses: ViewMut, logits: ViewMut, targets: View, grad_weights: Option<View>) -> Result<()> {
    let op = Op("cross_entropy");
    let dtype = op.activation("logits", logits.dtype())?;
    let [n, classes] = op.dims("logits", logits.as_view())?;
    let x = op.address("logits", logits.as_view())?;
    let (l, t) = (op.output("losses", &losses, DType::F32, &[n])?, op.input("targets", targets, DType::I32, &[n])?);
    let w = grad_weights.map(|w| op.input("grad_weights", w, DType::F32, &[n])).transpose()?.unwrap_or(0);
    let v = Variant::of(dtype, vectors(dtype, classes, &[x]));
    // With gradient, on a GPU with clusters: a row that is long, and whose eighth fits into shared memory, is read once.
    let part = classes.div_ceil(CLUSTER * v.width()) * v.width();
    let fits = part * dtype.size() + 1024 <= c.device.max_shared && classes * dtype.size() > LONG_ROW;
    if w != 0 && v.vector && c.device.capability.0 >= 9 && fits {
        let grid = Grid::line(n * CLUSTER, 256).shared(part * dtype.size());
        return Ok(c.kernels.launch("loss.cu", v, "cross_entropy_cluster", grid, args![l, x, t, w, classes, part])?);
    }
    Ok(c.kernels.launch("loss.cu", v, "cross_entropy", Grid::line(n, row_threads(classes, v)), args![l, x, t, w, classes])?)
}

/// Threads of a block that reads one row.
fn row_threads(classes: usize, v: Variant) -> usize {
    (classes / v.width()).div_ceil(4).next_multiple_of(32).clamp(32, 1024)
}

pub fn vocab_stats(c: &Cuda, stats: ViewMut, logits: View, targets: View, first: usize) -> Result<()> {
    let op = Op("vocab_stats");
    let dtype = op.activation("logits", logits.dtype())?;
    let [n, classes] = op.dims("logits", logits)?;
    let x = op.address("logits", logits)?;
    let (s, t) = (op.output("stats", &stats, DType::F32, &[n, 3])?, op.input("targets", targets, DType::I32, &[n])?);
    let v = Variant::of(dtype, vectors(dtype, classes, &[x]));
    Ok(c.kernels.launch("loss.cu", v, "vocab_stats", Grid::line(n, row_threads(classes, v)), args![s, x, t, classes, first])?)
}

pub fn cross_entropy_divided(
    c: &Cuda,
    losses: ViewMut,
    logits: ViewMut,
    targets: View,
    first: usize,
    stats: View,
    grad_weights: Option<View>,
) -> Result<()> {
    let op = Op("cross_entropy_divided");
    let dtype = op.activation("logits", logits.dtype())?;
    let ([n, classes], [ranks, _, _]) = (op.dims("logits", logits.as_view())?, op.dims("stats", stats)?);
    let x = op.address("logits", logits.as_view())?;
    let (l, t) = (op.output("losses", &losses, DType::F32, &[n])?, op.input("targets", targets, DType::I32, &[n])?);
    let s = op.input("stats", stats, DType::F32, &[ranks, n, 3])?;
    let w = grad_weights.map(|w| op.input("grad_weights", w, DType::F32, &[n])).transpose()?.unwrap_or(0);
    let v = Variant::of(dtype, vectors(dtype, classes, &[x]));
    let grid = Grid::line(n, row_threads(classes, v));
    Ok(c.kernels.launch("loss.cu", v, "cross_entropy_divided", grid, args![l, x, t, s, w, classes, first, ranks])?)
}
