//! The CPU backend: the normative one. Every operation of [`Ops`] in f64 and f32; bf16 and f16 are storage only
//! (making, copying and converting), but for products with a bf16 operand.
//!
//! Each file holds some operations as functions generic over `float::Float`, which check their arguments and then
//! run their tasks (`tasks`) on the backend's own threads. Products go through `matmul`.

mod args;
mod attention;
mod attention_grad;
mod elementwise;
mod embedding;
mod float;
mod kernel;
mod linear;
mod loss;
mod matmul;
mod memory;
mod mlp;
mod moe;
mod norm;
mod optim;
mod paged;
pub mod pool;
mod qkv;
mod router;
mod tasks;

use crate::{
    AdamW, AdamWState, Balance, Beta, DType, Error, GroupedGemm, MemoryUse, Ops, PackedSeqs, PagedSeqs, Purpose, Result, RopeTable,
    RouterGrad, Tensor, Trans, View, ViewMut,
};
use pool::Pool;
use std::sync::Arc;

/// The CPU backend, with its own threads and its own pool of buffers.
pub struct Cpu {
    threads: usize,
    /// Absent when there is only one thread: the caller's.
    pool: Option<rayon::ThreadPool>,
    buffers: Arc<Pool>,
}

impl Cpu {
    /// A backend that computes on `threads` threads; 0 means one per core. Where the system refuses to start them, the
    /// backend computes on the calling thread, and [`threads`](Cpu::threads) and its name say so.
    pub fn new(threads: usize) -> Cpu {
        let wanted = if threads == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { threads };
        let start = || rayon::ThreadPoolBuilder::new().num_threads(wanted).thread_name(|i| format!("cpu-{i}")).build().ok();
        let pool = if wanted > 1 { start() } else { None };
        Cpu { threads: if pool.is_some() { wanted } else { 1 }, pool, buffers: Arc::default() }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Gives unused buffers back to the system.
    pub fn trim(&self) {
        self.buffers.trim();
    }
}

/// Runs `$body` with `$t` the Rust type of `$dtype`, which must be F32 or F64.
macro_rules! typed {
    ($op:literal, $what:literal, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $t = f32;
                $body
            }
            DType::F64 => {
                type $t = f64;
                $body
            }
            found => {
                Err(Error::DType { op: $op, what: $what, found, expected: "float32 or float64 (the CPU computes in no other)".into() })
            }
        }
    };
}

impl Ops for Cpu {
    fn name(&self) -> String {
        format!("cpu ({} thread{})", self.threads, if self.threads == 1 { "" } else { "s" })
    }

    fn dtypes(&self) -> &'static [DType] {
        &[DType::F32, DType::F64]
    }

    fn alloc(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.pooled(dtype, shape)
    }
    fn zeros(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let mut out = self.pooled(dtype, shape)?;
        memory::fill(self, out.view_mut(), 0.0)?;
        Ok(out)
    }
    fn from_host(&self, x: View) -> Result<Tensor> {
        self.duplicate(x)
    }
    fn to_host(&self, x: View) -> Result<Tensor> {
        self.duplicate(x)
    }

    fn fill(&self, out: ViewMut, value: f64) -> Result<()> {
        memory::fill(self, out, value)
    }
    fn copy(&self, out: ViewMut, x: View) -> Result<()> {
        memory::copy(self, out, x)
    }
    fn add(&self, out: ViewMut, a: View, b: View) -> Result<()> {
        typed!("add", "a", a.dtype(), T => elementwise::add::<T>(self, out, a, b))
    }
    fn add_assign(&self, out: ViewMut, a: View) -> Result<()> {
        typed!("add_assign", "a", a.dtype(), T => elementwise::add_assign::<T>(self, out, a))
    }
    fn scale(&self, out: ViewMut, factor: f64) -> Result<()> {
        typed!("scale", "out", out.dtype(), T => elementwise::scale::<T>(self, out, factor))
    }

    fn gemm(&self, c: ViewMut, a: View, ta: Trans, b: View, tb: Trans, beta: Beta) -> Result<()> {
        if b.dtype() == DType::BF16 {
            return linear::gemm_mixed(self, c, a, ta, b, tb, beta);
        }
        typed!("gemm", "a", a.dtype(), T => linear::gemm::<T>(self, c, a, ta, b, tb, beta))
    }
    fn add_bias(&self, y: ViewMut, bias: View) -> Result<()> {
        typed!("add_bias", "bias", bias.dtype(), T => linear::add_bias::<T>(self, y, bias))
    }
    fn bias_grad(&self, dbias: ViewMut, dy: View) -> Result<()> {
        typed!("bias_grad", "dy", dy.dtype(), T => linear::bias_grad::<T>(self, dbias, dy))
    }
    fn grouped_gemm(&self, kind: GroupedGemm, c: ViewMut, a: View, b: View, offsets: View) -> Result<()> {
        typed!("grouped_gemm", "a", a.dtype(), T => linear::grouped_gemm::<T>(self, kind, c, a, b, offsets))
    }

    fn embedding(&self, out: ViewMut, table: View, ids: View) -> Result<()> {
        typed!("embedding", "table", table.dtype(), T => embedding::embedding::<T>(self, out, table, ids))
    }
    fn embedding_grad(&self, dtable: ViewMut, dy: View, ids: View) -> Result<()> {
        typed!("embedding_grad", "dy", dy.dtype(), T => embedding::embedding_grad::<T>(self, dtable, dy, ids))
    }

    fn rms_norm(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, eps: f64) -> Result<()> {
        typed!("rms_norm", "x", x.dtype(), T => norm::rms_norm::<T>(self, y, rstd, x, w, eps))
    }
    fn add_rms_norm(&self, sum: ViewMut, y: ViewMut, rstd: ViewMut, a: View, b: View, w: View, eps: f64) -> Result<()> {
        typed!("add_rms_norm", "a", a.dtype(), T => norm::add_rms_norm::<T>(self, sum, y, rstd, a, b, w, eps))
    }
    fn rms_norm_grad_input(&self, dx: ViewMut, dy: View, x: View, w: View, rstd: View, residual: Option<View>) -> Result<()> {
        typed!("rms_norm_grad_input", "x", x.dtype(), T => norm::rms_norm_grad_input::<T>(self, dx, dy, x, w, rstd, residual))
    }
    fn rms_norm_grad_weight(&self, dw: ViewMut, dy: View, x: View, rstd: View) -> Result<()> {
        typed!("rms_norm_grad_weight", "x", x.dtype(), T => norm::rms_norm_grad_weight::<T>(self, dw, dy, x, rstd))
    }

    fn qkv_prepare(
        &self,
        q: ViewMut,
        k: ViewMut,
        v: ViewMut,
        rstd: Option<ViewMut>,
        qkv: View,
        norm: Option<(View, View, f64)>,
        rope: RopeTable,
        positions: View,
    ) -> Result<()> {
        typed!("qkv_prepare", "qkv", qkv.dtype(), T => qkv::qkv_prepare::<T>(self, q, k, v, rstd, qkv, norm, rope, positions))
    }
    fn qkv_prepare_grad_input(
        &self,
        dqkv: ViewMut,
        dq: View,
        dk: View,
        dv: View,
        qkv: View,
        norm: Option<(View, View, View)>,
        rope: RopeTable,
        positions: View,
    ) -> Result<()> {
        typed!("qkv_prepare_grad_input", "qkv", qkv.dtype(), T =>
            qkv::qkv_prepare_grad_input::<T>(self, dqkv, dq, dk, dv, qkv, norm, rope, positions))
    }
    fn qk_norm_grad_weight(
        &self,
        dwq: ViewMut,
        dwk: ViewMut,
        dq: View,
        dk: View,
        qkv: View,
        rstd: View,
        rope: RopeTable,
        positions: View,
    ) -> Result<()> {
        typed!("qk_norm_grad_weight", "qkv", qkv.dtype(), T =>
            qkv::qk_norm_grad_weight::<T>(self, dwq, dwk, dq, dk, qkv, rstd, rope, positions))
    }

    fn attention(&self, o: ViewMut, lse: ViewMut, q: View, k: View, v: View, seqs: PackedSeqs, scale: f64) -> Result<()> {
        typed!("attention", "q", q.dtype(), T => attention::attention::<T>(self, o, lse, q, k, v, seqs, scale))
    }
    fn attention_grad(
        &self,
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
        typed!("attention_grad", "q", q.dtype(), T =>
            attention_grad::attention_grad::<T>(self, [dq, dk, dv], [dout, o, lse], [q, k, v], seqs, scale))
    }
    fn kv_cache_write(&self, cache_k: ViewMut, cache_v: ViewMut, k: View, v: View, slots: View) -> Result<()> {
        typed!("kv_cache_write", "k", k.dtype(), T => paged::kv_cache_write::<T>(cache_k, cache_v, k, v, slots))
    }
    fn paged_attention(&self, o: ViewMut, q: View, cache_k: View, cache_v: View, seqs: PagedSeqs, scale: f64) -> Result<()> {
        typed!("paged_attention", "q", q.dtype(), T => paged::paged_attention::<T>(self, o, q, cache_k, cache_v, seqs, scale))
    }

    fn swiglu(&self, y: ViewMut, gate_up: View) -> Result<()> {
        typed!("swiglu", "gate_up", gate_up.dtype(), T => mlp::swiglu::<T>(self, y, gate_up))
    }
    fn swiglu_grad(&self, dgate_up: ViewMut, dy: View, gate_up: View) -> Result<()> {
        typed!("swiglu_grad", "gate_up", gate_up.dtype(), T => mlp::swiglu_grad::<T>(self, dgate_up, dy, gate_up))
    }

    fn router(&self, probs: ViewMut, experts: ViewMut, weights: ViewMut, logits: View, normalise: bool) -> Result<()> {
        typed!("router", "logits", logits.dtype(), T => router::router::<T>(self, probs, experts, weights, logits, normalise))
    }
    fn router_stats(&self, counts: ViewMut, prob_sums: ViewMut, z_sum: ViewMut, probs: View, experts: View, logits: View) -> Result<()> {
        typed!("router_stats", "probs", probs.dtype(), T =>
            router::router_stats::<T>(self, counts, prob_sums, z_sum, probs, experts, logits))
    }
    fn balance_loss(
        &self,
        loss: ViewMut,
        grad: ViewMut,
        counts: View,
        prob_sums: View,
        tokens: usize,
        top_k: usize,
        kind: Balance,
        coef: f64,
    ) -> Result<()> {
        typed!("balance_loss", "counts", counts.dtype(), T =>
            router::balance_loss::<T>(loss, grad, counts, prob_sums, tokens, top_k, kind, coef))
    }
    fn router_grad(
        &self,
        dlogits: ViewMut,
        dweights: View,
        probs: View,
        experts: View,
        weights: View,
        logits: View,
        extra: RouterGrad,
    ) -> Result<()> {
        typed!("router_grad", "probs", probs.dtype(), T =>
            router::router_grad::<T>(self, dlogits, dweights, probs, experts, weights, logits, extra))
    }
    fn moe_sort(&self, offsets: ViewMut, place: ViewMut, experts: View, first: usize) -> Result<()> {
        moe::moe_sort(offsets, place, experts, first)
    }
    fn moe_ranks(&self, ranks: ViewMut, rows: ViewMut, experts: View, per_rank: usize, slices: usize) -> Result<()> {
        moe::moe_ranks(ranks, rows, experts, per_rank, slices)
    }
    fn moe_gather(&self, out: ViewMut, x: View, place: View) -> Result<()> {
        if x.dtype() == DType::I32 {
            return moe::moe_gather::<i32>(self, out, x, place);
        }
        typed!("moe_gather", "x", x.dtype(), T => moe::moe_gather::<T>(self, out, x, place))
    }
    fn moe_combine(&self, out: ViewMut, y: View, weights: Option<View>, place: View) -> Result<()> {
        typed!("moe_combine", "y", y.dtype(), T => moe::moe_combine::<T>(self, out, y, weights, place))
    }
    fn moe_act_grad(
        &self,
        dgate_up: ViewMut,
        act: ViewMut,
        dweights: ViewMut,
        dact: View,
        gate_up: View,
        weights: View,
        place: View,
    ) -> Result<()> {
        typed!("moe_act_grad", "dact", dact.dtype(), T =>
            moe::moe_act_grad::<T>(self, dgate_up, act, dweights, dact, gate_up, weights, place))
    }

    fn cross_entropy(&self, losses: ViewMut, logits: ViewMut, targets: View, grad_weights: Option<View>) -> Result<()> {
        typed!("cross_entropy", "logits", logits.dtype(), T => loss::cross_entropy::<T>(self, losses, logits, targets, grad_weights))
    }

    fn vocab_stats(&self, stats: ViewMut, logits: View, targets: View, first: usize) -> Result<()> {
        typed!("vocab_stats", "logits", logits.dtype(), T => loss::vocab_stats::<T>(self, stats, logits, targets, first))
    }
    fn cross_entropy_divided(
        &self,
        losses: ViewMut,
        logits: ViewMut,
        targets: View,
        first: usize,
        stats: View,
        grad_weights: Option<View>,
    ) -> Result<()> {
        typed!("cross_entropy_divided", "logits", logits.dtype(), T =>
            loss::cross_entropy_divided::<T>(self, losses, logits, targets, first, stats, grad_weights))
    }

    fn sum_squares(&self, out: ViewMut, x: View) -> Result<()> {
        typed!("sum_squares", "x", x.dtype(), T => optim::sum_squares::<T>(self, out, x))
    }
    fn count_non_finite(&self, out: ViewMut, x: View) -> Result<()> {
        typed!("count_non_finite", "x", x.dtype(), T => optim::count_non_finite::<T>(self, out, x))
    }
    fn clip_factor(&self, factor: ViewMut, squares: View, guard: View, limit: f64) -> Result<()> {
        typed!("clip_factor", "factor", factor.dtype(), T => optim::clip_factor::<T>(factor, squares, guard, limit))
    }
    fn adamw(&self, state: AdamWState, grad: View, clip: View, step: AdamW) -> Result<()> {
        typed!("adamw", "grad", grad.dtype(), T => optim::adamw::<T>(self, state, grad, clip, step))
    }
    fn master_split(&self, weight: ViewMut, remainder: ViewMut, values: View) -> Result<()> {
        optim::master_split(weight, remainder, values)
    }
    fn master_join(&self, values: ViewMut, weight: View, remainder: View) -> Result<()> {
        optim::master_join(values, weight, remainder)
    }

    fn account(&self, purpose: Purpose) -> Purpose {
        self.buffers.account(purpose)
    }
    fn memory(&self) -> Option<MemoryUse> {
        Some(self.buffers.usage())
    }
    fn reset_memory_peak(&self) {
        self.buffers.reset_peak();
    }
}
