//! Gradient of causal attention, in blocks, from the saved log-sum-exp.
//!
//! With P = exp(scale * q.k - lse), delta = <dout, o> and dS = P * (dout.v - delta):
//! dq = scale * dS.k, dk = scale * dS^T.q, dv = P^T.dout. One task takes one query head of one sequence, so P and dS are computed
//! once; dk and dv are then summed over the query heads that share a key head, in their order.
//!
//! Legend: as in `attention`; n tokens of a sequence.

use super::{
    Cpu,
    args::Op,
    attention::{Heads, head_rows, visible},
    float::{self, Float},
    matmul::{Mat, MatMut, product},
    tasks::rows_per_task,
};
use crate::{Beta, Result, View, ViewMut};
use std::ops::Range;

/// Queries and keys of one step.
const BLOCK: usize = 128;

/// The inputs.
struct Inputs<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    dout: &'a [T],
    lse: &'a [T],
    /// `<dout, o>` of every token and head.
    delta: &'a [T],
    heads: Heads,
    scale: T,
}

/// Gradients of one query head in one sequence, each [n, D]; dk and dv are its share.
struct HeadGrad<T> {
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
}

/// See [`Ops::attention_grad`](crate::Ops::attention_grad).
pub(super) fn attention_grad<T: Float>(
    cpu: &Cpu,
    [dq, dk, dv]: [ViewMut; 3],
    [dout, o, lse]: [View; 3],
    [q, k, v]: [View; 3],
    cu_seqlens: View,
    scale: f64,
) -> Result<()> {
    let op = Op("attention_grad");
    let (t, heads) = Heads::of(op, q.shape(), k.shape())?;
    let Heads { nq, nk, d } = heads;
    let [b1] = op.dims("cu_seqlens", cu_seqlens.shape())?;
    let cu_seqlens = op.read::<i32>("cu_seqlens", cu_seqlens, &[b1])?;
    op.bounds("cu_seqlens", cu_seqlens, t)?;
    let (of_queries, of_keys) = ([t, nq, d], [t, nk, d]);
    let (dout, o) = (op.read::<T>("dout", dout, &of_queries)?, op.read::<T>("o", o, &of_queries)?);
    let (lse, q) = (op.read::<T>("lse", lse, &[t, nq])?, op.read::<T>("q", q, &of_queries)?);
    let (k, v) = (op.read::<T>("k", k, &of_keys)?, op.read::<T>("v", v, &of_keys)?);
    let dq = op.write::<T>("dq", dq, &of_queries)?;
    let (dk, dv) = (op.write::<T>("dk", dk, &of_keys)?, op.write::<T>("dv", dv, &of_keys)?);
    let mut delta = vec![T::ZERO; t * nq];
    let rows = rows_per_task(d);
    let size = (rows * d).max(1);
    cpu.each(
        t * nq * d,
        delta.chunks_mut(rows).zip(dout.chunks(size).zip(o.chunks(size))),
        #[inline(always)]
        |(delta, (dout, o))| {
            for (delta, (dout, o)) in delta.iter_mut().zip(dout.chunks(d).zip(o.chunks(d))) {
                *delta = float::dot(dout, o);
            }
        },
    );
    let x = Inputs { q, k, v, dout, lse, delta: &delta, heads, scale: T::of(scale) };

    let sequences: Vec<Range<usize>> = cu_seqlens.windows(2).map(|w| w[0] as usize..w[1] as usize).collect();
    let tasks = sequences.iter().flat_map(|seq| (0..nq).map(|h| (seq.clone(), h)));
    let shares = cpu.map(
        sequences.iter().map(|seq| seq.len() * seq.len()).sum::<usize>() * nq * d,
        tasks,
        #[inline(always)]
        |(seq, h)| head_grad(&x, seq, h),
    );
    for (seq, shares) in sequences.into_iter().zip(shares.chunks(nq.max(1))) {
        gather(
            cpu,
            [
                &mut dq[seq.start * nq * d..seq.end * nq * d],
                &mut dk[seq.start * nk * d..seq.end * nk * d],
                &mut dv[seq.start * nk * d..seq.end * nk * d],
            ],
            shares,
            heads,
        );
    }
    Ok(())
}

/// Gradients of query head `h` in the sequence `seq`.
#[inline(always)]
fn head_grad<T: Float>(x: &Inputs<T>, seq: Range<usize>, h: usize) -> HeadGrad<T> {
    let Heads { nq, nk, d } = x.heads;
    let g = h / x.heads.group();
    let zeros = |n| vec![T::ZERO; n];
    let size = seq.len() * d;
    let mut out = HeadGrad { dq: zeros(size), dk: zeros(size), dv: zeros(size) };
    let (mut p, mut ds) = (zeros(BLOCK * BLOCK), zeros(BLOCK * BLOCK));
    for first in seq.clone().step_by(BLOCK) {
        let keys = first..(first + BLOCK).min(seq.end);
        let (k, v) = (head_rows(x.k, keys.clone(), nk, g, d), head_rows(x.v, keys.clone(), nk, g, d));
        let of_keys = (keys.start - seq.start) * d..(keys.end - seq.start) * d;
        for first in (keys.start..seq.end).step_by(BLOCK) {
            let tokens = first..(first + BLOCK).min(seq.end);
            let (rows, n) = (tokens.len(), keys.len());
            let (q, dout) = (head_rows(x.q, tokens.clone(), nq, h, d), head_rows(x.dout, tokens.clone(), nq, h, d));
            let of_queries = (tokens.start - seq.start) * d..(tokens.end - seq.start) * d;
            let (p, ds) = (&mut p[..rows * n], &mut ds[..rows * n]);
            product(MatMut::new(p, rows, n), q, k.t(), Beta::Zero);
            product(MatMut::new(ds, rows, n), dout, v.t(), Beta::Zero);
            differentiate(p, ds, x, tokens, keys.clone(), h);
            let (p, ds) = (Mat::new(p, rows, n), Mat::new(ds, rows, n));
            product(MatMut::new(&mut out.dv[of_keys.clone()], n, d), p.t(), dout, Beta::One);
            product(MatMut::new(&mut out.dk[of_keys.clone()], n, d), ds.t(), q, Beta::One);
            product(MatMut::new(&mut out.dq[of_queries], rows, d), ds, k, Beta::One);
        }
    }
    out
}

/// From the products q.k and dout.v of `tokens` and `keys` to P and scale * dS.
#[inline(always)]
fn differentiate<T: Float>(p: &mut [T], ds: &mut [T], x: &Inputs<T>, tokens: Range<usize>, keys: Range<usize>, h: usize) {
    let n = keys.len();
    for ((p, ds), t) in p.chunks_mut(n).zip(ds.chunks_mut(n)).zip(tokens) {
        let at = t * x.heads.nq + h;
        let (lse, delta) = (x.lse[at], x.delta[at]);
        let seen = visible(t, &keys);
        for (p, ds) in p[..seen].iter_mut().zip(&mut ds[..seen]) {
            *p = (*p * x.scale - lse).exp();
            *ds = *p * (*ds - delta) * x.scale;
        }
        p[seen..].fill(T::ZERO);
        ds[seen..].fill(T::ZERO);
    }
}

/// Brings the shares of all heads of a sequence to their places.
fn gather<T: Float>(cpu: &Cpu, [dq, dk, dv]: [&mut [T]; 3], shares: &[HeadGrad<T>], heads: Heads) {
    let Heads { nq, nk, d } = heads;
    let rows = rows_per_task(nq * d);
    let size = |n: usize| (rows * n * d).max(1);
    cpu.each(
        dq.len(),
        dq.chunks_mut(size(nq)).zip(dk.chunks_mut(size(nk)).zip(dv.chunks_mut(size(nk)))).enumerate(),
        #[inline(always)]
        |(i, (dq, (dk, dv)))| {
            let tokens = dq.chunks_mut(nq * d).zip(dk.chunks_mut(nk * d).zip(dv.chunks_mut(nk * d)));
            for (j, (dq, (dk, dv))) in tokens.enumerate() {
                let row = (i * rows + j) * d..(i * rows + j + 1) * d;
                dk.fill(T::ZERO);
                dv.fill(T::ZERO);
                for (h, share) in shares.iter().enumerate() {
                    let g = h / heads.group() * d;
                    dq[h * d..][..d].copy_from_slice(&share.dq[row.clone()]);
                    float::accumulate(&mut dk[g..][..d], &share.dk[row.clone()]);
                    float::accumulate(&mut dv[g..][..d], &share.dv[row.clone()]);
                }
            }
        },
    );
}
