//! Gradient of causal attention, in blocks, from the saved log-sum-exp.
//!
//! With P = exp(scale * q.k - lse), delta = <dout, o> and dS = P * (dout.v - delta):
//! dq = scale * dS.k, dk = scale * dS^T.q, dv = P^T.dout. One pass over query blocks gives dq, one over key blocks
//! dk and dv: every task owns its rows, so nothing is summed across tasks.
//!
//! Legend: as in `attention`.

use super::{
    Cpu,
    args::Op,
    attention::{Block, Heads, KEY_BLOCK, QUERY_BLOCK, blocks, cost, key_rows, stack, visible},
    float::{self, Float},
    matmul::{Mat, MatMut, product},
    tasks::{rows_per_task, split_lengths},
};
use crate::{Beta, Result, View, ViewMut};
use std::ops::Range;

/// The inputs both passes read.
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

/// Queries of one key head, stacked, with what belongs to each row.
struct Stacked<T> {
    queries: Vec<T>,
    douts: Vec<T>,
    p: Vec<T>,
    ds: Vec<T>,
}

impl<T: Float> Stacked<T> {
    fn new(tokens: usize, keys: usize, heads: Heads) -> Stacked<T> {
        let rows = tokens * heads.group();
        let zeros = |n| vec![T::ZERO; n];
        Stacked { queries: zeros(rows * heads.d), douts: zeros(rows * heads.d), p: zeros(rows * keys), ds: zeros(rows * keys) }
    }

    #[inline(always)]
    fn load(&mut self, x: &Inputs<T>, tokens: Range<usize>, g: usize) {
        let n = tokens.len() * x.heads.group() * x.heads.d;
        stack(&mut self.queries[..n], x.q, tokens.clone(), x.heads, g, x.scale);
        stack(&mut self.douts[..n], x.dout, tokens, x.heads, g, T::ONE);
    }

    /// P and dS of the loaded `tokens` against `keys`, in `p` and `ds`.
    #[inline(always)]
    fn scores(&mut self, x: &Inputs<T>, tokens: Range<usize>, keys: Range<usize>, g: usize) {
        let (d, group) = (x.heads.d, x.heads.group());
        let (rows, n) = (tokens.len() * group, keys.len());
        let (p, ds) = (&mut self.p[..rows * n], &mut self.ds[..rows * n]);
        let (queries, douts) = (Mat::new(&self.queries[..rows * d], rows, d), Mat::new(&self.douts[..rows * d], rows, d));
        product(MatMut::new(p, rows, n), queries, key_rows(x.k, keys.clone(), x.heads, g).t(), Beta::Zero);
        product(MatMut::new(ds, rows, n), douts, key_rows(x.v, keys.clone(), x.heads, g).t(), Beta::Zero);
        for (r, (p, ds)) in p.chunks_mut(n).zip(ds.chunks_mut(n)).enumerate() {
            let t = tokens.start + r / group;
            let at = t * x.heads.nq + g * group + r % group;
            let (lse, delta) = (x.lse[at], x.delta[at]);
            let seen = visible(t, &keys);
            for (p, ds) in p[..seen].iter_mut().zip(&mut ds[..seen]) {
                *p = (*p - lse).exp();
                *ds = *p * (*ds - delta);
            }
            p[seen..].fill(T::ZERO);
            ds[seen..].fill(T::ZERO);
        }
    }
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

    let query_blocks = blocks(cu_seqlens, QUERY_BLOCK);
    let dqs = split_lengths(dq, query_blocks.iter().map(|b| b.tokens.len() * nq * d));
    cpu.each(
        cost(&query_blocks, heads),
        dqs.into_iter().zip(&query_blocks),
        #[inline(always)]
        |(dq, block)| query_block(dq, &x, block),
    );

    let key_blocks = blocks(cu_seqlens, KEY_BLOCK);
    let dks = split_lengths(dk, key_blocks.iter().map(|b| b.tokens.len() * nk * d));
    let dvs = split_lengths(dv, key_blocks.iter().map(|b| b.tokens.len() * nk * d));
    cpu.each(
        cost(&key_blocks, heads),
        dks.into_iter().zip(dvs).zip(&key_blocks),
        #[inline(always)]
        |((dk, dv), block)| key_block(dk, dv, &x, block),
    );
    Ok(())
}

/// dq of one block of queries.
#[inline(always)]
fn query_block<T: Float>(dq: &mut [T], x: &Inputs<T>, block: &Block) {
    let Heads { nq, d, nk } = x.heads;
    let (tokens, group) = (block.tokens.clone(), x.heads.group());
    let rows = tokens.len() * group;
    let mut stacked = Stacked::new(tokens.len(), KEY_BLOCK, x.heads);
    let mut sum = vec![T::ZERO; rows * d];
    for g in 0..nk {
        stacked.load(x, tokens.clone(), g);
        for first in (block.seq.start..tokens.end).step_by(KEY_BLOCK) {
            let keys = first..(first + KEY_BLOCK).min(tokens.end);
            stacked.scores(x, tokens.clone(), keys.clone(), g);
            let beta = if first == block.seq.start { Beta::Zero } else { Beta::One };
            let ds = Mat::new(&stacked.ds[..rows * keys.len()], rows, keys.len());
            product(MatMut::new(&mut sum, rows, d), ds, key_rows(x.k, keys, x.heads, g), beta);
        }
        for (t, sum) in sum.chunks(group * d).enumerate() {
            for (dq, &s) in dq[(t * nq + g * group) * d..].iter_mut().zip(sum) {
                *dq = s * x.scale;
            }
        }
    }
}

/// dk and dv of one block of keys.
#[inline(always)]
fn key_block<T: Float>(dk: &mut [T], dv: &mut [T], x: &Inputs<T>, block: &Block) {
    let Heads { nk, d, .. } = x.heads;
    let (keys, n) = (block.tokens.clone(), block.tokens.len());
    let mut stacked = Stacked::new(QUERY_BLOCK, n, x.heads);
    for g in 0..nk {
        for first in (keys.start..block.seq.end).step_by(QUERY_BLOCK) {
            let tokens = first..(first + QUERY_BLOCK).min(block.seq.end);
            let rows = tokens.len() * x.heads.group();
            stacked.load(x, tokens.clone(), g);
            stacked.scores(x, tokens, keys.clone(), g);
            let beta = if first == keys.start { Beta::Zero } else { Beta::One };
            let transposed = |s| Mat::new(s, rows, n).t();
            let stacked_rows = |s| Mat::new(s, rows, d);
            let dk = MatMut::strided(&mut dk[g * d..], n, d, nk * d);
            product(dk, transposed(&stacked.ds[..rows * n]), stacked_rows(&stacked.queries[..rows * d]), beta);
            let dv = MatMut::strided(&mut dv[g * d..], n, d, nk * d);
            product(dv, transposed(&stacked.p[..rows * n]), stacked_rows(&stacked.douts[..rows * d]), beta);
        }
    }
}
