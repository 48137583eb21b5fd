//! Element-wise arithmetic.

use super::{
    Cpu,
    args::Op,
    float::{self, Float},
    tasks::rows_per_task,
};
use crate::{Result, View, ViewMut};

/// See [`Ops::add`](crate::Ops::add).
pub(super) fn add<T: Float>(cpu: &Cpu, out: ViewMut, a: View, b: View) -> Result<()> {
    let op = Op("add");
    let (x, b, out) = (op.read::<T>("a", a, a.shape())?, op.read::<T>("b", b, a.shape())?, op.write::<T>("out", out, a.shape())?);
    let step = rows_per_task(1);
    cpu.each(
        out.len(),
        out.chunks_mut(step).zip(x.chunks(step)).zip(b.chunks(step)),
        #[inline(always)]
        |((out, a), b)| {
            for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
                *o = a + b;
            }
        },
    );
    Ok(())
}

/// See [`Ops::add_assign`](crate::Ops::add_assign).
pub(super) fn add_assign<T: Float>(cpu: &Cpu, out: ViewMut, a: View) -> Result<()> {
    let op = Op("add_assign");
    let (x, out) = (op.read::<T>("a", a, a.shape())?, op.write::<T>("out", out, a.shape())?);
    let step = rows_per_task(1);
    cpu.each(
        out.len(),
        out.chunks_mut(step).zip(x.chunks(step)),
        #[inline(always)]
        |(out, a)| float::accumulate(out, a),
    );
    Ok(())
}

/// See [`Ops::scale`](crate::Ops::scale).
pub(super) fn scale<T: Float>(cpu: &Cpu, out: ViewMut, factor: f64) -> Result<()> {
    let shape = out.shape().to_vec();
    let out = Op("scale").write::<T>("out", out, &shape)?;
    cpu.each(
        out.len(),
        out.chunks_mut(rows_per_task(1)),
        #[inline(always)]
        |out| float::scale(out, T::of(factor)),
    );
    Ok(())
}
