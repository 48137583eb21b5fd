//! Between the QKV product and attention: split into heads, per-head RMSNorm, rotary embedding; and back.
//!
//! Rotation by the angle of position p, over halves: (a, b) -> (a cos - b sin, b cos + a sin); its gradient is the
//! rotation by the opposite angle.
//!
//! Legend: T tokens, Nq query heads, Nk key/value heads, D head size, P rows of the rotary table.

use super::{
    Cpu,
    args::Op,
    attention::Heads,
    float::Float,
    norm::{grad_row, normalise},
    tasks::rows_per_task,
};
use crate::{Result, RopeTable, View, ViewMut};

/// Checks q [T, Nq, D] against k [T, Nk, D]; gives T, the heads, and the width of a row of qkv.
fn sizes(op: Op, q: &[usize], k: &[usize]) -> Result<(usize, Heads, usize)> {
    let (t, _, heads) = Heads::of(op, q, k)?;
    op.require(heads.d.is_multiple_of(2), "q", q, "an even head size")?;
    Ok((t, heads, (heads.nq + 2 * heads.nk) * heads.d))
}

/// The checked rotary table and positions.
struct Rope<'a, T> {
    cos: &'a [T],
    sin: &'a [T],
    positions: &'a [i32],
    half: usize,
}

impl<'a, T: Float> Rope<'a, T> {
    fn new(op: Op, table: RopeTable<'a>, positions: View<'a>, t: usize, d: usize) -> Result<Rope<'a, T>> {
        let [limit, _] = op.dims("rope table", table.cos.shape())?;
        let cos = op.read::<T>("rope cos", table.cos, &[limit, d / 2])?;
        let sin = op.read::<T>("rope sin", table.sin, &[limit, d / 2])?;
        let positions = op.read::<i32>("positions", positions, &[t])?;
        op.indices("position", positions, limit)?;
        Ok(Rope { cos, sin, positions, half: d / 2 })
    }

    /// Cosines and sines of the position of token `t`.
    #[inline(always)]
    fn at(&self, t: usize) -> (&[T], &[T]) {
        let row = self.positions[t] as usize * self.half;
        (&self.cos[row..row + self.half], &self.sin[row..row + self.half])
    }
}

/// Rotates one head in place.
#[inline(always)]
fn rotate<T: Float>(x: &mut [T], (cos, sin): (&[T], &[T])) {
    let (a, b) = x.split_at_mut(cos.len());
    for (((a, b), &c), &s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

/// Writes the opposite rotation of `x`.
#[inline(always)]
fn rotate_back<T: Float>(out: &mut [T], x: &[T], (cos, sin): (&[T], &[T])) {
    let half = cos.len();
    let (oa, ob) = out.split_at_mut(half);
    let (a, b) = x.split_at(half);
    for (((((oa, ob), &a), &b), &c), &s) in oa.iter_mut().zip(ob).zip(a).zip(b).zip(cos).zip(sin) {
        (*oa, *ob) = (a * c + b * s, b * c - a * s);
    }
}

/// One row of outputs of a token: all its heads of one kind, normalised when `norm` is given, then rotated.
#[inline(always)]
fn prepare_heads<T: Float>(out: &mut [T], x: &[T], d: usize, norm: Option<(&[T], T)>, rstd: &mut [T], angle: (&[T], &[T])) {
    for (h, (out, x)) in out.chunks_mut(d).zip(x.chunks(d)).enumerate() {
        if let Some((w, eps)) = norm {
            rstd[h] = normalise(out, x, w, eps);
        } else {
            out.copy_from_slice(x);
        }
        rotate(out, angle);
    }
}

/// See [`Ops::qkv_prepare`](crate::Ops::qkv_prepare).
pub(super) fn qkv_prepare<T: Float>(
    cpu: &Cpu,
    q: ViewMut,
    k: ViewMut,
    v: ViewMut,
    rstd: Option<ViewMut>,
    qkv: View,
    norm: Option<(View, View, f64)>,
    rope: RopeTable,
    positions: View,
) -> Result<()> {
    let op = Op("qkv_prepare");
    let (t, Heads { nq, nk, d }, width) = sizes(op, q.shape(), k.shape())?;
    let qkv = op.read::<T>("qkv", qkv, &[t, width])?;
    let rope = Rope::<T>::new(op, rope, positions, t, d)?;
    let (q, k) = (op.write::<T>("q", q, &[t, nq, d])?, op.write::<T>("k", k, &[t, nk, d])?);
    let v = op.write::<T>("v", v, &[t, nk, d])?;
    op.require(rstd.is_some() == norm.is_some(), "rstd", &[rstd.is_some() as usize], "an rstd if and only if there is a norm")?;
    let norm = match norm {
        Some((wq, wk, eps)) => Some((op.read::<T>("wq", wq, &[d])?, op.read::<T>("wk", wk, &[d])?, T::of(eps))),
        None => None,
    };
    let mut no_rstd = Vec::new();
    let per_token = nq + nk;
    let rstd = match rstd {
        Some(r) => op.write::<T>("rstd", r, &[t, per_token])?,
        None => {
            no_rstd.resize(t * per_token, T::ZERO);
            &mut no_rstd
        }
    };
    let rows = rows_per_task(width);
    let size = |n: usize| (rows * n).max(1);
    let outputs = q.chunks_mut(size(nq * d)).zip(k.chunks_mut(size(nk * d))).zip(v.chunks_mut(size(nk * d)));
    cpu.each(
        t * width,
        outputs.zip(rstd.chunks_mut(size(per_token))).enumerate(),
        #[inline(always)]
        |(i, (((q, k), v), rstd))| {
            let outputs = q.chunks_mut(nq * d).zip(k.chunks_mut(nk * d)).zip(v.chunks_mut(nk * d)).zip(rstd.chunks_mut(per_token));
            for (j, (((q, k), v), rstd)) in outputs.enumerate() {
                let t = i * rows + j;
                let (xq, rest) = qkv[t * width..(t + 1) * width].split_at(nq * d);
                let (xk, xv) = rest.split_at(nk * d);
                let (rq, rk) = rstd.split_at_mut(nq);
                prepare_heads(q, xq, d, norm.map(|(wq, _, eps)| (wq, eps)), rq, rope.at(t));
                prepare_heads(k, xk, d, norm.map(|(_, wk, eps)| (wk, eps)), rk, rope.at(t));
                v.copy_from_slice(xv);
            }
        },
    );
    Ok(())
}

/// Gradient of `prepare_heads` for one token; `norm` holds the weight and the rstd of each head.
#[inline(always)]
fn prepare_heads_grad<T: Float>(
    dx: &mut [T],
    dy: &[T],
    x: &[T],
    d: usize,
    norm: Option<(&[T], &[T])>,
    angle: (&[T], &[T]),
    scratch: &mut [T],
) {
    for (h, ((dx, dy), x)) in dx.chunks_mut(d).zip(dy.chunks(d)).zip(x.chunks(d)).enumerate() {
        match norm {
            Some((w, rstd)) => {
                rotate_back(scratch, dy, angle);
                grad_row(dx, scratch, x, w, rstd[h]);
            }
            None => rotate_back(dx, dy, angle),
        }
    }
}

/// See [`Ops::qkv_prepare_grad_input`](crate::Ops::qkv_prepare_grad_input).
pub(super) fn qkv_prepare_grad_input<T: Float>(
    cpu: &Cpu,
    dqkv: ViewMut,
    dq: View,
    dk: View,
    dv: View,
    qkv: View,
    norm: Option<(View, View, View)>,
    rope: RopeTable,
    positions: View,
) -> Result<()> {
    let op = Op("qkv_prepare_grad_input");
    let (t, Heads { nq, nk, d }, width) = sizes(op, dq.shape(), dk.shape())?;
    let (dq, dk) = (op.read::<T>("dq", dq, &[t, nq, d])?, op.read::<T>("dk", dk, &[t, nk, d])?);
    let (dv, qkv) = (op.read::<T>("dv", dv, &[t, nk, d])?, op.read::<T>("qkv", qkv, &[t, width])?);
    let rope = Rope::<T>::new(op, rope, positions, t, d)?;
    let per_token = nq + nk;
    let norm = match norm {
        Some((wq, wk, rstd)) => {
            let rstd = op.read::<T>("rstd", rstd, &[t, per_token])?;
            Some((op.read::<T>("wq", wq, &[d])?, op.read::<T>("wk", wk, &[d])?, rstd))
        }
        None => None,
    };
    let dqkv = op.write::<T>("dqkv", dqkv, &[t, width])?;
    let rows = rows_per_task(width);
    cpu.each(
        t * width,
        dqkv.chunks_mut((rows * width).max(1)).enumerate(),
        #[inline(always)]
        |(i, dqkv)| {
            let mut scratch = vec![T::ZERO; d];
            for (j, dqkv) in dqkv.chunks_mut(width).enumerate() {
                let t = i * rows + j;
                let (oq, rest) = dqkv.split_at_mut(nq * d);
                let (ok, ov) = rest.split_at_mut(nk * d);
                let (xq, xk) = qkv[t * width..].split_at(nq * d);
                let (xk, angle) = (&xk[..nk * d], rope.at(t));
                let (nq_norm, nk_norm) = match norm {
                    Some((wq, wk, rstd)) => {
                        let (rq, rk) = rstd[t * per_token..(t + 1) * per_token].split_at(nq);
                        (Some((wq, rq)), Some((wk, rk)))
                    }
                    None => (None, None),
                };
                prepare_heads_grad(oq, &dq[t * nq * d..][..nq * d], xq, d, nq_norm, angle, &mut scratch);
                prepare_heads_grad(ok, &dk[t * nk * d..][..nk * d], xk, d, nk_norm, angle, &mut scratch);
                ov.copy_from_slice(&dv[t * nk * d..][..nk * d]);
            }
        },
    );
    Ok(())
}

/// See [`Ops::qk_norm_grad_weight`](crate::Ops::qk_norm_grad_weight).
pub(super) fn qk_norm_grad_weight<T: Float>(
    cpu: &Cpu,
    dwq: ViewMut,
    dwk: ViewMut,
    dq: View,
    dk: View,
    qkv: View,
    rstd: View,
    rope: RopeTable,
    positions: View,
) -> Result<()> {
    let op = Op("qk_norm_grad_weight");
    let (t, Heads { nq, nk, d }, width) = sizes(op, dq.shape(), dk.shape())?;
    let per_token = nq + nk;
    let (dq, dk) = (op.read::<T>("dq", dq, &[t, nq, d])?, op.read::<T>("dk", dk, &[t, nk, d])?);
    let (qkv, rstd) = (op.read::<T>("qkv", qkv, &[t, width])?, op.read::<T>("rstd", rstd, &[t, per_token])?);
    let rope = Rope::<T>::new(op, rope, positions, t, d)?;
    let (dwq, dwk) = (op.write::<T>("dwq", dwq, &[d])?, op.write::<T>("dwk", dwk, &[d])?);
    let mut both = vec![T::ZERO; 2 * d];
    cpu.sum_rows(
        &mut both,
        t,
        width,
        #[inline(always)]
        |first, end, sum| {
            let (sum_q, sum_k) = sum.split_at_mut(d);
            let mut scratch = vec![T::ZERO; d];
            let mut add = |sum: &mut [T], dy: &[T], x: &[T], r: T, t: usize| {
                rotate_back(&mut scratch, dy, rope.at(t));
                for ((s, &dy), &x) in sum.iter_mut().zip(&scratch).zip(x) {
                    *s += dy * (x * r);
                }
            };
            for t in first..end {
                let (x, r) = (&qkv[t * width..], &rstd[t * per_token..]);
                for h in 0..nq {
                    add(sum_q, &dq[(t * nq + h) * d..][..d], &x[h * d..][..d], r[h], t);
                }
                for h in 0..nk {
                    add(sum_k, &dk[(t * nk + h) * d..][..d], &x[(nq + h) * d..][..d], r[nq + h], t);
                }
            }
        },
    );
    super::float::accumulate(dwq, &both[..d]);
    super::float::accumulate(dwk, &both[d..]);
    Ok(())
}
