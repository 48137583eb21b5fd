//! Moving tokens to their experts and back.
//!
//! Legend: T tokens, H hidden size, E experts, K experts per token, R rows of the experts that are here (T*K
//! unless some are elsewhere).

use super::{
    Cpu,
    args::Op,
    float::{self, Float},
    tasks::rows_per_task,
};
use crate::{FromSlice, Result, View, ViewMut};

/// See [`Ops::moe_sort`](crate::Ops::moe_sort).
pub(super) fn moe_sort(offsets: ViewMut, place: ViewMut, experts: View, first: usize) -> Result<()> {
    let op = Op("moe_sort");
    let ([t, k], [e1]) = (op.dims("experts", experts.shape())?, op.dims("offsets", offsets.shape())?);
    op.require(e1 > 0, "offsets", &[e1], "[E+1]")?;
    op.require(i32::try_from(t * k).is_ok(), "experts", &[t, k], "fewer than 2^31 routed rows")?;
    let experts = op.read::<i32>("experts", experts, &[t, k])?;
    let offsets = op.write::<i32>("offsets", offsets, &[e1])?;
    let place = op.write::<i32>("place", place, &[t, k])?;
    let count = e1 - 1;
    // Which of the experts it is; `count` for all others.
    let class = |e: i32| usize::try_from(e).ok().and_then(|e| e.checked_sub(first)).filter(|e| *e < count).unwrap_or(count);
    let mut next = vec![0i32; count + 2];
    for &e in experts {
        next[class(e) + 1] += 1;
    }
    for e in 1..next.len() {
        next[e] += next[e - 1];
    }
    offsets.copy_from_slice(&next[..e1]);
    for (place, &e) in place.iter_mut().zip(experts) {
        let next = &mut next[class(e)];
        *place = *next;
        *next += 1;
    }
    Ok(())
}

/// See [`Ops::moe_ranks`](crate::Ops::moe_ranks).
pub(super) fn moe_ranks(ranks: ViewMut, rows: ViewMut, experts: View, per_rank: usize, slices: usize) -> Result<()> {
    let op = Op("moe_ranks");
    let ([t, k], [n]) = (op.dims("experts", experts.shape())?, op.dims("rows", rows.shape())?);
    op.require(per_rank > 0 && slices > 0 && n.is_multiple_of(slices), "rows", &[n], "a multiple of slices, and experts on each rank")?;
    let experts = op.read::<i32>("experts", experts, &[t, k])?;
    op.indices("expert", experts, n / slices * per_rank)?;
    let ranks = op.write::<i32>("ranks", ranks, &[t, n])?;
    let rows = op.write::<i32>("rows", rows, &[n])?;
    rows.fill(0);
    ranks.fill(n as i32);
    for (t, experts) in experts.chunks(k.max(1)).enumerate() {
        for &e in experts {
            let holders = e as usize / per_rank * slices..(e as usize / per_rank + 1) * slices;
            for r in holders {
                ranks[t * n + r] = r as i32;
                rows[r] += 1;
            }
        }
    }
    Ok(())
}

/// For each of `rows` rows the (t, k) whose place it is; an error if a row is no place.
fn sources(op: Op, place: &[i32], rows: usize) -> Result<Vec<usize>> {
    let mut from = vec![usize::MAX; rows];
    for (at, &place) in place.iter().enumerate() {
        if let Some(from) = from.get_mut(place as usize) {
            *from = at;
        }
    }
    op.require(from.iter().all(|from| *from < usize::MAX), "place", &[place.len()], "a place for every row")?;
    Ok(from)
}

/// See [`Ops::moe_gather`](crate::Ops::moe_gather).
pub(super) fn moe_gather<T: FromSlice + Copy + Send + Sync>(cpu: &Cpu, out: ViewMut, x: View, place: View) -> Result<()> {
    let op = Op("moe_gather");
    let ([t, k], [r, h]) = (op.dims("place", place.shape())?, op.dims("out", out.shape())?);
    let (x, place) = (op.read::<T>("x", x, &[t, h])?, op.read::<i32>("place", place, &[t, k])?);
    op.indices("routed row", place, t * k)?;
    let out = op.write::<T>("out", out, &[r, h])?;
    let from = sources(op, place, r)?;
    let rows = rows_per_task(h);
    cpu.each(
        r * h,
        out.chunks_mut((rows * h).max(1)).zip(from.chunks(rows)),
        #[inline(always)]
        |(out, from)| {
            for (out, &from) in out.chunks_mut(h).zip(from) {
                out.copy_from_slice(&x[from / k * h..][..h]);
            }
        },
    );
    Ok(())
}

/// See [`Ops::moe_combine`](crate::Ops::moe_combine).
pub(super) fn moe_combine<T: Float>(cpu: &Cpu, out: ViewMut, y: View, weights: Option<View>, place: View) -> Result<()> {
    let op = Op("moe_combine");
    let ([t, k], [r, h]) = (op.dims("place", place.shape())?, op.dims("y", y.shape())?);
    let (y, place) = (op.read::<T>("y", y, &[r, h])?, op.read::<i32>("place", place, &[t, k])?);
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
                for at in (t * k..(t + 1) * k).filter(|at| (place[*at] as usize) < r) {
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
    place: View,
) -> Result<()> {
    let op = Op("moe_combine_grad");
    let ([t, k], [r, h]) = (op.dims("place", place.shape())?, op.dims("y", y.shape())?);
    let (y, dout) = (op.read::<T>("y", y, &[r, h])?, op.read::<T>("dout", dout, &[t, h])?);
    let place = op.read::<i32>("place", place, &[t, k])?;
    op.indices("routed row", place, t * k)?;
    let weights = op.read::<T>("weights", weights, &[t, k])?;
    let (dy, dweights) = (op.write::<T>("dy", dy, &[r, h])?, op.write::<T>("dweights", dweights, &[t, k])?);
    let from = sources(op, place, r)?;
    let rows = rows_per_task(h);
    cpu.each(
        r * h,
        dy.chunks_mut((rows * h).max(1)).zip(from.chunks(rows)),
        #[inline(always)]
        |(dy, from)| {
            for (dy, &from) in dy.chunks_mut(h).zip(from) {
                for (dy, &d) in dy.iter_mut().zip(&dout[from / k * h..][..h]) {
                    *dy = weights[from] * d;
                }
            }
        },
    );
    cpu.each(
        t * k * h,
        dweights.chunks_mut(rows).zip(place.chunks(rows)).enumerate(),
        #[inline(always)]
        |(i, (dweights, place))| {
            for (j, (dw, &at)) in dweights.iter_mut().zip(place).enumerate() {
                let t = (i * rows + j) / k;
                let row = y.chunks(h.max(1)).nth(at as usize);
                *dw = row.map_or(T::ZERO, |row| float::dot(row, &dout[t * h..][..h]));
            }
        },
    );
    Ok(())
}
