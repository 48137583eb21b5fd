//! The launchers: [`Ops`] on the GPU. One file a group of operations; each mirrors a file of `kernels/`.

mod attention;
mod check;
mod elementwise;
mod embedding;
mod linear;
mod loss;
mod moe;
mod norm;
mod optimizer;
mod qkv;
mod reduce;
mod router;
mod swiglu;

pub use optimizer::AdamWTypes;

use crate::Cuda;
use check::{Op, vectors};
use temper_tensor::{
    AdamW, AdamWState, AttentionSizes, Balance, Beta, DType, GroupedGemm, MemoryUse, Ops, PackedSeqs, PagedSeqs, Purpose, Result,
    RopeTable, RouterGrad, Stamp, Tensor, Trans, View, ViewMut,
};

impl Cuda {
    /// Threads for a row of `accesses` accesses: whole warps, about two accesses a thread.
    fn row_threads(accesses: usize) -> usize {
        accesses.div_ceil(2).next_multiple_of(32).clamp(32, 512)
    }

    /// Blocks of 256 threads for `accesses` independent accesses, at most a few waves of the device.
    fn flat_blocks(&self, accesses: usize) -> usize {
        accesses.div_ceil(256).min(self.device.multiprocessors * 16)
    }
}

impl Ops for Cuda {
    fn name(&self) -> String {
        let (a, b) = self.device.capability;
        format!("cuda ({}, compute capability {a}.{b})", self.device.name)
    }

    fn on_device(&self) -> bool {
        true
    }
    fn dtypes(&self) -> &'static [DType] {
        &[DType::BF16, DType::F32]
    }

    fn alloc(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(self.tensor(dtype, shape)?)
    }
    fn zeros(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        elementwise::zeros(self, dtype, shape)
    }
    fn zeros_on_host(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(self.pinned_zeros(dtype, shape)?)
    }
    fn from_host(&self, x: View) -> Result<Tensor> {
        elementwise::from_host(self, x)
    }
    fn to_host(&self, x: View) -> Result<Tensor> {
        elementwise::to_host(self, x)
    }
    fn fill(&self, out: ViewMut, value: f64) -> Result<()> {
        elementwise::fill(self, out, value)
    }
    fn copy(&self, out: ViewMut, x: View) -> Result<()> {
        elementwise::copy(self, out, x)
    }
    fn add(&self, out: ViewMut, a: View, b: View) -> Result<()> {
        elementwise::add(self, out, a, b)
    }
    fn add_assign(&self, out: ViewMut, a: View) -> Result<()> {
        elementwise::add_assign(self, out, a)
    }
    fn scale(&self, out: ViewMut, factor: f64) -> Result<()> {
        elementwise::scale(self, out, factor)
    }

    fn gemm(&self, c: ViewMut, a: View, ta: Trans, b: View, tb: Trans, beta: Beta) -> Result<()> {
        linear::gemm(self, c, a, ta, b, tb, beta)
    }
    fn add_bias(&self, y: ViewMut, bias: View) -> Result<()> {
        linear::add_bias(self, y, bias)
    }
    fn bias_grad(&self, dbias: ViewMut, dy: View) -> Result<()> {
        linear::bias_grad(self, dbias, dy)
    }
    fn grouped_gemm(&self, kind: GroupedGemm, c: ViewMut, a: View, b: View, offsets: View) -> Result<()> {
        linear::grouped_gemm(self, kind, c, a, b, offsets)
    }

    fn embedding(&self, out: ViewMut, table: View, ids: View) -> Result<()> {
        embedding::embedding(self, out, table, ids)
    }
    fn embedding_grad(&self, dtable: ViewMut, dy: View, ids: View) -> Result<()> {
        embedding::embedding_grad(self, dtable, dy, ids)
    }

    fn rms_norm(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, eps: f64) -> Result<()> {
        norm::rms_norm(self, y, rstd, x, w, eps)
    }
    fn add_rms_norm(&self, sum: ViewMut, y: ViewMut, rstd: ViewMut, a: View, b: View, w: View, eps: f64) -> Result<()> {
        norm::add_rms_norm(self, sum, y, rstd, a, b, w, eps)
    }
    fn rms_norm_grad_input(&self, dx: ViewMut, dy: View, x: View, w: View, rstd: View, residual: Option<View>) -> Result<()> {
        norm::grad_input(self, dx, dy, x, w, rstd, residual)
    }
    fn rms_norm_grad_weight(&self, dw: ViewMut, dy: View, x: View, rstd: View) -> Result<()> {
        norm::grad_weight(self, dw, dy, x, rstd)
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
        qkv::prepare(self, q, k, v, rstd, qkv, norm, rope, positions)
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
        qkv::grad_input(self, dqkv, dq, dk, dv, qkv, norm, rope, positions)
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
        qkv::grad_weight(self, dwq, dwk, dq, dk, qkv, rstd, rope, positions)
    }

    fn prepare_attention(&self, sizes: &[AttentionSizes]) {
        attention::prepare(self, sizes);
    }
    fn attention(&self, o: ViewMut, lse: ViewMut, q: View, k: View, v: View, seqs: PackedSeqs, scale: f64) -> Result<()> {
        attention::forward(self, o, lse, q, k, v, seqs, scale)
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
        attention::backward(self, dq, dk, dv, dout, o, lse, q, k, v, seqs, scale)
    }
    fn kv_cache_write(&self, cache_k: ViewMut, cache_v: ViewMut, k: View, v: View, slots: View) -> Result<()> {
        attention::kv_cache_write(self, cache_k, cache_v, k, v, slots)
    }
    fn paged_attention(&self, o: ViewMut, q: View, cache_k: View, cache_v: View, seqs: PagedSeqs, scale: f64) -> Result<()> {
        attention::paged(self, o, q, cache_k, cache_v, seqs, scale)
    }

    fn swiglu(&self, y: ViewMut, gate_up: View) -> Result<()> {
        swiglu::forward(self, y, gate_up)
    }
    fn swiglu_grad(&self, dgate_up: ViewMut, dy: View, gate_up: View) -> Result<()> {
        swiglu::backward(self, dgate_up, dy, gate_up)
    }

    fn router(&self, probs: ViewMut, experts: ViewMut, weights: ViewMut, logits: View, normalise: bool) -> Result<()> {
        router::router(self, probs, experts, weights, logits, normalise)
    }
    fn router_stats(&self, counts: ViewMut, prob_sums: ViewMut, z_sum: ViewMut, probs: View, experts: View, logits: View) -> Result<()> {
        router::stats(self, counts, prob_sums, z_sum, probs, experts, logits)
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
        router::balance_loss(self, loss, grad, counts, prob_sums, tokens, top_k, kind, coef)
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
        router::backward(self, dlogits, dweights, probs, experts, weights, logits, extra)
    }
    fn moe_sort(&self, offsets: ViewMut, place: ViewMut, experts: View, first: usize) -> Result<()> {
        moe::sort(self, offsets, place, experts, first)
    }
    fn moe_ranks(&self, ranks: ViewMut, rows: ViewMut, experts: View, per_rank: usize, slices: usize) -> Result<()> {
        moe::ranks(self, ranks, rows, experts, per_rank, slices)
    }
    fn moe_gather(&self, out: ViewMut, x: View, place: View) -> Result<()> {
        moe::gather(self, out, x, place)
    }
    fn moe_combine(&self, out: ViewMut, y: View, weights: Option<View>, place: View) -> Result<()> {
        moe::combine(self, out, y, weights, place)
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
        swiglu::weighted_backward(self, dgate_up, act, dweights, dact, gate_up, weights, place)
    }

    fn cross_entropy(&self, losses: ViewMut, logits: ViewMut, targets: View, grad_weights: Option<View>) -> Result<()> {
        loss::cross_entropy(self, losses, logits, targets, grad_weights)
    }

    fn vocab_stats(&self, stats: ViewMut, logits: View, targets: View, first: usize) -> Result<()> {
        loss::vocab_stats(self, stats, logits, targets, first)
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
        loss::cross_entropy_divided(self, losses, logits, targets, first, stats, grad_weights)
    }

    fn sum_squares(&self, out: ViewMut, x: View) -> Result<()> {
        reduce::sum_squares(self, out, x)
    }
    fn count_non_finite(&self, out: ViewMut, x: View) -> Result<()> {
        reduce::count_non_finite(self, out, x)
    }
    fn clip_factor(&self, factor: ViewMut, squares: View, guard: View, limit: f64) -> Result<()> {
        optimizer::clip_factor(self, factor, squares, guard, limit)
    }
    fn adamw(&self, state: AdamWState, grad: View, clip: View, step: AdamW) -> Result<()> {
        optimizer::adamw(self, state, grad, clip, step)
    }
    fn master_split(&self, weight: ViewMut, remainder: ViewMut, values: View) -> Result<()> {
        optimizer::master_split(self, weight, remainder, values)
    }
    fn master_join(&self, values: ViewMut, weight: View, remainder: View) -> Result<()> {
        optimizer::master_join(self, values, weight, remainder)
    }

    fn account(&self, purpose: Purpose) -> Purpose {
        self.set_purpose(purpose)
    }
    fn memory(&self) -> Option<MemoryUse> {
        Some(self.arena.usage())
    }
    fn reset_memory_peak(&self) {
        self.arena.reset_peak();
    }
    fn stamp(&self) -> Result<Box<dyn Stamp>> {
        let event = self.device.event()?;
        event.record()?;
        Ok(Box::new(event))
    }
    fn wait(&self) -> Result<()> {
        Ok(self.device.synchronize()?)
    }
}
