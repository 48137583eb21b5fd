//! Attention: cuDNN where it serves, else `kernels/attention.cu`; generation against a paged cache by `kernels/paged.cu`.
//! T tokens, Nq query heads, Nk key heads, head size D, B sequences.

use super::Op;
use crate::Cuda;
use crate::kernels::{Grid, HEADS, Variant, args};
use crate::sdpa::{Addresses, Sizes};
use temper_tensor::{DType, PagedSeqs, Result, View, ViewMut};

const FILE: &str = "attention.cu";

/// Checks that are common to forward and backward: sizes, dtype and addresses of q, k, v and the sequence starts.
struct Inputs {
    dtype: DType,
    sizes: Sizes,
    q: u64,
    k: u64,
    v: u64,
    cu: u64,
    scale: f32,
}

fn inputs(op: Op, q: View, k: View, v: View, cu_seqlens: View, scale: f64) -> Result<Inputs> {
    let dtype = op.activation("q", q.dtype())?;
    let [t, nq, d] = op.dims("q", q)?;
    let [_, nk, _] = op.dims("k", k)?;
    let largest = HEADS[HEADS.len() - 1] as usize;
    if nk == 0 || nq % nk != 0 || d == 0 || d > largest {
        return op.wrong("q", q, format!("[T, Nq, D] with Nq a multiple of Nk = {nk} and D in 1..={largest}"));
    }
    let [b1] = op.dims("cu_seqlens", cu_seqlens)?;
    if b1 < 2 && t > 0 {
        return op.wrong("cu_seqlens", cu_seqlens, "[B+1] with at least one sequence");
    }
    Ok(Inputs {
        dtype,
        sizes: Sizes { tokens: t, sequences: b1.saturating_sub(1), q_heads: nq, k_heads: nk, head: d },
        q: op.address("q", q)?,
        k: op.input("k", k, dtype, &[t, nk, d])?,
        v: op.input("v", v, dtype, &[t, nk, d])?,
        cu: op.input("cu_seqlens", cu_seqlens, DType::I32, &[b1])?,
        scale: scale as f32,
    })
}

impl Inputs {
    fn addresses(&self, o: u64, lse: u64) -> Addresses {
        Addresses { q: self.q, k: self.k, v: self.v, o, lse, cu: self.cu, ..Addresses::default() }
    }

    /// Variant, rows of a tile, and bytes of `tiles` tiles and `squares` matrices of probabilities.
    fn plain(&self, tiles: usize, squares: usize) -> (Variant, usize, usize) {
        let head = HEADS.iter().copied().find(|h| *h as usize >= self.sizes.head).unwrap_or(256);
        let rows = if head > 128 { 16 } else { 32 };
        let bytes = tiles * rows * (head as usize + 4) * 4 + squares * rows * (rows + 1) * 4;
        (Variant { head, ..Variant::of(self.dtype, false) }, rows, bytes)
    }
}

pub fn forward(c: &Cuda, o: ViewMut, lse: ViewMut, q: View, k: View, v: View, cu_seqlens: View, scale: f64) -> Result<()> {
    let op = Op("attention");
    let x = inputs(op, q, k, v, cu_seqlens, scale)?;
    let z = x.sizes;
    let o = op.output("o", &o, x.dtype, &[z.tokens, z.q_heads, z.head])?;
    let lse = op.output("lse", &lse, DType::F32, &[z.tokens, z.q_heads])?;
    if z.tokens == 0 {
        return Ok(());
    }
    if let Some(sdpa) = c.sdpa.as_ref().filter(|s| x.dtype == DType::BF16 && s.serves(z)) {
        return Ok(sdpa.forward(c, z, x.addresses(o, lse), x.scale)?);
    }
    let (variant, rows, bytes) = x.plain(3, 1);
    let grid = Grid::plane(z.tokens.div_ceil(rows), z.q_heads, 128).shared(bytes);
    let a = args![o, lse, x.q, x.k, x.v, x.cu, z.sequences, z.tokens, z.q_heads, z.k_heads, z.head, x.scale];
    Ok(c.kernels.launch(FILE, variant, "attention", grid, a)?)
}

pub fn backward(
    c: &Cuda,
    dq: ViewMut,
    dk: ViewMut,
    dv: ViewMut,
    dout: View,
    o: View,
    lse: View,
    q: View,
    k: View,
    v: View,
    cu_seqlens: View,
    scale: f64,
) -> Result<()> {
    let op = Op("attention_grad");
    let x = inputs(op, q, k, v, cu_seqlens, scale)?;
    let z = x.sizes;
    let (qs, ks) = ([z.tokens, z.q_heads, z.head], [z.tokens, z.k_heads, z.head]);
    let (dq, dk, dv) = (op.output("dq", &dq, x.dtype, &qs)?, op.output("dk", &dk, x.dtype, &ks)?, op.output("dv", &dv, x.dtype, &ks)?);
    let (dout, o) = (op.input("dout", dout, x.dtype, &qs)?, op.input("o", o, x.dtype, &qs)?);
    let lse = op.input("lse", lse, DType::F32, &[z.tokens, z.q_heads])?;
    if z.tokens == 0 {
        return Ok(());
    }
    let cudnn = c.sdpa.as_ref().filter(|s| x.dtype == DType::BF16 && s.serves(z) && !c.options.deterministic);
    if let Some(sdpa) = cudnn {
        return Ok(sdpa.backward(c, z, Addresses { dout, dq, dk, dv, ..x.addresses(o, lse) }, x.scale)?);
    }
    let heads = z.tokens * z.q_heads;
    let delta = c.scratch(heads * 4)?;
    let d = delta.address();
    let (variant, rows, bytes) = x.plain(4, 1);
    let tiles = z.tokens.div_ceil(rows);
    c.kernels.launch(FILE, variant, "attention_delta", Grid::line(heads.div_ceil(8), 256), args![d, dout, o, heads, z.head])?;
    let a = args![dq, dout, lse, d, x.q, x.k, x.v, x.cu, z.sequences, z.tokens, z.q_heads, z.k_heads, z.head, x.scale];
    c.kernels.launch(FILE, variant, "attention_grad_q", Grid::plane(tiles, z.q_heads, 128).shared(bytes), a)?;
    let (_, _, bytes) = x.plain(4, 2);
    let a = args![dk, dv, dout, lse, d, x.q, x.k, x.v, x.cu, z.sequences, z.tokens, z.q_heads, z.k_heads, z.head, x.scale];
    Ok(c.kernels.launch(FILE, variant, "attention_grad_kv", Grid::plane(tiles, z.k_heads, 128).shared(bytes), a)?)
}

pub fn kv_cache_write(c: &Cuda, cache_k: ViewMut, cache_v: ViewMut, k: View, v: View, slots: View) -> Result<()> {
    let op = Op("kv_cache_write");
    let dtype = op.activation("k", k.dtype())?;
    let [t, nk, d] = op.dims("k", k)?;
    let [blocks, size, _, _] = op.dims("cache_k", cache_k.as_view())?;
    let cache = [blocks, size, nk, d];
    let (ck, cv) = (op.output("cache_k", &cache_k, dtype, &cache)?, op.output("cache_v", &cache_v, dtype, &cache)?);
    let (k, v) = (op.address("k", k)?, op.input("v", v, dtype, &[t, nk, d])?);
    let slots = op.input("slots", slots, DType::I32, &[t])?;
    let grid = Grid::line(t, Cuda::row_threads(nk * d));
    Ok(c.kernels.launch("paged.cu", Variant::of(dtype, false), "kv_cache_write", grid, args![ck, cv, k, v, slots, nk * d])?)
}

pub fn paged(c: &Cuda, o: ViewMut, q: View, cache_k: View, cache_v: View, seqs: PagedSeqs, scale: f64) -> Result<()> {
    let op = Op("paged_attention");
    let dtype = op.activation("q", q.dtype())?;
    let [t, nq, d] = op.dims("q", q)?;
    let [blocks, size, nk, _] = op.dims("cache_k", cache_k)?;
    if nk == 0 || nq % nk != 0 || d > 256 {
        return op.wrong("q", q, format!("[T, Nq, D] with Nq a multiple of Nk = {nk} and D at most 256"));
    }
    let [b, most] = op.dims("seqs.blocks", seqs.blocks)?;
    let o = op.output("o", &o, dtype, &[t, nq, d])?;
    let cache = [blocks, size, nk, d];
    let (ck, cv) = (op.input("cache_k", cache_k, dtype, &cache)?, op.input("cache_v", cache_v, dtype, &cache)?);
    let (cu, n) = (op.input("seqs.cu_q", seqs.cu_q, DType::I32, &[b + 1])?, op.input("seqs.context", seqs.context, DType::I32, &[b])?);
    let table = op.input("seqs.blocks", seqs.blocks, DType::I32, &[b, most])?;
    let q = op.address("q", q)?;
    let a = args![o, q, ck, cv, cu, n, table, b, most, size, nq, nk, d, scale as f32];
    Ok(c.kernels.launch("paged.cu", Variant::of(dtype, false), "paged_attention", Grid::plane(t, nq, 128), a)?)
}
