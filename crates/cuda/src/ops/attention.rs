//! Attention: cuDNN where it serves, else `kernels/attention_mma.cu` (bf16 on tensor cores) or `kernels/attention.cu` (everything); generation against a paged cache by `kernels/paged.cu`.
//! T queries (of S = skip + T keys), Nq query heads, Nk key heads, head size D, B sequences.

use super::{Op, vectors};
use crate::Cuda;
use crate::kernels::{Grid, HEADS, MMA_HEADS, Variant, args};
use crate::sdpa::Addresses;
use temper_tensor::{AttentionSizes, DType, PackedSeqs, PagedSeqs, Result, View, ViewMut};

const PLAIN: &str = "attention.cu";
const MMA: &str = "attention_mma.cu";
const PAGED: &str = "paged.cu";
/// Query heads that a block of `paged_attention` takes, and of the kernels on tensor cores, as in `paged.cu`.
const PAGED_HEADS: usize = 4;
const PAGED_ROWS: usize = 8;

/// Our own kernels for a call.
struct Own {
    file: &'static str,
    variant: Variant,
    /// Rows of a tile.
    rows: usize,
    /// Bytes of a tile, and of a matrix of probabilities beside it.
    tile: usize,
    square: usize,
}

/// Checks that are common to forward and backward: sizes, dtype and addresses of q, k, v and the sequence starts.
struct Inputs {
    dtype: DType,
    sizes: AttentionSizes,
    q: u64,
    k: u64,
    v: u64,
    cu: u64,
    /// Keys before the first query.
    skip: usize,
    scale: f32,
}

fn inputs(op: Op, q: View, k: View, v: View, seqs: PackedSeqs, scale: f64) -> Result<Inputs> {
    let dtype = op.activation("q", q.dtype())?;
    let [t, nq, d] = op.dims("q", q)?;
    let [_, nk, _] = op.dims("k", k)?;
    let largest = HEADS[HEADS.len() - 1] as usize;
    if nk == 0 || nq % nk != 0 || d == 0 || d > largest {
        return op.wrong("q", q, format!("[T, Nq, D] with Nq a multiple of Nk = {nk} and D in 1..={largest}"));
    }
    let [b1] = op.dims("seqs.cu", seqs.cu)?;
    if b1 < 2 && t > 0 {
        return op.wrong("seqs.cu", seqs.cu, "[B+1] with at least one sequence");
    }
    Ok(Inputs {
        dtype,
        sizes: AttentionSizes {
            dtype,
            tokens: t,
            sequences: b1.saturating_sub(1),
            longest: seqs.longest,
            q_heads: nq,
            k_heads: nk,
            head: d,
        },
        q: op.address("q", q)?,
        k: op.input("k", k, dtype, &[seqs.skip + t, nk, d])?,
        v: op.input("v", v, dtype, &[seqs.skip + t, nk, d])?,
        skip: seqs.skip,
        cu: op.input("seqs.cu", seqs.cu, DType::I32, &[b1])?,
        scale: scale as f32,
    })
}

impl Inputs {
    fn addresses(&self, o: u64, lse: u64) -> Addresses {
        Addresses { q: self.q, k: self.k, v: self.v, o, lse, cu: self.cu, ..Addresses::default() }
    }

    /// Which of our own kernels serve: those on tensor cores when they can.
    fn own(&self) -> Own {
        let d = self.sizes.head;
        let bound = |heads: &[u32]| heads.iter().copied().find(|h| *h as usize >= d);
        let aligned = [self.q, self.k, self.v].iter().all(|x| x.is_multiple_of(16));
        if let Some(head) = bound(MMA_HEADS).filter(|_| self.dtype == DType::BF16 && d.is_multiple_of(8) && aligned) {
            let tile = 64 * (head as usize + 8) * 2;
            return Own { file: MMA, variant: Variant { head, ..Variant::PLAIN }, rows: 64, tile, square: 0 };
        }
        let head = bound(HEADS).unwrap_or(HEADS[HEADS.len() - 1]);
        let rows = if head > 128 { 16 } else { 32 };
        let (tile, square) = (rows * (head as usize + 4) * 4, rows * (rows + 1) * 4);
        Own { file: PLAIN, variant: Variant { head, ..Variant::of(self.dtype, false) }, rows, tile, square }
    }
}

/// Has cuDNN's plans made in advance.
pub fn prepare(c: &Cuda, sizes: &[AttentionSizes]) {
    if let Some(sdpa) = &c.sdpa {
        let served = |z: &AttentionSizes| z.dtype == DType::BF16 && z.tokens > 0 && z.k_heads > 0 && sdpa.serves(*z);
        sdpa.prepare(sizes.iter().copied().filter(served).collect(), !c.options.deterministic);
    }
}

pub fn forward(c: &Cuda, o: ViewMut, lse: ViewMut, q: View, k: View, v: View, seqs: PackedSeqs, scale: f64) -> Result<()> {
    let op = Op("attention");
    let x = inputs(op, q, k, v, seqs, scale)?;
    let z = x.sizes;
    let o = op.output("o", &o, x.dtype, &[z.tokens, z.q_heads, z.head])?;
    let lse = op.output("lse", &lse, DType::F32, &[z.tokens, z.q_heads])?;
    if z.tokens == 0 {
        return Ok(());
    }
    if let Some(sdpa) = c.sdpa.as_ref().filter(|s| x.dtype == DType::BF16 && x.skip == 0 && s.serves(z)) {
        return Ok(sdpa.forward(c, z, x.addresses(o, lse), x.scale)?);
    }
    let own = x.own();
    let grid = Grid::plane(z.tokens.div_ceil(own.rows), z.q_heads, 128).shared(3 * own.tile + own.square);
    let a = args![o, lse, x.q, x.k, x.v, x.cu, z.sequences, z.tokens, x.skip, z.q_heads, z.k_heads, z.head, x.scale];
    Ok(c.kernels.launch(own.file, own.variant, "attention", grid, a)?)
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
    seqs: PackedSeqs,
    scale: f64,
) -> Result<()> {
    let op = Op("attention_grad");
    let x = inputs(op, q, k, v, seqs, scale)?;
    let z = x.sizes;
    let (qs, ks) = ([z.tokens, z.q_heads, z.head], [x.skip + z.tokens, z.k_heads, z.head]);
    let (dq, dk, dv) = (op.output("dq", &dq, x.dtype, &qs)?, op.output("dk", &dk, x.dtype, &ks)?, op.output("dv", &dv, x.dtype, &ks)?);
    let (dout, o) = (op.input("dout", dout, x.dtype, &qs)?, op.input("o", o, x.dtype, &qs)?);
    let lse = op.input("lse", lse, DType::F32, &[z.tokens, z.q_heads])?;
    if x.skip + z.tokens == 0 {
        return Ok(());
    }
    let cudnn = c.sdpa.as_ref().filter(|s| x.dtype == DType::BF16 && x.skip == 0 && s.serves(z) && !c.options.deterministic);
    if let Some(sdpa) = cudnn {
        return Ok(sdpa.backward(c, z, Addresses { dout, dq, dk, dv, ..x.addresses(o, lse) }, x.scale)?);
    }
    let heads = z.tokens * z.q_heads;
    let delta = c.scratch(heads * 4)?;
    let d = delta.address();
    let own = x.own();
    let tiles = z.tokens.div_ceil(own.rows);
    // The row sums <dout, o> have one kernel, in the plain file.
    let delta_variant = Variant { head: HEADS[0], ..Variant::of(x.dtype, false) };
    c.kernels.launch(PLAIN, delta_variant, "attention_delta", Grid::line(heads.div_ceil(8), 256), args![d, dout, o, heads, z.head])?;
    let a = args![dq, dout, lse, d, x.q, x.k, x.v, x.cu, z.sequences, z.tokens, x.skip, z.q_heads, z.k_heads, z.head, x.scale];
    let grid = Grid::plane(tiles, z.q_heads, 128).shared(4 * own.tile + own.square);
    c.kernels.launch(own.file, own.variant, "attention_grad_q", grid, a)?;
    let a = args![dk, dv, dout, lse, d, x.q, x.k, x.v, x.cu, z.sequences, z.tokens, x.skip, z.q_heads, z.k_heads, z.head, x.scale];
    let tiles = (x.skip + z.tokens).div_ceil(own.rows);
    let grid = Grid::plane(tiles, z.k_heads, 128).shared(4 * own.tile + 2 * own.square);
    Ok(c.kernels.launch(own.file, own.variant, "attention_grad_kv", grid, a)?)
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
    let variant = Variant::of(dtype, vectors(dtype, nk * d, &[ck, cv, k, v]));
    let row = nk * d / variant.width();
    Ok(c.kernels.launch(PAGED, variant, "kv_cache_write", Grid::line(t, Cuda::row_threads(row)), args![ck, cv, k, v, slots, row])?)
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
    let variant = Variant::of(dtype, vectors(dtype, d, &[o, q, ck, cv]));
    let lanes = d.div_ceil(variant.width()).next_power_of_two().min(32);
    let threads = 128;
    let (kernel, heads, groups) = match d {
        64 if variant.width() == 8 => ("paged_attention_64", PAGED_ROWS, 4),
        128 if variant.width() == 8 => ("paged_attention_128", PAGED_ROWS, 4),
        _ => ("paged_attention", PAGED_HEADS, threads / lanes),
    };
    // Enough blocks to fill the device several times over, so that long and short sequences even out.
    let sets = (nq / nk).div_ceil(heads);
    let wanted = c.device.multiprocessors * 12 / (t * nk * sets).max(1);
    let parts = wanted.min((most * size).div_ceil(64)).clamp(1, 64);
    let partial = c.scratch(if parts > 1 { t * nq * parts * (d + 2) * 4 } else { 0 })?;
    let shared = groups * heads * (d + 2) * 4;
    let grid = Grid { blocks: [t, nk * sets, parts], threads, shared };
    let a = args![o, partial.address(), q, ck, cv, cu, n, table, b, most, size, nq, nk, d, scale as f32, parts, lanes];
    c.kernels.launch(PAGED, variant, kernel, grid, a)?;
    if parts == 1 {
        return Ok(());
    }
    Ok(c.kernels.launch(PAGED, variant, "paged_join", Grid::line(t * nq, d.next_multiple_of(32)), args![o, partial.address(), d, parts])?)
}
