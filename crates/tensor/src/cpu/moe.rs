//! Moving tokens to their experts and back.
//!
//! Legend: T tokens, H hidden size, E experts, K experts per token, S = T*K routed rows.

use super::{
    Cpu,
    args::Op,
    float::{self, Float},
    tasks::rows_per_task,
};
use crate::{Result, View, ViewMut};

/// See [`Ops::moe_sort`](crate::Ops::moe_sort).
pub(super) fn moe_sort(offsets: ViewMut, source: ViewMut, place: ViewMut, experts: View) -> Result<()> {
    let op = Op("moe_sort");
    let ([t, k], [e1]) = (op.dims("experts", experts.shape())?, op.dims("offsets", offsets.shape())?);
    op.require(e1 > 0, "offsets", &[e1], "[E+1]")?;
    let s = t * k;
    op.require(i32::try_from(s).is_ok(), "experts", &[t, k], "fewer than 2^31 routed rows")?;
    let experts = op.read::<i32>("experts", experts, &[t, k])?;
    op.indices("expert", experts, e1 - 1)?;
    let offsets = op.write::<i32>("offsets", offsets, &[e1])?;
    let (source, place) = (op.write::<i32>("source", source, &[s])?, op.write::<i32>("place", place, &[t, k])?);
    offsets.fill(0);
    for &e in experts {
        offsets[e as usize + 1] += 1;
    }
    for e in 1..e1 {
        offsets[e] += offsets[e - 1];
    }
    let mut next = offsets.to_vec();
    for (i, &e) in experts.iter().enumerate() {
        let to = next[e as usize];
        next[e as usize] += 1;
        source[to as usize] = i as i32;
        place[i] = to;
    }
    Ok(())
}

/// S / T, checked: every token has the same number of routed rows.
fn per_token(op: Op, what: &'static str, s: usize, t: usize) -> Result<usize> {
    op.require(s.is_multiple_of(t), what, &[s], "a multiple of the tokens as rows")?;
    Ok(s.checked_div(t).unwrap_or(0))
}

/// See [`Ops::moe_gather`](crate::Ops::moe_gather).
pub(super) fn moe_gather<T: Float>(cpu: &Cpu, out: ViewMut, x: View, source: View) -> Result<()> {
    let op = Op("moe_gather");
    let ([t, h], [s]) = (op.dims("x", x.shape())?, op.dims("source", source.shape())?);
    let k = per_token(op, "source", s, t)?;
    let (x, source) = (op.read::<T>("x", x, &[t, h])?, op.read::<i32>("source", source, &[s])?);
    op.indices("routed row", source, s)?;
    let out = op.write::<T>("out", out, &[s, h])?;
    let rows = rows_per_task(h);
    cpu.each(
        s * h,
        out.chunks_mut((rows * h).max(1)).zip(source.chunks(rows)),
        #[inline(always)]
        |(out, source)| {
            for (out, &from) in out.chunks_mut(h).zip(source) {
                out.copy_from_slice(&x[from as usize / k * h..][..h]);
            }
        },
    );
    Ok(())
}

/// See [`Ops::moe_combine`](crate::Ops::moe_combine).
pub(super) fn moe_combine<T: Float>(cpu: &Cpu, out: ViewMut, y: View, weights: Option<View>, place: View) -> Result<()> {
    let op = Op("moe_combine");
    let ([t, k], [_, h]) = (op.dims("place", place.shape())?, op.dims("y", y.shape())?);
    let (y, place) = (op.read::<T>("y", y, &[t * k, h])?, op.read::<i32>("place", place, &[t, k])?);
    op.indices("routed row", place, t * k)?;
    let weights = weights.map(|w| op.read::<T>("weights", w, &[t, k])).transpose()?;
    let out = op.write::<T>("out", out, &[t, h])?;
    let rows = rows_per_task(k * h);
    cpu.each(
        t * k * h,
        out.chunks_mut((rows * h).max(1)).enumerate(),
        #[inline(always)]
        |(i, out)| {
            for (j, out) in out.chunks_mut(h).enumerate() {
                let t = i * rows + j;
                out.fill(T::ZERO);
                for at in t * k..(t + 1) * k {
                    let weight = weights.map_or(T::ONE, |w| w[at]);
                    float::axpy(out, weight, &y[place[at] as usize * h..][..h]);
                }
            }
        },
    );
    Ok(())
}

/// See [`Ops::moe_combine_grad`](crate::Ops::moe_combine_grad).
pub(super) fn moe_combine_grad<T: Float>(
    cpu: &Cpu,
    dy: ViewMut,
    dweights: ViewMut,
    dout: View,
    y: View,
    weights: View,
    source: View,
    place: View,
) -> Result<()> {
    let op = Op("moe_combine_grad");
    let ([t, k], [_, h]) = (op.dims("place", place.shape())?, op.dims("dout", dout.shape())?);
    let s = t * k;
    let (y, dout) = (op.read::<T>("y", y, &[s, h])?, op.read::<T>("dout", dout, &[t, h])?);
    let (source, place) = (op.read::<i32>("source", source, &[s])?, op.read::<i32>("place", place, &[t, k])?);
    op.indices("routed row", source, s)?;
    op.indices("routed row", place, s)?;
    let weights = op.read::<T>("weights", weights, &[t, k])?;
    let (dy, dweights) = (op.write::<T>("dy", dy, &[s, h])?, op.write::<T>("dweights", dweights, &[t, k])?);
    let rows = rows_per_task(h);
    cpu.each(
        s * h,
        dy.chunks_mut((rows * h).max(1)).zip(source.chunks(rows)),
        #[inline(always)]
        |(dy, source)| {
            for (dy, &from) in dy.chunks_mut(h).zip(source) {
                let from = from as usize;
                for (dy, &d) in dy.iter_mut().zip(&dout[from / k * h..][..h]) {
                    *dy = weights[from] * d;
                }
            }
        },
    );
    cpu.each(
        s * h,
        dweights.chunks_mut(rows).zip(place.chunks(rows)).enumerate(),
        #[inline(always)]
        |(i, (dweights, place))| {
            for (j, (dw, &at)) in dweights.iter_mut().zip(place).enumerate() {
                let t = (i * rows + j) / k;
                *dw = float::dot(&y[at as usize * h..][..h], &dout[t * h..][..h]);
            }
        },
    );
    Ok(())
}
