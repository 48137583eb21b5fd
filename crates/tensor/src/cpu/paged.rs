//! Attention against a paged KV cache, for generation.
//!
//! Legend: T query rows of the step, Nq query heads, Nk key/value heads, G = Nq / Nk, D head size, B sequences.

use super::{
    Cpu,
    args::Op,
    attention::Heads,
    float::{self, Float},
};
use crate::{PagedSeqs, Result, View, ViewMut};

/// Where one query row looks: positions `0..context` of the cache blocks `blocks`.
#[derive(Clone, Copy)]
struct Reach<'a> {
    context: usize,
    blocks: &'a [i32],
}

/// Rows and row length of a cache [blocks, block_size, Nk, D], also given flat as [blocks*block_size, Nk*D].
fn cache_rows(op: Op, what: &'static str, shape: &[usize], width: usize) -> Result<usize> {
    let rows = match *shape {
        [blocks, size, nk, d] if nk * d == width => Some(blocks * size),
        [rows, w] if w == width => Some(rows),
        _ => None,
    };
    rows.ok_or_else(|| op.misshapen(what, shape, format!("[blocks, block_size, Nk, D] or [blocks*block_size, {width}]")))
}

/// See [`Ops::kv_cache_write`](crate::Ops::kv_cache_write).
pub(super) fn kv_cache_write<T: Float>(cache_k: ViewMut, cache_v: ViewMut, k: View, v: View, slots: View) -> Result<()> {
    let op = Op("kv_cache_write");
    let [t, nk, d] = op.dims("k", k.shape())?;
    let (k, v, slots) = (op.read::<T>("k", k, &[t, nk, d])?, op.read::<T>("v", v, &[t, nk, d])?, op.read::<i32>("slots", slots, &[t])?);
    let width = nk * d;
    let rows = cache_rows(op, "cache_k", cache_k.shape(), width)?;
    op.shape("cache_v", cache_v.shape(), cache_k.shape())?;
    let shape = cache_k.shape().to_vec();
    let (cache_k, cache_v) = (op.write::<T>("cache_k", cache_k, &shape)?, op.write::<T>("cache_v", cache_v, &shape)?);
    op.indices("cache slot", slots, rows)?;
    for (t, &slot) in slots.iter().enumerate() {
        let (from, to) = (t * width..(t + 1) * width, slot as usize * width);
        cache_k[to..to + width].copy_from_slice(&k[from.clone()]);
        cache_v[to..to + width].copy_from_slice(&v[from]);
    }
    Ok(())
}

/// See [`Ops::paged_attention`](crate::Ops::paged_attention).
pub(super) fn paged_attention<T: Float>(
    cpu: &Cpu,
    o: ViewMut,
    q: View,
    cache_k: View,
    cache_v: View,
    seqs: PagedSeqs,
    scale: f64,
) -> Result<()> {
    let op = Op("paged_attention");
    let [t, nq, d] = op.dims("q", q.shape())?;
    let [blocks, size, nk, cache_d] = op.dims("cache_k", cache_k.shape())?;
    op.require(
        cache_d == d && nk > 0 && nq.is_multiple_of(nk),
        "cache_k",
        cache_k.shape(),
        "the head size of q, and key heads that divide its heads",
    )?;
    let heads = Heads { nq, nk, d };
    let q = op.read::<T>("q", q, &[t, nq, d])?;
    let cache_shape = [blocks, size, nk, d];
    let (k, v) = (op.read::<T>("cache_k", cache_k, &cache_shape)?, op.read::<T>("cache_v", cache_v, &cache_shape)?);
    let o = op.write::<T>("o", o, &[t, nq, d])?;
    let reaches = reaches(op, seqs, t, blocks, size)?;
    let work = reaches.iter().map(|r| r.context).sum::<usize>() * nq * d;
    // One task is the heads of one query row that share a key head: their outputs are adjacent.
    let tasks = o.chunks_mut((heads.group() * d).max(1)).enumerate();
    cpu.each(
        work,
        tasks,
        #[inline(always)]
        |(i, o)| {
            let (t, g) = (i / nk, i % nk);
            let q = &q[i * heads.group() * d..][..heads.group() * d];
            attend(o, q, [k, v], reaches[t], heads, g, size, T::of(scale));
        },
    );
    Ok(())
}

/// Checks the sequences and gives the reach of every query row.
fn reaches<'a>(op: Op, seqs: PagedSeqs<'a>, t: usize, blocks: usize, size: usize) -> Result<Vec<Reach<'a>>> {
    let [b, columns] = op.dims("blocks", seqs.blocks.shape())?;
    let cu_q = op.read::<i32>("cu_q", seqs.cu_q, &[b + 1])?;
    op.bounds("cu_q", cu_q, t)?;
    let contexts = op.read::<i32>("context", seqs.context, &[b])?;
    let table = op.read::<i32>("blocks", seqs.blocks, &[b, columns])?;
    let mut reaches = Vec::with_capacity(t);
    for (i, w) in cu_q.windows(2).enumerate() {
        let queries = (w[1] - w[0]) as usize;
        let context = op.index("context length", contexts[i], columns * size + 1)?;
        op.require(queries <= context || queries == 0, "context", &[context], "at least the queries of the sequence")?;
        let row = &table[i * columns..(i + 1) * columns];
        let used = &row[..context.div_ceil(size.max(1))];
        op.indices("cache block", used, blocks)?;
        reaches.extend((0..queries).map(|j| Reach { context: context - queries + j + 1, blocks: used }));
    }
    Ok(reaches)
}

/// The query heads of key head `g` of one query row.
#[inline(always)]
fn attend<T: Float>(o: &mut [T], q: &[T], [k, v]: [&[T]; 2], reach: Reach, heads: Heads, g: usize, size: usize, scale: T) {
    let Heads { nk, d, .. } = heads;
    let n = reach.context;
    let at = |position: usize| ((reach.blocks[position / size] as usize * size + position % size) * nk + g) * d;
    let mut scores = vec![T::ZERO; heads.group() * n];
    for position in 0..n {
        let key = &k[at(position)..][..d];
        for (j, q) in q.chunks(d).enumerate() {
            scores[j * n + position] = float::dot(q, key) * scale;
        }
    }
    o.fill(T::ZERO);
    for scores in scores.chunks_mut(n) {
        let top = float::max(scores);
        let mass = float::exp_shifted(scores, top);
        float::scale(scores, T::ONE / mass);
    }
    for position in 0..n {
        let value = &v[at(position)..][..d];
        for (j, o) in o.chunks_mut(d).enumerate() {
            float::axpy(o, scores[j * n + position], value);
        }
    }
}
