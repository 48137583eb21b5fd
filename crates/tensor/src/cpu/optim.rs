//! Gradient statistics and the AdamW step.

use super::{Cpu, args::Op, float::Float, tasks::rows_per_task};
use crate::{AdamW, AdamWState, Result, View, ViewMut};
use half::{bf16, f16};

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

/// See [`Ops::clip_factor`](crate::Ops::clip_factor).
pub(super) fn clip_factor<T: Float>(factor: ViewMut, squares: View, guard: View, limit: f64) -> Result<()> {
    let op = Op("clip_factor");
    let (squares, guard) = (op.read::<f64>("squares", squares, &[1])?[0], op.read::<f64>("guard", guard, &[1])?[0]);
    let factor = op.write::<T>("factor", factor, &[1])?;
    factor[0] = T::of(match (squares.is_finite() && guard.is_finite(), limit > 0.0) {
        (false, _) => f64::NAN,
        (true, true) => (limit / (squares.sqrt() + 1e-6)).min(1.0),
        (true, false) => 1.0,
    });
    Ok(())
}

/// See [`Ops::adamw`](crate::Ops::adamw): in the order of `torch.optim.AdamW`, coefficients in f64, elements in `T`.
pub(super) fn adamw<T: Float>(cpu: &Cpu, state: AdamWState, grad: View, clip: View, step: AdamW) -> Result<()> {
    let op = Op("adamw");
    let shape = grad.shape();
    let AdamWState { weight, remainder, m, v } = state;
    op.require(remainder.is_none(), "remainder", shape, "none: the weights of the CPU are exact themselves")?;
    let grad = op.read::<T>("grad", grad, shape)?;
    let (w, m, v) = (op.write::<T>("weight", weight, shape)?, op.write::<T>("m", m, shape)?, op.write::<T>("v", v, shape)?);
    op.require(step.step > 0, "step", &[0], "a step number from 1")?;
    let clip = op.read::<T>("clip", clip, &[1])?[0];
    if clip.f64().is_nan() {
        return Ok(());
    }
    let t = step.step as f64;
    let (c1, c2) = (1.0 - step.beta1.powf(t), 1.0 - step.beta2.powf(t));
    let keep = T::of(1.0 - step.lr * step.weight_decay);
    let (b1, g1) = (T::of(step.beta1), T::of(1.0 - step.beta1));
    let (b2, g2) = (T::of(step.beta2), T::of(1.0 - step.beta2));
    let (rate, root, eps) = (T::of(step.lr / c1), T::of(c2.sqrt()), T::of(step.eps));
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

/// See [`Ops::master_split`](crate::Ops::master_split).
pub(super) fn master_split(weight: ViewMut, remainder: ViewMut, values: View) -> Result<()> {
    let op = Op("master_split");
    let shape = values.shape();
    let values = op.read::<f32>("values", values, shape)?;
    let (weight, remainder) = (op.write::<bf16>("weight", weight, shape)?, op.write::<f16>("remainder", remainder, shape)?);
    for ((w, r), x) in weight.iter_mut().zip(remainder).zip(values) {
        // Half of the remainder's range added before the low bits are cut: nearest, ties away from zero.
        let top = (x.to_bits().wrapping_add(0x8000) >> 16) as u16;
        (*w, *r) = (bf16::from_bits(top), f16::from_bits(x.to_bits() as u16));
    }
    Ok(())
}

/// See [`Ops::master_join`](crate::Ops::master_join).
pub(super) fn master_join(values: ViewMut, weight: View, remainder: View) -> Result<()> {
    let op = Op("master_join");
    let shape = weight.shape();
    let (weight, remainder) = (op.read::<bf16>("weight", weight, shape)?, op.read::<f16>("remainder", remainder, shape)?);
    let values = op.write::<f32>("values", values, shape)?;
    for ((x, w), r) in values.iter_mut().zip(weight).zip(remainder) {
        let low = r.to_bits() as i16 as i32 as u32;
        *x = f32::from_bits(((w.to_bits() as u32) << 16).wrapping_add(low));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Ops};

    #[test]
    fn a_master_is_its_weight_and_remainder_to_the_last_bit() {
        let bits = (0..1u64 << 32).step_by(65_521).map(|b| f32::from_bits(b as u32)).filter(|x| x.abs() < 3e38);
        let values: Vec<f32> = bits.chain([0.0, -0.0, 1.0, 1.0 + 1.0 / 256.0, f32::MIN_POSITIVE, -1e-40]).collect();
        let (cpu, shape) = (Cpu::new(1), [values.len()]);
        let mut weight = cpu.zeros(DType::BF16, &shape).unwrap();
        let mut remainder = cpu.zeros(DType::F16, &shape).unwrap();
        cpu.master_split(weight.view_mut(), remainder.view_mut(), View::host(&values, &shape)).unwrap();
        let mut joined = cpu.zeros(DType::F32, &shape).unwrap();
        cpu.master_join(joined.view_mut(), weight.view(), remainder.view()).unwrap();
        for ((x, y), w) in values.iter().zip(joined.as_slice::<f32>().unwrap()).zip(weight.as_slice::<bf16>().unwrap()) {
            assert_eq!(x.to_bits(), y.to_bits());
            assert!((w.to_f32() - x).abs() <= x.abs() / 256.0 + f32::MIN_POSITIVE, "{w} for {x}");
        }
    }
}
