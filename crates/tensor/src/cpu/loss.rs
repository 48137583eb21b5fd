//! Cross-entropy and, in place of the logits, its gradient; whole, and of a vocabulary that is divided over ranks.
//!
//! Legend: N rows, V vocabulary (of this rank), P ranks.

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
    each_row(
        cpu,
        losses,
        logits,
        #[inline(always)]
        |n, row| row_loss(row, targets[n], grad_weights.map(|w| w[n])),
    );
    Ok(())
}

/// Gives every row of logits `[N, V]` to `loss` with its number, on all threads.
#[inline(always)]
fn each_row<T: Float>(cpu: &Cpu, losses: &mut [T], logits: &mut [T], loss: impl Fn(usize, &mut [T]) -> T + Sync) {
    let v = logits.len().checked_div(losses.len()).unwrap_or(0).max(1);
    let rows = rows_per_task(v);
    cpu.each(
        logits.len(),
        losses.chunks_mut(rows).zip(logits.chunks_mut(rows * v)).enumerate(),
        #[inline(always)]
        |(i, (losses, logits))| {
            for (j, (out, row)) in losses.iter_mut().zip(logits.chunks_mut(v)).enumerate() {
                *out = loss(i * rows + j, row);
            }
        },
    );
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

/// See [`Ops::vocab_stats`](crate::Ops::vocab_stats).
pub(super) fn vocab_stats<T: Float>(cpu: &Cpu, stats: ViewMut, logits: View, targets: View, first: usize) -> Result<()> {
    let op = Op("vocab_stats");
    let [n, v] = op.dims("logits", logits.shape())?;
    let targets = op.read::<i32>("targets", targets, &[n])?;
    let (stats, logits) = (op.write::<T>("stats", stats, &[n, 3])?, op.read::<T>("logits", logits, &[n, v])?);
    let rows = rows_per_task(v.max(1));
    cpu.each(
        n * v,
        stats.chunks_mut(rows * 3).zip(logits.chunks((rows * v).max(1))).enumerate(),
        #[inline(always)]
        |(i, (stats, logits))| {
            for (j, (stats, row)) in stats.chunks_mut(3).zip(logits.chunks(v)).enumerate() {
                let top = float::max(row);
                let target = local(targets[i * rows + j], first, v).map_or(T::ZERO, |t| row[t]);
                stats.copy_from_slice(&[top, float::sum_exp_shifted(row, top), target]);
            }
        },
    );
    Ok(())
}

/// See [`Ops::cross_entropy_divided`](crate::Ops::cross_entropy_divided).
pub(super) fn cross_entropy_divided<T: Float>(
    cpu: &Cpu,
    losses: ViewMut,
    logits: ViewMut,
    targets: View,
    first: usize,
    stats: View,
    grad_weights: Option<View>,
) -> Result<()> {
    let op = Op("cross_entropy_divided");
    let ([n, v], [p, _, _]) = (op.dims("logits", logits.shape())?, op.dims("stats", stats.shape())?);
    let targets = op.read::<i32>("targets", targets, &[n])?;
    let stats = op.read::<T>("stats", stats, &[p, n, 3])?;
    let grad_weights = grad_weights.map(|w| op.read::<T>("grad_weights", w, &[n])).transpose()?;
    let (losses, logits) = (op.write::<T>("losses", losses, &[n])?, op.write::<T>("logits", logits, &[n, v])?);
    each_row(
        cpu,
        losses,
        logits,
        #[inline(always)]
        |row, logits| {
            let parts = stats.chunks(3).skip(row).step_by(n);
            divided_row(logits, targets[row], first, parts, grad_weights.map(|w| w[row]))
        },
    );
    Ok(())
}

/// The loss of one row from the statistics of all ranks' parts of it; with `weight`, this rank's part becomes its gradient.
#[inline(always)]
fn divided_row<'s, T: Float>(
    row: &mut [T],
    target: i32,
    first: usize,
    parts: impl Iterator<Item = &'s [T]> + Clone,
    weight: Option<T>,
) -> T {
    if target == IGNORED {
        if weight.is_some() {
            row.fill(T::ZERO);
        }
        return T::ZERO;
    }
    let top = parts.clone().fold(T::NEG_INFINITY, |top, part| top.larger(part[0]));
    let mass = parts.clone().fold(T::ZERO, |mass, part| mass + part[1] * (part[0] - top).exp());
    let at_target = parts.fold(T::ZERO, |sum, part| sum + part[2]);
    if let Some(weight) = weight {
        float::exp_shifted(row, top);
        float::scale(row, weight / mass);
        if let Some(t) = local(target, first, row.len()) {
            row[t] -= weight;
        }
    }
    top + mass.ln() - at_target
}

/// The place of a target among `len` classes from `first` on.
#[inline(always)]
fn local(target: i32, first: usize, len: usize) -> Option<usize> {
    usize::try_from(target).ok()?.checked_sub(first).filter(|t| *t < len)
}
