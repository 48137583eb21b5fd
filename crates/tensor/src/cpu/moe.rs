//! Moving tokens to their experts and back.
//!
//! Legend: T tokens, H hidden size, E experts, K experts per token, R rows of the experts that are here (T*K
//! unless some are elsewhere).

use super::{
    Cpu,
    args::Op,
    float::{self, Float},
    mlp::{gradients, sigmoid},
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

/// For each of `rows` rows the (t, k) whose place it is; an error unless each is the place of exactly one.
fn sources(op: Op, place: &[i32], rows: usize) -> Result<Vec<usize>> {
    let mut from = vec![usize::MAX; rows];
    let mut once = true;
    for (at, &place) in place.iter().enumerate() {
        if let Some(from) = from.get_mut(place as usize) {
            once &= std::mem::replace(from, at) == usize::MAX;
        }
    }
    op.require(once && from.iter().all(|from| *from < usize::MAX), "place", &[place.len()], "one place for every row")?;
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

/// See [`Ops::moe_act_grad`](crate::Ops::moe_act_grad).
pub(super) fn moe_act_grad<T: Float>(
    cpu: &Cpu,
    dgate_up: ViewMut,
    act: ViewMut,
    dweights: ViewMut,
    dact: View,
    gate_up: View,
    weights: View,
    place: View,
) -> Result<()> {
    let op = Op("moe_act_grad");
    let ([n, k], [r, i]) = (op.dims("place", place.shape())?, op.dims("dact", dact.shape())?);
    let (dact, gate_up) = (op.read::<T>("dact", dact, &[r, i])?, op.read::<T>("gate_up", gate_up, &[r, 2 * i])?);
    let (weights, place) = (op.read::<T>("weights", weights, &[n, k])?, op.read::<i32>("place", place, &[n, k])?);
    op.indices("routed row", place, n * k)?;
    let (dgate_up, act) = (op.write::<T>("dgate_up", dgate_up, &[r, 2 * i])?, op.write::<T>("act", act, &[r, i])?);
    let dweights = op.write::<T>("dweights", dweights, &[n, k])?;
    let from = sources(op, place, r)?;
    let mut of_row = vec![T::ZERO; r];
    let rows = rows_per_task(i);
    let size = (rows * i).max(1);
    let outs = dgate_up.chunks_mut(2 * size).zip(act.chunks_mut(size)).zip(of_row.chunks_mut(rows));
    let ins = dact.chunks(size).zip(gate_up.chunks(2 * size)).zip(from.chunks(rows));
    cpu.each(
        gate_up.len(),
        outs.zip(ins),
        #[inline(always)]
        |(((dgate_up, act), of_row), ((dact, gate_up), from))| {
            let outs = dgate_up.chunks_mut(2 * i).zip(act.chunks_mut(i)).zip(of_row);
            for (((dgate_up, act), of_row), ((dact, gate_up), from)) in outs.zip(dact.chunks(i).zip(gate_up.chunks(2 * i)).zip(from)) {
                let (weight, (gate, up)) = (weights[*from], gate_up.split_at(i));
                for j in 0..i {
                    let (g, u) = (gate[j], up[j]);
                    let sigmoid = sigmoid(g);
                    act[j] = g * sigmoid * u;
                    (dgate_up[j], dgate_up[i + j]) = gradients(weight * dact[j], g, u, sigmoid);
                }
                *of_row = float::dot(act, dact);
                act.iter_mut().for_each(|a| *a = weight * *a);
            }
        },
    );
    for (dw, place) in dweights.iter_mut().zip(place) {
        *dw = of_row.get(*place as usize).copied().unwrap_or(T::ZERO);
    }
    Ok(())
}
