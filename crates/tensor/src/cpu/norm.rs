//! RMSNorm, alone and fused with the residual addition before it.
//!
//! y = w * x * r with r = 1 / sqrt(mean(x^2) + eps).
//! dx = r * (w*dy - x * r^2 * mean(w*dy*x)); dw = sum_n dy * x * r.
//!
//! Legend: N rows, H hidden size.

use super::{
    Cpu,
    args::Op,
    float::{Float, squares, sum2},
    tasks::rows_per_task,
};
use crate::{Result, View, ViewMut};

/// Writes `w * x * rstd` and returns rstd.
#[inline(always)]
pub(super) fn normalise<T: Float>(y: &mut [T], x: &[T], w: &[T], eps: T) -> T {
    let rstd = rstd(x, eps);
    for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
        *y = w * (x * rstd);
    }
    rstd
}

/// 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
pub(super) fn rstd<T: Float>(x: &[T], eps: T) -> T {
    T::ONE / (squares(x) / T::of(x.len() as f64) + eps).sqrt()
}

/// Overwrites `dx` with the gradient through the norm, given `dy`. `dx` may not be `dy`.
#[inline(always)]
pub(super) fn grad_row<T: Float>(dx: &mut [T], dy: &[T], x: &[T], w: &[T], rstd: T) {
    for ((dx, &dy), &w) in dx.iter_mut().zip(dy).zip(w) {
        *dx = w * dy;
    }
    let mean = sum2(dx, x, |g, x| g * x) / T::of(x.len() as f64);
    let pull = mean * rstd * rstd;
    for (dx, &x) in dx.iter_mut().zip(x) {
        *dx = rstd * (*dx - x * pull);
    }
}

/// See [`Ops::rms_norm`](crate::Ops::rms_norm).
pub(super) fn rms_norm<T: Float>(cpu: &Cpu, y: ViewMut, rstd: ViewMut, x: View, w: View, eps: f64) -> Result<()> {
    let op = Op("rms_norm");
    let [n, h] = op.dims("x", x.shape())?;
    let (x, w) = (op.read::<T>("x", x, &[n, h])?, op.read::<T>("w", w, &[h])?);
    let (y, rstd) = (op.write::<T>("y", y, &[n, h])?, op.write::<T>("rstd", rstd, &[n])?);
    let rows = rows_per_task(h);
    let size = (rows * h).max(1);
    cpu.each(
        n * h,
        y.chunks_mut(size).zip(x.chunks(size)).zip(rstd.chunks_mut(rows)),
        #[inline(always)]
        |((y, x), rstd)| {
            for ((y, x), r) in y.chunks_mut(h).zip(x.chunks(h)).zip(rstd) {
                *r = normalise(y, x, w, T::of(eps));
            }
        },
    );
    Ok(())
}

/// See [`Ops::add_rms_norm`](crate::Ops::add_rms_norm).
pub(super) fn add_rms_norm<T: Float>(
    cpu: &Cpu,
    sum: ViewMut,
    y: ViewMut,
    rstd: ViewMut,
    a: View,
    b: View,
    w: View,
    eps: f64,
) -> Result<()> {
    let op = Op("add_rms_norm");
    let [n, h] = op.dims("a", a.shape())?;
    let (a, b, w) = (op.read::<T>("a", a, &[n, h])?, op.read::<T>("b", b, &[n, h])?, op.read::<T>("w", w, &[h])?);
    let (sum, y) = (op.write::<T>("sum", sum, &[n, h])?, op.write::<T>("y", y, &[n, h])?);
    let rstd = op.write::<T>("rstd", rstd, &[n])?;
    let rows = rows_per_task(h);
    let size = (rows * h).max(1);
    let outputs = sum.chunks_mut(size).zip(y.chunks_mut(size)).zip(rstd.chunks_mut(rows));
    let inputs = a.chunks(size).zip(b.chunks(size));
    cpu.each(
        n * h,
        outputs.zip(inputs),
        #[inline(always)]
        |(((sum, y), rstd), (a, b))| {
            let outputs = sum.chunks_mut(h).zip(y.chunks_mut(h)).zip(rstd);
            for (((sum, y), r), (a, b)) in outputs.zip(a.chunks(h).zip(b.chunks(h))) {
                for ((s, &a), &b) in sum.iter_mut().zip(a).zip(b) {
                    *s = a + b;
                }
                *r = normalise(y, sum, w, T::of(eps));
            }
        },
    );
    Ok(())
}

/// See [`Ops::rms_norm_grad_input`](crate::Ops::rms_norm_grad_input).
pub(super) fn rms_norm_grad_input<T: Float>(
    cpu: &Cpu,
    dx: ViewMut,
    dy: View,
    x: View,
    w: View,
    rstd: View,
    residual: Option<View>,
) -> Result<()> {
    let op = Op("rms_norm_grad_input");
    let [n, h] = op.dims("x", x.shape())?;
    let (x, w, dy) = (op.read::<T>("x", x, &[n, h])?, op.read::<T>("w", w, &[h])?, op.read::<T>("dy", dy, &[n, h])?);
    let rstd = op.read::<T>("rstd", rstd, &[n])?;
    let residual = residual.map(|r| op.read::<T>("residual", r, &[n, h])).transpose()?;
    let dx = op.write::<T>("dx", dx, &[n, h])?;
    let rows = rows_per_task(h);
    cpu.each(
        n * h,
        dx.chunks_mut((rows * h).max(1)).enumerate(),
        #[inline(always)]
        |(i, dx)| {
            for (j, dx) in dx.chunks_mut(h).enumerate() {
                let n = i * rows + j;
                let at = n * h..(n + 1) * h;
                grad_row(dx, &dy[at.clone()], &x[at.clone()], w, rstd[n]);
                if let Some(residual) = residual {
                    super::float::accumulate(dx, &residual[at]);
                }
            }
        },
    );
    Ok(())
}

/// See [`Ops::rms_norm_grad_weight`](crate::Ops::rms_norm_grad_weight).
pub(super) fn rms_norm_grad_weight<T: Float>(cpu: &Cpu, dw: ViewMut, dy: View, x: View, rstd: View) -> Result<()> {
    let op = Op("rms_norm_grad_weight");
    let [n, h] = op.dims("x", x.shape())?;
    let (x, dy, rstd) = (op.read::<T>("x", x, &[n, h])?, op.read::<T>("dy", dy, &[n, h])?, op.read::<T>("rstd", rstd, &[n])?);
    let dw = op.write::<T>("dw", dw, &[h])?;
    cpu.sum_rows(
        dw,
        n,
        h,
        #[inline(always)]
        |first, end, sum| {
            let rows = dy[first * h..end * h].chunks(h.max(1)).zip(x[first * h..end * h].chunks(h.max(1)));
            for ((dy, x), &r) in rows.zip(&rstd[first..end]) {
                for ((s, &dy), &x) in sum.iter_mut().zip(dy).zip(x) {
                    *s += dy * (x * r);
                }
            }
        },
    );
    Ok(())
}
