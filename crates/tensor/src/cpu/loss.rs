//! Cross-entropy and, in place of the logits, its gradient.
//!
//! Legend: N rows, V vocabulary.

use super::{
    Cpu,
    args::Op,
    float::{self, Float},
    tasks::rows_per_task,
};
use crate::{Result, View, ViewMut};

/// The target of a row that is not trained.
const IGNORED: i32 = -100;

/// See [`Ops::cross_entropy`](crate::Ops::cross_entropy).
pub(super) fn cross_entropy<T: Float>(
    cpu: &Cpu,
    losses: ViewMut,
    logits: ViewMut,
    targets: View,
    grad_weights: Option<View>,
) -> Result<()> {
    let op = Op("cross_entropy");
    let [n, v] = op.dims("logits", logits.shape())?;
    let targets = op.read::<i32>("targets", targets, &[n])?;
    targets.iter().filter(|&&t| t != IGNORED).try_for_each(|&t| op.index("target", t, v).map(drop))?;
    let grad_weights = grad_weights.map(|w| op.read::<T>("grad_weights", w, &[n])).transpose()?;
    let (losses, logits) = (op.write::<T>("losses", losses, &[n])?, op.write::<T>("logits", logits, &[n, v])?);
    if v == 0 {
        losses.fill(T::ZERO);
        return Ok(());
    }
    let rows = rows_per_task(v);
    cpu.each(
        n * v,
        losses.chunks_mut(rows).zip(logits.chunks_mut(rows * v)).enumerate(),
        #[inline(always)]
        |(i, (losses, logits))| {
            for (j, (loss, row)) in losses.iter_mut().zip(logits.chunks_mut(v)).enumerate() {
                let n = i * rows + j;
                *loss = row_loss(row, targets[n], grad_weights.map(|w| w[n]));
            }
        },
    );
    Ok(())
}

/// The loss of one row; with `weight`, the row becomes its gradient.
#[inline(always)]
fn row_loss<T: Float>(row: &mut [T], target: i32, weight: Option<T>) -> T {
    if target == IGNORED {
        if weight.is_some() {
            row.fill(T::ZERO);
        }
        return T::ZERO;
    }
    let target = target as usize;
    let (top, at_target) = (float::max(row), row[target]);
    let Some(weight) = weight else {
        return top + float::sum_exp_shifted(row, top).ln() - at_target;
    };
    let mass = float::exp_shifted(row, top);
    float::scale(row, weight / mass);
    row[target] -= weight;
    top + mass.ln() - at_target
}
