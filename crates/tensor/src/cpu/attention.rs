//! Causal attention within each sequence of a packed batch, in blocks: [T, T] is never materialised.
//!
//! One task owns the output of one block of queries, for all heads. The queries of the G heads that share a key head
//! are stacked, so that one product serves them all; the softmax is rescaled as keys go by (Dao et al. 2022).
//!
//! Legend: T queries, S keys (the same tokens unless others' keys are read), Nq query heads, Nk key/value heads, G = Nq / Nk, D head size, R stacked rows = queries * G.

use super::{
    Cpu,
    args::Op,
    float::{self, Float},
    matmul::{Mat, MatMut, product},
    tasks::split_lengths,
};
use crate::{Beta, PackedSeqs, Result, View, ViewMut};
use std::ops::Range;

/// Queries of one task.
pub(super) const QUERY_BLOCK: usize = 64;
/// Keys of one step.
pub(super) const KEY_BLOCK: usize = 128;

/// Sizes of the heads.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    /// Query heads.
    pub nq: usize,
    /// Key and value heads.
    pub nk: usize,
    /// Head size.
    pub d: usize,
}

impl Heads {
    /// Checks q [T, Nq, D] against k [S, Nk, D]; also returns T and S.
    pub fn of(op: Op, q: &[usize], k: &[usize]) -> Result<(usize, usize, Heads)> {
        let [t, nq, d] = op.dims("q", q)?;
        let [s, nk, _] = op.dims("k", k)?;
        op.shape("k", k, &[s, nk, d])?;
        op.require(nk > 0 && nq.is_multiple_of(nk), "q", q, "a multiple of the key heads as query heads")?;
        Ok((t, s, Heads { nq, nk, d }))
    }

    /// Query heads per key head.
    pub fn group(self) -> usize {
        self.nq / self.nk
    }
}

/// The queries and keys of one sequence. The last query stands at the last key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    /// Rows of q.
    pub queries: Range<usize>,
    /// Rows of k and v.
    pub keys: Range<usize>,
}

impl Sequence {
    /// The row of k at which the query of row `t` of q stands.
    #[inline(always)]
    pub fn key_of(&self, t: usize) -> usize {
        self.keys.end - (self.queries.end - t)
    }
}

/// The sequences of a batch of `t` queries and `s` keys, checked.
pub(super) fn sequences(op: Op, seqs: PackedSeqs, t: usize, s: usize) -> Result<Vec<Sequence>> {
    let [b1] = op.dims("cu_seqlens", seqs.cu.shape())?;
    let cu = op.read::<i32>("cu_seqlens", seqs.cu, &[b1])?;
    op.bounds("cu_seqlens", cu, s)?;
    op.require(s == seqs.skip + t, "k", &[s], "as many keys as queries and skipped rows")?;
    let query = |key: i32| (key as usize).saturating_sub(seqs.skip);
    Ok(cu.windows(2).map(|w| Sequence { queries: query(w[0])..query(w[1]), keys: w[0] as usize..w[1] as usize }).collect())
}

/// A run of queries of a sequence.
#[derive(Clone)]
pub(super) struct Block {
    /// The whole sequence.
    pub seq: Sequence,
    /// The queries of this block.
    pub tokens: Range<usize>,
}

impl Block {
    /// The keys that the last query of the block sees.
    pub fn keys(&self) -> Range<usize> {
        self.seq.keys.start..self.seq.key_of(self.tokens.end)
    }
}

/// Cuts every sequence into blocks of `size` queries, in order.
pub(super) fn blocks(sequences: Vec<Sequence>, size: usize) -> Vec<Block> {
    let cut = |seq: Sequence| {
        let queries = seq.queries.clone();
        queries.clone().step_by(size).map(move |first| Block { seq: seq.clone(), tokens: first..(first + size).min(queries.end) })
    };
    sequences.into_iter().flat_map(cut).collect()
}

/// The cost of attention in multiply-adds, to judge whether threads pay.
pub(super) fn cost(blocks: &[Block], heads: Heads) -> usize {
    blocks.iter().map(|b| b.tokens.len() * b.keys().len()).sum::<usize>() * heads.nq * heads.d
}

/// Stacks the rows of the query heads of key head `g`, times `factor`: `out[(t, j), D] = x[t, g*G + j, D]`.
#[inline(always)]
pub(super) fn stack<T: Float>(out: &mut [T], x: &[T], tokens: Range<usize>, heads: Heads, g: usize, factor: T) {
    let width = heads.group() * heads.d;
    for (out, t) in out.chunks_mut(width).zip(tokens) {
        for (o, &x) in out.iter_mut().zip(&x[t * heads.nq * heads.d + g * width..][..width]) {
            *o = x * factor;
        }
    }
}

/// The rows of one of `heads` heads of `tokens`, as a matrix.
#[inline(always)]
pub(super) fn head_rows<T: Float>(x: &[T], tokens: Range<usize>, heads: usize, head: usize, d: usize) -> Mat<'_, T> {
    Mat::strided(&x[(tokens.start * heads + head) * d..], tokens.len(), d, heads * d)
}

/// Keys of `keys` that a query sees which stands at key `t`.
#[inline(always)]
pub(super) fn visible(t: usize, keys: &Range<usize>) -> usize {
    (t + 1).clamp(keys.start, keys.end) - keys.start
}

/// See [`Ops::attention`](crate::Ops::attention).
pub(super) fn attention<T: Float>(
    cpu: &Cpu,
    o: ViewMut,
    lse: ViewMut,
    q: View,
    k: View,
    v: View,
    seqs: PackedSeqs,
    scale: f64,
) -> Result<()> {
    let op = Op("attention");
    let (t, s, heads) = Heads::of(op, q.shape(), k.shape())?;
    let Heads { nq, nk, d } = heads;
    let sequences = sequences(op, seqs, t, s)?;
    let q = op.read::<T>("q", q, &[t, nq, d])?;
    let (k, v) = (op.read::<T>("k", k, &[s, nk, d])?, op.read::<T>("v", v, &[s, nk, d])?);
    let (o, lse) = (op.write::<T>("o", o, &[t, nq, d])?, op.write::<T>("lse", lse, &[t, nq])?);
    let blocks = blocks(sequences, QUERY_BLOCK);
    let outs = split_lengths(o, blocks.iter().map(|b| b.tokens.len() * nq * d));
    let lses = split_lengths(lse, blocks.iter().map(|b| b.tokens.len() * nq));
    cpu.each(
        cost(&blocks, heads),
        outs.into_iter().zip(lses).zip(&blocks),
        #[inline(always)]
        |((o, lse), block)| {
            for g in 0..nk {
                forward_block(o, lse, [q, k, v], block, heads, g, T::of(scale));
            }
        },
    );
    Ok(())
}

/// The query heads of key head `g` in one block of queries.
#[inline(always)]
fn forward_block<T: Float>(o: &mut [T], lse: &mut [T], [q, k, v]: [&[T]; 3], block: &Block, heads: Heads, g: usize, scale: T) {
    let (d, group, tokens) = (heads.d, heads.group(), block.tokens.clone());
    let rows = tokens.len() * group;
    let mut queries = vec![T::ZERO; rows * d];
    let mut scores = vec![T::ZERO; rows * KEY_BLOCK];
    let mut sum = vec![T::ZERO; rows * d];
    let mut top = vec![T::NEG_INFINITY; rows];
    let mut mass = vec![T::ZERO; rows];
    stack(&mut queries, q, tokens.clone(), heads, g, scale);
    for first in block.keys().step_by(KEY_BLOCK) {
        let keys = first..(first + KEY_BLOCK).min(block.keys().end);
        let n = keys.len();
        let scores = &mut scores[..rows * n];
        product(MatMut::new(scores, rows, n), Mat::new(&queries, rows, d), head_rows(k, keys.clone(), heads.nk, g, d).t(), Beta::Zero);
        for (r, row) in scores.chunks_mut(n).enumerate() {
            let (seen, hidden) = row.split_at_mut(visible(block.seq.key_of(tokens.start + r / group), &keys));
            hidden.fill(T::ZERO);
            let new_top = top[r].larger(float::max(seen));
            if seen.is_empty() {
                continue;
            }
            let shrink = (top[r] - new_top).exp();
            mass[r] = mass[r] * shrink + float::exp_shifted(seen, new_top);
            float::scale(&mut sum[r * d..][..d], shrink);
            top[r] = new_top;
        }
        product(MatMut::new(&mut sum, rows, d), Mat::new(scores, rows, n), head_rows(v, keys, heads.nk, g, d), Beta::One);
    }
    for r in 0..rows {
        let (t, head) = (r / group, g * group + r % group);
        lse[t * heads.nq + head] = top[r] + mass[r].ln();
        let inverse = T::ONE / mass[r];
        for (o, &s) in o[(t * heads.nq + head) * d..][..d].iter_mut().zip(&sum[r * d..][..d]) {
            *o = s * inverse;
        }
    }
}
