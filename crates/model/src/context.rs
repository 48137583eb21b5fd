//! The context axis inside attention: ranks that share a sequence exchange their keys and values.
//!
//! The tokens are cut into 2R pieces of equal length and rank r has the pieces r and 2R - 1 - r, so that all ranks work alike under
//! causality (Megatron-Core's order). Before attention every rank gathers the keys and values of all; each piece of queries then
//! reads the keys up to its own end.
//!
//! Legend: T tokens of this rank, S = R*T tokens of all, R context ranks, Nq query heads, Nk key/value heads, D head size.

use crate::{Cx, Result};
use std::ops::Range;
use temper_comm::Comm;
use temper_tensor::{PackedSeqs, Tensor};

/// Queries of this rank that follow each other, and the keys they read: all from the start of the first query's document up to the
/// last query. On the backend.
pub struct Segment {
    /// Rows of this rank's queries.
    pub queries: Range<usize>,
    /// Rows of all ranks' keys in the order of the sequence.
    pub keys: Range<usize>,
    /// Borders of the documents among the keys.
    pub cu: Tensor,
    /// Keys of the longest document.
    pub longest: usize,
}

impl Segment {
    fn seqs(&self) -> PackedSeqs<'_> {
        PackedSeqs { cu: self.cu.view(), longest: self.longest, skip: self.keys.len() - self.queries.len() }
    }
}

/// The two pieces of `rank` among `2 * of` pieces of `tokens` tokens.
pub(crate) fn pieces(tokens: usize, rank: usize, of: usize) -> [Range<usize>; 2] {
    let piece = |i: usize| tokens * i / (2 * of)..tokens * (i + 1) / (2 * of);
    [piece(rank), piece(2 * of - 1 - rank)]
}

/// Attention of this rank's queries: `o[T, Nq, D]` and its log-sum-exp `[T, Nq]`.
pub(crate) fn attend(cx: &Cx, q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Result<(Tensor, Tensor)> {
    let mut o = cx.alloc(q.shape())?;
    let mut lse = cx.alloc_stat(&q.shape()[..2])?;
    if cx.batch.segments.is_empty() {
        let seqs = PackedSeqs { cu: cx.batch.cu_seqlens.view(), longest: cx.batch.longest, skip: 0 };
        cx.ops.attention(o.view_mut(), lse.view_mut(), q.view(), k.view(), v.view(), seqs, scale)?;
        return Ok((o, lse));
    }
    let (k, v) = (all_keys(cx, k)?, all_keys(cx, v)?);
    for s in &cx.batch.segments {
        let (o, lse) = (o.view_mut().slice_rows(s.queries.clone()), lse.view_mut().slice_rows(s.queries.clone()));
        let (k, v) = (k.view().slice_rows(s.keys.clone()), v.view().slice_rows(s.keys.clone()));
        cx.ops.attention(o, lse, q.view().slice_rows(s.queries.clone()), k, v, s.seqs(), scale)?;
    }
    Ok((o, lse))
}

/// `dq`, `dk` and `dv` of this rank's tokens.
pub(crate) fn attend_grad(cx: &Cx, d_o: &Tensor, o: &Tensor, lse: &Tensor, [q, k, v]: [&Tensor; 3], scale: f64) -> Result<[Tensor; 3]> {
    let mut dq = cx.alloc(q.shape())?;
    if cx.batch.segments.is_empty() {
        let (mut dk, mut dv) = (cx.alloc(k.shape())?, cx.alloc(v.shape())?);
        let seqs = PackedSeqs { cu: cx.batch.cu_seqlens.view(), longest: cx.batch.longest, skip: 0 };
        let (d_o, o, lse) = (d_o.view(), o.view(), lse.view());
        let (dq_out, dk_out, dv_out) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
        cx.ops.attention_grad(dq_out, dk_out, dv_out, d_o, o, lse, q.view(), k.view(), v.view(), seqs, scale)?;
        return Ok([dq, dk, dv]);
    }
    let (all_k, all_v) = (all_keys(cx, k)?, all_keys(cx, v)?);
    let (mut all_dk, mut all_dv) = (cx.ops.zeros(cx.dtype(), all_k.shape())?, cx.ops.zeros(cx.dtype(), all_v.shape())?);
    for s in &cx.batch.segments {
        let shape = [s.keys.len(), k.shape()[1], k.shape()[2]];
        let (mut dk, mut dv) = (cx.alloc(&shape)?, cx.alloc(&shape)?);
        cx.ops.attention_grad(
            dq.view_mut().slice_rows(s.queries.clone()),
            dk.view_mut(),
            dv.view_mut(),
            d_o.view().slice_rows(s.queries.clone()),
            o.view().slice_rows(s.queries.clone()),
            lse.view().slice_rows(s.queries.clone()),
            q.view().slice_rows(s.queries.clone()),
            all_k.view().slice_rows(s.keys.clone()),
            all_v.view().slice_rows(s.keys.clone()),
            s.seqs(),
            scale,
        )?;
        cx.ops.add_assign(all_dk.view_mut().slice_rows(s.keys.clone()), dk.view())?;
        cx.ops.add_assign(all_dv.view_mut().slice_rows(s.keys.clone()), dv.view())?;
    }
    Ok([dq, own_keys_grad(cx, all_dk, k.shape())?, own_keys_grad(cx, all_dv, v.shape())?])
}

/// All ranks' `x[T, Nk, D]` in the order of the sequence, [S, Nk, D].
fn all_keys(cx: &Cx, x: &Tensor) -> Result<Tensor> {
    let cp = &*cx.ranks.mesh.cp;
    let shape = [x.shape()[0] * cp.size(), x.shape()[1], x.shape()[2]];
    let mut by_rank = cx.alloc(&shape)?;
    cp.all_gather(by_rank.view_mut(), x.view())?.wait()?;
    let mut ordered = cx.alloc(&shape)?;
    for (from, to) in moves(cp, shape[0]) {
        cx.ops.copy(ordered.view_mut().slice_rows(to), by_rank.view().slice_rows(from))?;
    }
    Ok(ordered)
}

/// The gradient of [`all_keys`]: the sum over ranks of this rank's part of `dx[S, Nk, D]`.
fn own_keys_grad(cx: &Cx, dx: Tensor, shape: &[usize]) -> Result<Tensor> {
    let cp = &*cx.ranks.mesh.cp;
    let mut by_rank = cx.alloc(dx.shape())?;
    for (to, from) in moves(cp, dx.shape()[0]) {
        cx.ops.copy(by_rank.view_mut().slice_rows(to), dx.view().slice_rows(from))?;
    }
    let mut own = cx.alloc(shape)?;
    cp.reduce_scatter(own.view_mut(), by_rank.view())?.wait()?;
    Ok(own)
}

/// Where each piece lies in the order of ranks, and where in the order of the sequence of `tokens` tokens.
fn moves(cp: &dyn Comm, tokens: usize) -> Vec<(Range<usize>, Range<usize>)> {
    let mut end = 0;
    let pieces = (0..cp.size()).flat_map(|rank| pieces(tokens, rank, cp.size()));
    pieces
        .map(|piece| {
            let start = end;
            end += piece.len();
            (start..end, piece)
        })
        .collect()
}
