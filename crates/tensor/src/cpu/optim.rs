//! Gradient statistics and the AdamW step.

use super::{Cpu, args::Op, float::Float, tasks::rows_per_task};
use crate::{AdamW, Result, View, ViewMut};

/// See [`Ops::sum_squares`](crate::Ops::sum_squares).
pub(super) fn sum_squares<T: Float>(cpu: &Cpu, out: ViewMut, x: View) -> Result<()> {
    let op = Op("sum_squares");
    let x = op.read::<T>("x", x, x.shape())?;
    let out = op.write::<f64>("out", out, &[1])?;
    let sums = cpu.map(
        x.len(),
        x.chunks(rows_per_task(1)),
        #[inline(always)]
        |x| {
            let mut lanes = [0.0; 16];
            // Arrays, so that the inner loop has a constant length and becomes vectors.
            let (chunks, rest) = x.as_chunks::<16>();
            for chunk in chunks {
                for (lane, v) in lanes.iter_mut().zip(chunk) {
                    *lane += v.f64() * v.f64();
                }
            }
            for (lane, v) in lanes.iter_mut().zip(rest) {
                *lane += v.f64() * v.f64();
            }
            lanes.iter().sum::<f64>()
        },
    );
    out[0] += sums.iter().sum::<f64>();
    Ok(())
}

/// See [`Ops::count_non_finite`](crate::Ops::count_non_finite).
pub(super) fn count_non_finite<T: Float>(cpu: &Cpu, out: ViewMut, x: View) -> Result<()> {
    let op = Op("count_non_finite");
    let x = op.read::<T>("x", x, x.shape())?;
    let out = op.write::<i32>("out", out, &[1])?;
    let counts = cpu.map(
        x.len(),
        x.chunks(rows_per_task(1)),
        #[inline(always)]
        |x| x.iter().map(|v| !v.is_finite() as i32).sum::<i32>(),
    );
    out[0] = counts.into_iter().fold(out[0], i32::saturating_add);
    Ok(())
}

/// See [`Ops::adamw`](crate::Ops::adamw): in the order of `torch.optim.AdamW`, coefficients in f64, elements in `T`.
pub(super) fn adamw<T: Float>(cpu: &Cpu, w: ViewMut, m: ViewMut, v: ViewMut, grad: View, step: AdamW) -> Result<()> {
    let op = Op("adamw");
    let shape = grad.shape();
    let grad = op.read::<T>("grad", grad, shape)?;
    let (w, m, v) = (op.write::<T>("w", w, shape)?, op.write::<T>("m", m, shape)?, op.write::<T>("v", v, shape)?);
    op.require(step.step > 0, "step", &[0], "a step number from 1")?;
    let t = step.step as f64;
    let (c1, c2) = (1.0 - step.beta1.powf(t), 1.0 - step.beta2.powf(t));
    let keep = T::of(1.0 - step.lr * step.weight_decay);
    let (b1, g1) = (T::of(step.beta1), T::of(1.0 - step.beta1));
    let (b2, g2) = (T::of(step.beta2), T::of(1.0 - step.beta2));
    let (rate, root, eps, clip) = (T::of(step.lr / c1), T::of(c2.sqrt()), T::of(step.eps), T::of(step.grad_scale));
    let size = rows_per_task(1);
    let tasks = w.chunks_mut(size).zip(m.chunks_mut(size)).zip(v.chunks_mut(size)).zip(grad.chunks(size));
    cpu.each(
        grad.len(),
        tasks,
        #[inline(always)]
        |(((w, m), v), grad)| {
            for (((w, m), v), &g) in w.iter_mut().zip(m).zip(v).zip(grad) {
                let g = g * clip;
                *m = b1 * *m + g1 * g;
                *v = b2 * *v + g2 * (g * g);
                let denominator = v.sqrt() / root + eps;
                *w = *w * keep - rate * (*m / denominator);
            }
        },
    );
    Ok(())
}
