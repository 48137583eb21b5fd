//! Cross-entropy: `kernels/loss.cu`.

use super::{Op, vectors};
use crate::Cuda;
use crate::kernels::{Grid, Variant, args};
use temper_tensor::{DType, Result, View, ViewMut};

/// Blocks that share a row; as in `loss.cu`.
const CLUSTER: usize = 8;
/// Rows up to so many bytes stay in the caches between two reads.
const LONG_ROW: usize = 32 << 10;

/// What every operation here reads: logits [n, classes] and their targets, checked.
struct Rows {
    n: usize,
    classes: usize,
    logits: u64,
    targets: u64,
    variant: Variant,
}

impl Rows {
    fn new(op: Op, logits: View, targets: View) -> Result<Rows> {
        let dtype = op.activation("logits", logits.dtype())?;
        let [n, classes] = op.dims("logits", logits)?;
        let x = op.address("logits", logits)?;
        let targets = op.input("targets", targets, DType::I32, &[n])?;
        Ok(Rows { n, classes, logits: x, targets, variant: Variant::of(dtype, vectors(dtype, classes, &[x])) })
    }

    /// The weights of the rows' gradients, 0 where no gradient is wanted.
    fn grad_weights(&self, op: Op, weights: Option<View>) -> Result<u64> {
        Ok(weights.map(|w| op.input("grad_weights", w, DType::F32, &[self.n])).transpose()?.unwrap_or(0))
    }

    /// A block a row, which it reads alone.
    fn grid(&self) -> Grid {
        let threads = (self.classes / self.variant.width()).div_ceil(4).next_multiple_of(32).clamp(32, 1024);
        Grid::line(self.n, threads)
    }
}

pub fn cross_entropy(c: &Cuda, losses: ViewMut, logits: ViewMut, targets: View, grad_weights: Option<View>) -> Result<()> {
    let op = Op("cross_entropy");
    let size = logits.dtype().size();
    let rows = Rows::new(op, logits.as_view(), targets)?;
    let Rows { n, classes, logits: x, targets: t, variant: v } = rows;
    let l = op.output("losses", &losses, DType::F32, &[n])?;
    let w = rows.grad_weights(op, grad_weights)?;
    // With gradient, on a GPU with clusters: a row that is long, and whose eighth fits into shared memory, is read once.
    let part = classes.div_ceil(CLUSTER * v.width()) * v.width();
    let fits = part * size + 1024 <= c.device.max_shared && classes * size > LONG_ROW;
    if w != 0 && v.vector && c.device.capability.0 >= 9 && fits {
        let grid = Grid::line(n * CLUSTER, 256).shared(part * size);
        return Ok(c.kernels.launch("loss.cu", v, "cross_entropy_cluster", grid, args![l, x, t, w, classes, part])?);
    }
    Ok(c.kernels.launch("loss.cu", v, "cross_entropy", rows.grid(), args![l, x, t, w, classes])?)
}

pub fn vocab_stats(c: &Cuda, stats: ViewMut, logits: View, targets: View, first: usize) -> Result<()> {
    let op = Op("vocab_stats");
    let rows = Rows::new(op, logits, targets)?;
    let Rows { n, classes, logits: x, targets: t, variant: v } = rows;
    let s = op.output("stats", &stats, DType::F32, &[n, 3])?;
    Ok(c.kernels.launch("loss.cu", v, "vocab_stats", rows.grid(), args![s, x, t, classes, first])?)
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
    let rows = Rows::new(op, logits.as_view(), targets)?;
    let Rows { n, classes, logits: x, targets: t, variant: v } = rows;
    let [ranks, _, _] = op.dims("stats", stats)?;
    let (l, s) = (op.output("losses", &losses, DType::F32, &[n])?, op.input("stats", stats, DType::F32, &[ranks, n, 3])?);
    let w = rows.grad_weights(op, grad_weights)?;
    Ok(c.kernels.launch("loss.cu", v, "cross_entropy_divided", rows.grid(), args![l, x, t, s, w, classes, first, ranks])?)
}
