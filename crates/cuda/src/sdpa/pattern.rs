//! The graphs that cuDNN recognises as causal attention of packed sequences, forward and backward; and, when all sequences have
//! one length, of a dense batch over the same memory, which runs 5 to 7 % faster.
//!
//! How they must look (the parts that are easy to get wrong):
//! 1. K is described transposed, dims [b, hk, d, s], over the same memory; the backward takes V transposed too.
//! 2. Dims are [b, h, s, d] with s the longest sequence the plan accepts. Each sequence starts at `base + offset[i]`
//!    elements (not bytes, not tokens): three arrays of b+1 i64, cu * hq*d, cu * hk*d and cu * hq.
//! 3. The lengths (b i32) are given twice: to the matmuls, and in a padding mask.
//! 4. Index nodes of the padding mask compute in i32, those of the causal mask in f32; comparisons in BOOLEAN.
//! 5. Backward: scale first, then minus statistics, then the masks, then exp.
//! 6. The backward's scratch (delta, f32 dQ, and for grouped heads bf16 dK and dV of each query head) is the caller's;
//!    it need not be cleared. The dK and dV scratch uses the offsets of K: cuDNN multiplies them by hq/hk itself.
//! 7. A plan is tied to (b, s, hq, hk, d), not to the lengths: unused entries have length 0 and repeat the last offset.
//!    A dense plan is for exactly b sequences of exactly s tokens, without offsets, lengths and padding mask. It keeps its
//!    statistics and scratch as [b, h, s, ..]: before cuDNN 9.26 it reads statistics in any other order wrongly.
//! 8. Scalars are bound as host pointers, read during the call. dQ is added with atomics: reruns differ in the last bits.

use super::graph::{BF16, BOOL, F32, Graph, I32, I64, Layout, Source, T, contiguous};
use crate::Result;
use crate::sys::cudnn::{Cudnn, cudnnPointwiseMode_t as Pw, cudnnReduceTensorOp_t as Red};
use std::sync::Arc;

/// Ids of the tensors (any distinct numbers below 1000 would do).
pub mod id {
    #![allow(missing_docs)]
    pub const Q: i64 = 1;
    pub const K: i64 = 2;
    pub const V: i64 = 3;
    pub const O: i64 = 4;
    pub const STATS: i64 = 5;
    pub const D_O: i64 = 6;
    pub const LENGTHS_Q: i64 = 8;
    pub const LENGTHS_K: i64 = 9;
    pub const DQ: i64 = 11;
    pub const DK: i64 = 12;
    pub const DV: i64 = 13;
    pub const OFFSETS_Q: i64 = 50;
    pub const OFFSETS_K: i64 = 51;
    pub const OFFSETS_STATS: i64 = 52;
    pub const SCALE: i64 = 60;
    pub const NEG_PADDING: i64 = 61;
    pub const NEG_CAUSAL: i64 = 62;
    pub const ONE: i64 = 63;
    pub const DELTA: i64 = 70;
    pub const DV_HEADS: i64 = 71;
    pub const DK_HEADS: i64 = 72;
    pub const DQ_SUM: i64 = 73;
}

/// What a pair of plans is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Most sequences of a batch (dense: their number).
    pub b: i64,
    /// Longest sequence (dense: the length of each).
    pub s: i64,
    /// Query heads.
    pub hq: i64,
    /// Key heads.
    pub hk: i64,
    /// Head size.
    pub d: i64,
    /// All sequences have one length.
    pub dense: bool,
}

/// Tensors of both graphs.
struct Common {
    q: T,
    kt: T,
    v: T,
    o: T,
    stats: T,
    scale: T,
    neg_causal: T,
    packed: Packed,
}

/// What only packed sequences have; all none in a dense batch.
#[derive(Clone, Copy, Default)]
struct Packed {
    length_q: Option<T>,
    length_k: Option<T>,
    neg_padding: Option<T>,
    off_q: Option<T>,
    off_k: Option<T>,
    off_stats: Option<T>,
}

impl Shape {
    /// A [tokens, h, d] buffer seen as [b, h, s, d].
    fn thd(&self, h: i64, d: i64) -> Layout {
        ([self.b, h, self.s, d], [self.s * h * d, d, h * d, 1])
    }

    /// The same memory seen as [b, h, d, s].
    fn thd_transposed(&self, h: i64) -> Layout {
        ([self.b, h, self.d, self.s], [self.s * h * self.d, self.d, 1, h * self.d])
    }

    /// Statistics (d = 1) and scratch of each query head: as [tokens, hq, d] when packed, [b, hq, s, d] when dense.
    fn per_query_head(&self, d: i64) -> Layout {
        let dims = [self.b, self.hq, self.s, d];
        if self.dense { (dims, contiguous(dims)) } else { self.thd(self.hq, d) }
    }

    fn packed(&self, g: &mut Graph) -> Result<Packed> {
        if self.dense {
            return Ok(Packed::default());
        }
        let vector = |n: i64| ([n, 1, 1, 1], [1; 4]);
        Ok(Packed {
            off_q: Some(g.real(id::OFFSETS_Q, I64, vector(self.b + 1), None)?),
            off_k: Some(g.real(id::OFFSETS_K, I64, vector(self.b + 1), None)?),
            off_stats: Some(g.real(id::OFFSETS_STATS, I64, vector(self.b + 1), None)?),
            length_q: Some(g.real(id::LENGTHS_Q, I32, vector(self.b), None)?),
            length_k: Some(g.real(id::LENGTHS_K, I32, vector(self.b), None)?),
            neg_padding: Some(g.scalar(id::NEG_PADDING)?),
        })
    }

    fn common(&self, g: &mut Graph, v_transposed: bool) -> Result<Common> {
        let (hq, hk, d) = (self.hq, self.hk, self.d);
        let packed = self.packed(g)?;
        let Packed { off_q, off_k, off_stats, .. } = packed;
        let v = if v_transposed { self.thd_transposed(hk) } else { self.thd(hk, d) };
        Ok(Common {
            q: g.real(id::Q, BF16, self.thd(hq, d), off_q)?,
            kt: g.real(id::K, BF16, self.thd_transposed(hk), off_k)?,
            v: g.real(id::V, BF16, v, off_k)?,
            o: g.real(id::O, BF16, self.thd(hq, d), off_q)?,
            stats: g.real(id::STATS, F32, self.per_query_head(1), off_stats)?,
            scale: g.scalar(id::SCALE)?,
            neg_causal: g.scalar(id::NEG_CAUSAL)?,
            packed,
        })
    }

    /// Padding mask (packed only), then causal mask, on scores [b, hq, s, s].
    fn mask(&self, g: &mut Graph, c: &Common, s: T) -> Result<T> {
        let mut s = s;
        if let Packed { length_q: Some(lq), length_k: Some(lk), neg_padding: Some(fill), .. } = c.packed {
            let row = g.pointwise(Pw::CUDNN_POINTWISE_GEN_INDEX, I32, Some(2), [Some(s), None, None], I32)?;
            let col = g.pointwise(Pw::CUDNN_POINTWISE_GEN_INDEX, I32, Some(3), [Some(s), None, None], I32)?;
            let row_in = g.pointwise(Pw::CUDNN_POINTWISE_CMP_LT, BOOL, None, [Some(row), Some(lq), None], BOOL)?;
            let col_in = g.pointwise(Pw::CUDNN_POINTWISE_CMP_LT, BOOL, None, [Some(col), Some(lk), None], BOOL)?;
            let both = g.pointwise(Pw::CUDNN_POINTWISE_LOGICAL_AND, BOOL, None, [Some(row_in), Some(col_in), None], BOOL)?;
            s = g.pointwise(Pw::CUDNN_POINTWISE_BINARY_SELECT, F32, None, [Some(s), Some(fill), Some(both)], F32)?;
        }
        let row = g.pointwise(Pw::CUDNN_POINTWISE_GEN_INDEX, F32, Some(2), [Some(s), None, None], I32)?;
        let col = g.pointwise(Pw::CUDNN_POINTWISE_GEN_INDEX, F32, Some(3), [Some(s), None, None], I32)?;
        let seen = g.pointwise(Pw::CUDNN_POINTWISE_CMP_GE, BOOL, None, [Some(row), Some(col), None], BOOL)?;
        g.pointwise(Pw::CUDNN_POINTWISE_BINARY_SELECT, F32, None, [Some(s), Some(c.neg_causal), Some(seen)], F32)
    }

    /// `O = softmax(mask(scale Q K^T)) V`, and the log-sum-exp of each row.
    pub fn forward(&self, lib: &Arc<Cudnn>) -> Result<Graph> {
        let g = &mut Graph::new(lib);
        let c = self.common(g, false)?;
        let (sq, sk) = (c.packed.length_q, c.packed.length_k);
        let (full, row) = ([self.b, self.hq, self.s, self.s], [self.b, self.hq, self.s, 1]);
        let s = g.inner(F32, full)?;
        g.matmul(c.q, c.kt, s, [sq, sk, None])?;
        let s = g.f32(Pw::CUDNN_POINTWISE_MUL, s, Some(c.scale))?;
        let s = self.mask(g, &c, s)?;
        let max = g.inner(F32, row)?;
        g.reduce(Red::CUDNN_REDUCE_TENSOR_MAX, s, max)?;
        let e = g.f32(Pw::CUDNN_POINTWISE_SUB, s, Some(max))?;
        let e = g.f32(Pw::CUDNN_POINTWISE_EXP, e, None)?;
        let sum = g.inner(F32, row)?;
        g.reduce(Red::CUDNN_REDUCE_TENSOR_ADD, e, sum)?;
        let log = g.f32(Pw::CUDNN_POINTWISE_LOG, sum, None)?;
        g.pointwise_to(Pw::CUDNN_POINTWISE_ADD, F32, None, [Some(max), Some(log), None], c.stats)?;
        let p = g.pointwise(Pw::CUDNN_POINTWISE_DIV, F32, None, [Some(e), Some(sum), None], BF16)?;
        g.matmul(p, c.v, c.o, [sq, None, sk])?;
        Ok(std::mem::replace(g, Graph::new(lib)))
    }

    /// `dQ, dK, dV` from `Q, K, V, O, dO` and the forward's statistics.
    pub fn backward(&self, lib: &Arc<Cudnn>) -> Result<Graph> {
        let g = &mut Graph::new(lib);
        let c = self.common(g, true)?;
        let (sq, sk) = (c.packed.length_q, c.packed.length_k);
        let (b, hq, hk, s, d) = (self.b, self.hq, self.hk, self.s, self.d);
        let full = [b, hq, s, s];
        let transposed: Layout = (full, [hq * s * s, s * s, 1, s]); // P and dS read transposed
        let d_o = g.real(id::D_O, BF16, self.thd(hq, d), c.packed.off_q)?;
        let dv = g.real(id::DV, BF16, self.thd(hk, d), c.packed.off_k)?;
        let dk = g.real(id::DK, BF16, self.thd(hk, d), c.packed.off_k)?;
        let dq = g.real(id::DQ, BF16, self.thd(hq, d), c.packed.off_q)?;
        let one = g.scalar(id::ONE)?; // dropout's scale in general

        // delta = rowsum(dO * O)
        let m = g.tensor(Source::Virtual, F32, self.thd(hq, d), None)?;
        g.pointwise_to(Pw::CUDNN_POINTWISE_MUL, F32, None, [Some(d_o), Some(c.o), None], m)?;
        let r = g.inner(F32, [b, hq, s, 1])?;
        g.reduce(Red::CUDNN_REDUCE_TENSOR_ADD, m, r)?;
        let delta = g.real(id::DELTA, F32, self.per_query_head(1), c.packed.off_stats)?;
        g.pointwise_to(Pw::CUDNN_POINTWISE_MUL, F32, None, [Some(r), Some(one), None], delta)?;

        // P = exp(mask(scale * Q K^T - stats))
        let x = g.inner(F32, full)?;
        g.matmul(c.q, c.kt, x, [sq, sk, None])?;
        let x = g.f32(Pw::CUDNN_POINTWISE_MUL, x, Some(c.scale))?;
        let x = g.f32(Pw::CUDNN_POINTWISE_SUB, x, Some(c.stats))?;
        let x = self.mask(g, &c, x)?;
        let p = g.f32(Pw::CUDNN_POINTWISE_EXP, x, None)?;

        // dV = P^T dO
        let pt = g.tensor(Source::Virtual, BF16, transposed, None)?;
        g.reshape(p, pt)?;
        self.product_per_group(g, &c, pt, d_o, id::DV_HEADS, dv)?;

        // dS = (dO V^T - delta) * P * scale
        let y = g.inner(F32, full)?;
        g.matmul(d_o, c.v, y, [sq, sk, None])?;
        let y = g.f32(Pw::CUDNN_POINTWISE_SUB, y, Some(delta))?;
        let y = g.f32(Pw::CUDNN_POINTWISE_MUL, y, Some(p))?;
        let ds = g.f32(Pw::CUDNN_POINTWISE_MUL, y, Some(c.scale))?;

        // dK = dS^T Q
        let dst = g.tensor(Source::Virtual, BF16, transposed, None)?;
        g.reshape(ds, dst)?;
        self.product_per_group(g, &c, dst, c.q, id::DK_HEADS, dk)?;

        // dQ = dS K, summed in f32, then cast
        let k = g.tensor(Source::Virtual, F32, self.thd(hk, d), c.packed.off_k)?;
        g.reshape(c.kt, k)?;
        let sum = g.real(id::DQ_SUM, F32, self.per_query_head(d), c.packed.off_q)?;
        g.matmul(ds, k, sum, [sq, None, sk])?;
        g.pointwise_to(Pw::CUDNN_POINTWISE_IDENTITY, F32, None, [Some(sum), None, None], dq)?;
        Ok(std::mem::replace(g, Graph::new(lib)))
    }

    /// `out = a x` of each query head, summed over the query heads of a key head.
    fn product_per_group(&self, g: &mut Graph, c: &Common, a: T, x: T, heads: i64, out: T) -> Result<()> {
        let sizes = [c.packed.length_k, None, c.packed.length_q];
        if self.hq == self.hk {
            return g.matmul(a, x, out, sizes);
        }
        let each = g.real(heads, BF16, self.per_query_head(self.d), c.packed.off_k)?;
        g.matmul(a, x, each, sizes)?;
        g.reduce(Red::CUDNN_REDUCE_TENSOR_ADD, each, out)
    }
}
