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
    let threads = (classes / v.width()).div_ceil(4).next_multiple_of(32).clamp(32, 1024);
    Ok(c.kernels.launch("loss.cu", v, "cross_entropy", Grid::line(n, threads), args![l, x, t, w, classes])?)
}
