//! Gradient of causal attention, in blocks, from the saved log-sum-exp.
//!
//! With P = exp(scale * q.k - lse), delta = <dout, o> and dS = P * (dout.v - delta):
//! dq = scale * dS.k, dk = scale * dS^T.q, dv = P^T.dout. One task takes one query head of one sequence, so P and dS are computed
//! once; dk and dv are then summed over the query heads that share a key head, in their order.
//!
//! Legend: as in `attention`; n queries (for dq) or keys (for dk, dv) of a sequence.

use super::{
    Cpu,
    args::Op,
    attention::{Heads, Sequence, head_rows, sequences, visible},
    float::{self, Float},
    matmul::{Mat, MatMut, product},
    tasks::rows_per_task,
};
use crate::{Beta, PackedSeqs, Result, View, ViewMut};
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
    seqs: PackedSeqs,
    scale: f64,
) -> Result<()> {
    let op = Op("attention_grad");
    let (t, s, heads) = Heads::of(op, q.shape(), k.shape())?;
    let Heads { nq, nk, d } = heads;
    let sequences = sequences(op, seqs, t, s)?;
    let (of_queries, of_keys) = ([t, nq, d], [s, nk, d]);
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

    let tasks = sequences.iter().flat_map(|seq| (0..nq).map(move |h| (seq, h)));
    let shares = cpu.map(
        sequences.iter().map(|seq| seq.queries.len() * seq.keys.len()).sum::<usize>() * nq * d,
        tasks,
        #[inline(always)]
        |(seq, h)| head_grad(&x, seq, h),
    );
    for (seq, shares) in sequences.iter().zip(shares.chunks(nq.max(1))) {
        gather_queries(cpu, &mut dq[seq.queries.start * nq * d..seq.queries.end * nq * d], shares, heads);
        let keys = seq.keys.start * nk * d..seq.keys.end * nk * d;
        gather_keys(cpu, [&mut dk[keys.clone()], &mut dv[keys]], shares, heads);
    }
    Ok(())
}

/// Gradients of query head `h` in the sequence `seq`.
#[inline(always)]
fn head_grad<T: Float>(x: &Inputs<T>, seq: &Sequence, h: usize) -> HeadGrad<T> {
    let Heads { nq, nk, d } = x.heads;
    let g = h / x.heads.group();
    let zeros = |n| vec![T::ZERO; n];
    let (of_queries, of_keys) = (seq.queries.len() * d, seq.keys.len() * d);
    let mut out = HeadGrad { dq: zeros(of_queries), dk: zeros(of_keys), dv: zeros(of_keys) };
    let (mut p, mut ds) = (zeros(BLOCK * BLOCK), zeros(BLOCK * BLOCK));
    let earlier = seq.keys.len() - seq.queries.len();
    for first in seq.keys.clone().step_by(BLOCK) {
        let keys = first..(first + BLOCK).min(seq.keys.end);
        let (k, v) = (head_rows(x.k, keys.clone(), nk, g, d), head_rows(x.v, keys.clone(), nk, g, d));
        let of_keys = (keys.start - seq.keys.start) * d..(keys.end - seq.keys.start) * d;
        // The first query that stands at these keys or after them.
        let from = seq.queries.start + (keys.start - seq.keys.start).saturating_sub(earlier);
        for first in (from..seq.queries.end).step_by(BLOCK) {
            let tokens = first..(first + BLOCK).min(seq.queries.end);
            let (rows, n) = (tokens.len(), keys.len());
            let (q, dout) = (head_rows(x.q, tokens.clone(), nq, h, d), head_rows(x.dout, tokens.clone(), nq, h, d));
            let of_queries = (tokens.start - seq.queries.start) * d..(tokens.end - seq.queries.start) * d;
            let (p, ds) = (&mut p[..rows * n], &mut ds[..rows * n]);
            product(MatMut::new(p, rows, n), q, k.t(), Beta::Zero);
            product(MatMut::new(ds, rows, n), dout, v.t(), Beta::Zero);
            differentiate(p, ds, x, tokens, seq, keys.clone(), h);
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
fn differentiate<T: Float>(p: &mut [T], ds: &mut [T], x: &Inputs<T>, tokens: Range<usize>, seq: &Sequence, keys: Range<usize>, h: usize) {
    let n = keys.len();
    for ((p, ds), t) in p.chunks_mut(n).zip(ds.chunks_mut(n)).zip(tokens) {
        let at = t * x.heads.nq + h;
        let (lse, delta) = (x.lse[at], x.delta[at]);
        let seen = visible(seq.key_of(t), &keys);
        for (p, ds) in p[..seen].iter_mut().zip(&mut ds[..seen]) {
            *p = (*p * x.scale - lse).exp();
            *ds = *p * (*ds - delta) * x.scale;
        }
        p[seen..].fill(T::ZERO);
        ds[seen..].fill(T::ZERO);
    }
}

/// Brings dq of all heads of a sequence to its place.
fn gather_queries<T: Float>(cpu: &Cpu, dq: &mut [T], shares: &[HeadGrad<T>], heads: Heads) {
    let Heads { nq, d, .. } = heads;
    let rows = rows_per_task(nq * d);
    cpu.each(
        dq.len(),
        dq.chunks_mut((rows * nq * d).max(1)).enumerate(),
        #[inline(always)]
        |(i, dq)| {
            for (j, dq) in dq.chunks_mut(nq * d).enumerate() {
                let row = (i * rows + j) * d..(i * rows + j + 1) * d;
                for (dq, share) in dq.chunks_mut(d).zip(shares) {
                    dq.copy_from_slice(&share.dq[row.clone()]);
                }
            }
        },
    );
}

/// Adds dk and dv up over the query heads of each key head, in their order.
fn gather_keys<T: Float>(cpu: &Cpu, [dk, dv]: [&mut [T]; 2], shares: &[HeadGrad<T>], heads: Heads) {
    let Heads { nk, d, .. } = heads;
    let rows = rows_per_task(nk * d);
    let size = (rows * nk * d).max(1);
    cpu.each(
        dk.len() * heads.group(),
        dk.chunks_mut(size).zip(dv.chunks_mut(size)).enumerate(),
        #[inline(always)]
        |(i, (dk, dv))| {
            for (j, (dk, dv)) in dk.chunks_mut(nk * d).zip(dv.chunks_mut(nk * d)).enumerate() {
                let row = (i * rows + j) * d..(i * rows + j + 1) * d;
                dk.fill(T::ZERO);
                dv.fill(T::ZERO);
                for (h, share) in shares.iter().enumerate() {
                    let g = h / heads.group() * d;
                    float::accumulate(&mut dk[g..][..d], &share.dk[row.clone()]);
                    float::accumulate(&mut dv[g..][..d], &share.dv[row.clone()]);
                }
            }
        },
    );
}
