//! SwiGLU: y = silu(gate) * up.
//!
//! Legend: T tokens, I intermediate size.

use super::{Cpu, args::Op, float::Float, tasks::rows_per_task};
use crate::{Result, View, ViewMut};

/// See [`Ops::swiglu`](crate::Ops::swiglu).
pub(super) fn swiglu<T: Float>(cpu: &Cpu, y: ViewMut, gate_up: View) -> Result<()> {
    let op = Op("swiglu");
    let [t, i] = op.dims("y", y.shape())?;
    let (gate_up, y) = (op.read::<T>("gate_up", gate_up, &[t, 2 * i])?, op.write::<T>("y", y, &[t, i])?);
    let rows = rows_per_task(i);
    cpu.each(
        gate_up.len(),
        y.chunks_mut((rows * i).max(1)).zip(gate_up.chunks((2 * rows * i).max(1))),
        #[inline(always)]
        |(y, gate_up)| {
            for (y, gate_up) in y.chunks_mut(i).zip(gate_up.chunks(2 * i)) {
                let (gate, up) = gate_up.split_at(i);
                for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
                    *y = g * u / (T::ONE + (-g).exp());
                }
            }
        },
    );
    Ok(())
}

#[inline(always)]
pub(super) fn sigmoid<T: Float>(g: T) -> T {
    T::ONE / (T::ONE + (-g).exp())
}

/// Gradients of gate and up from `dy`, that of silu(gate) * up.
#[inline(always)]
pub(super) fn gradients<T: Float>(dy: T, g: T, u: T, sigmoid: T) -> (T, T) {
    (dy * u * sigmoid * (T::ONE + g * (T::ONE - sigmoid)), dy * g * sigmoid)
}

/// See [`Ops::swiglu_grad`](crate::Ops::swiglu_grad).
pub(super) fn swiglu_grad<T: Float>(cpu: &Cpu, dgate_up: ViewMut, dy: View, gate_up: View) -> Result<()> {
    let op = Op("swiglu_grad");
    let [t, i] = op.dims("dy", dy.shape())?;
    let (dy, gate_up) = (op.read::<T>("dy", dy, &[t, i])?, op.read::<T>("gate_up", gate_up, &[t, 2 * i])?);
    let dgate_up = op.write::<T>("dgate_up", dgate_up, &[t, 2 * i])?;
    let rows = rows_per_task(i);
    let size = (rows * i).max(1);
    let tasks = dgate_up.chunks_mut(2 * size).zip(dy.chunks(size)).zip(gate_up.chunks(2 * size));
    cpu.each(
        gate_up.len(),
        tasks,
        #[inline(always)]
        |((out, dy), gate_up)| {
            for ((out, dy), gate_up) in out.chunks_mut(2 * i).zip(dy.chunks(i)).zip(gate_up.chunks(2 * i)) {
                let ((gate, up), (dgate, dup)) = (gate_up.split_at(i), out.split_at_mut(i));
                for ((((dg, du), &dy), &g), &u) in dgate.iter_mut().zip(dup).zip(dy).zip(gate).zip(up) {
                    (*dg, *du) = gradients(dy, g, u, sigmoid(g));
                }
            }
        },
    );
    Ok(())
}
