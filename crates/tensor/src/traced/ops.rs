//! Every operation, forwarded and noted. One that is missing here would be noted as what its default is made of: add new ones.

use super::{Call, Traced, cost};
use crate::*;

/// A call told apart by its first operand.
fn call(name: &'static str, x: View) -> Call {
    Call::new(name, x)
}

impl Ops for Traced {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn on_device(&self) -> bool {
        self.inner.on_device()
    }
    fn dtypes(&self) -> &'static [DType] {
        self.inner.dtypes()
    }

    fn alloc(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.inner.alloc(dtype, shape)
    }
    fn zeros(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.run(Call::shaped("zeros", dtype, shape).writes_shape(), |o| o.zeros(dtype, shape))
    }
    fn zeros_on_host(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.run(Call::shaped("zeros_on_host", dtype, shape).writes_shape(), |o| o.zeros_on_host(dtype, shape))
    }
    fn from_host(&self, x: View) -> Result<Tensor> {
        self.run(call("from_host", x).read(x), |o| o.from_host(x))
    }
    fn adopt(&self, x: Tensor) -> Result<Tensor> {
        self.inner.adopt(x)
    }
    fn to_host(&self, x: View) -> Result<Tensor> {
        self.run(call("to_host", x).read(x), |o| o.to_host(x))
    }

    fn fill(&self, mut out: ViewMut, value: f64) -> Result<()> {
        self.run(call("fill", out.as_view()).write(&out), |o| o.fill(out.reborrow(), value))
    }
    fn copy(&self, mut out: ViewMut, x: View) -> Result<()> {
        self.run(call("copy", x).read(x).write(&out), |o| o.copy(out.reborrow(), x))
    }
    fn add(&self, mut out: ViewMut, a: View, b: View) -> Result<()> {
        self.run(call("add", a).read(a).read(b).write(&out), |o| o.add(out.reborrow(), a, b))
    }
    fn add_assign(&self, mut out: ViewMut, a: View) -> Result<()> {
        self.run(call("add_assign", a).read(a).update(&out), |o| o.add_assign(out.reborrow(), a))
    }
    fn scale(&self, mut out: ViewMut, factor: f64) -> Result<()> {
        self.run(call("scale", out.as_view()).update(&out), |o| o.scale(out.reborrow(), factor))
    }

    fn gemm(&self, mut c: ViewMut, a: View, ta: Trans, b: View, tb: Trans, beta: Beta) -> Result<()> {
        self.run(cost::gemm(&c, a, ta, b, tb, beta), |o| o.gemm(c.reborrow(), a, ta, b, tb, beta))
    }
    fn add_bias(&self, mut y: ViewMut, bias: View) -> Result<()> {
        self.run(call("add_bias", y.as_view()).read(bias).update(&y), |o| o.add_bias(y.reborrow(), bias))
    }
    fn bias_grad(&self, mut dbias: ViewMut, dy: View) -> Result<()> {
        self.run(call("bias_grad", dy).read(dy).update(&dbias), |o| o.bias_grad(dbias.reborrow(), dy))
    }
    fn grouped_gemm(&self, kind: GroupedGemm, mut c: ViewMut, a: View, b: View, offsets: View) -> Result<()> {
        self.run(cost::grouped_gemm(kind, &c, a, b, offsets), |o| o.grouped_gemm(kind, c.reborrow(), a, b, offsets))
    }

    fn embedding(&self, mut out: ViewMut, table: View, ids: View) -> Result<()> {
        let call = call("embedding", out.as_view()).read(ids).rows_read(table, ids.numel()).write(&out);
        self.run(call, |o| o.embedding(out.reborrow(), table, ids))
    }
    fn embedding_grad(&self, mut dtable: ViewMut, dy: View, ids: View) -> Result<()> {
        let rows = ids.numel().min(dtable.rows());
        let call = call("embedding_grad", dy).read(dy).read(ids).rows_read(dtable.as_view(), 2 * rows);
        self.run(call, |o| o.embedding_grad(dtable.reborrow(), dy, ids))
    }

    fn rms_norm(&self, mut y: ViewMut, mut rstd: ViewMut, x: View, w: View, eps: f64) -> Result<()> {
        let call = call("rms_norm", x).read(x).read(w).write(&y).write(&rstd);
        self.run(call, |o| o.rms_norm(y.reborrow(), rstd.reborrow(), x, w, eps))
    }
    fn add_rms_norm(&self, mut sum: ViewMut, mut y: ViewMut, mut rstd: ViewMut, a: View, b: View, w: View, eps: f64) -> Result<()> {
        let call = call("add_rms_norm", a).read(a).read(b).read(w).write(&sum).write(&y).write(&rstd);
        self.run(call, |o| o.add_rms_norm(sum.reborrow(), y.reborrow(), rstd.reborrow(), a, b, w, eps))
    }
    fn rms_norm_grad_input(&self, mut dx: ViewMut, dy: View, x: View, w: View, rstd: View, residual: Option<View>) -> Result<()> {
        let call = call("rms_norm_grad_input", x).read(dy).read(x).read(w).read(rstd).read_some(residual).write(&dx);
        let call = if residual.is_some() { call.form("and residual") } else { call };
        self.run(call, |o| o.rms_norm_grad_input(dx.reborrow(), dy, x, w, rstd, residual))
    }
    fn rms_norm_grad_weight(&self, mut dw: ViewMut, dy: View, x: View, rstd: View) -> Result<()> {
        let call = call("rms_norm_grad_weight", x).read(dy).read(x).read(rstd).update(&dw);
        self.run(call, |o| o.rms_norm_grad_weight(dw.reborrow(), dy, x, rstd))
    }

    fn qkv_prepare(
        &self,
        mut q: ViewMut,
        mut k: ViewMut,
        mut v: ViewMut,
        mut rstd: Option<ViewMut>,
        qkv: View,
        norm: Option<(View, View, f64)>,
        rope: RopeTable,
        positions: View,
    ) -> Result<()> {
        let call = call("qkv_prepare", qkv).read(qkv).read(positions).rope(rope, positions.numel());
        let call = call.read_some(rstd.as_ref().map(ViewMut::as_view)).write(&q).write(&k).write(&v);
        self.run(call, |o| {
            let rstd = rstd.as_mut().map(ViewMut::reborrow);
            o.qkv_prepare(q.reborrow(), k.reborrow(), v.reborrow(), rstd, qkv, norm, rope, positions)
        })
    }
    fn qkv_prepare_grad_input(
        &self,
        mut dqkv: ViewMut,
        dq: View,
        dk: View,
        dv: View,
        qkv: View,
        norm: Option<(View, View, View)>,
        rope: RopeTable,
        positions: View,
    ) -> Result<()> {
        let call = call("qkv_prepare_grad_input", qkv).read(dq).read(dk).read(dv).rope(rope, positions.numel());
        // Without norms it is a rotation, which needs no input; with them it needs q and k of it.
        let call = if norm.is_some() { call.read(dq).read(dk) } else { call };
        let call = call.read_some(norm.map(|n| n.2)).read(positions).write(&dqkv);
        self.run(call, |o| o.qkv_prepare_grad_input(dqkv.reborrow(), dq, dk, dv, qkv, norm, rope, positions))
    }
    fn qk_norm_grad_weight(
        &self,
        mut dwq: ViewMut,
        mut dwk: ViewMut,
        dq: View,
        dk: View,
        qkv: View,
        rstd: View,
        rope: RopeTable,
        positions: View,
    ) -> Result<()> {
        // q and k of `qkv` are as large as their gradients.
        let call = call("qk_norm_grad_weight", qkv).read(dq).read(dk).read(dq).read(dk).read(rstd).read(positions);
        let call = call.rope(rope, positions.numel()).update(&dwq).update(&dwk);
        self.run(call, |o| o.qk_norm_grad_weight(dwq.reborrow(), dwk.reborrow(), dq, dk, qkv, rstd, rope, positions))
    }

    fn prepare_attention(&self, sizes: &[AttentionSizes]) {
        self.inner.prepare_attention(sizes);
    }
    fn attention(&self, mut o: ViewMut, mut lse: ViewMut, q: View, k: View, v: View, seqs: PackedSeqs, scale: f64) -> Result<()> {
        let call = cost::attention("attention", q, k, seqs, 2.0).read(q).read(k).read(v).write(&o).write(&lse);
        self.run(call, |ops| ops.attention(o.reborrow(), lse.reborrow(), q, k, v, seqs, scale))
    }
    fn attention_grad(
        &self,
        mut dq: ViewMut,
        mut dk: ViewMut,
        mut dv: ViewMut,
        dout: View,
        o: View,
        lse: View,
        q: View,
        k: View,
        v: View,
        seqs: PackedSeqs,
        scale: f64,
    ) -> Result<()> {
        let call = cost::attention("attention_grad", q, k, seqs, 5.0).read(dout).read(o).read(lse).read(q).read(k).read(v);
        let call = call.write(&dq).write(&dk).write(&dv);
        self.run(call, |ops| ops.attention_grad(dq.reborrow(), dk.reborrow(), dv.reborrow(), dout, o, lse, q, k, v, seqs, scale))
    }
    fn kv_cache_write(&self, mut cache_k: ViewMut, mut cache_v: ViewMut, k: View, v: View, slots: View) -> Result<()> {
        let call = call("kv_cache_write", k).read(k).read(v).read(k).read(v).read(slots);
        self.run(call, |o| o.kv_cache_write(cache_k.reborrow(), cache_v.reborrow(), k, v, slots))
    }
    fn paged_attention(&self, mut o: ViewMut, q: View, cache_k: View, cache_v: View, seqs: PagedSeqs, scale: f64) -> Result<()> {
        // How much of the cache is read is known on the device only.
        let call = call("paged_attention", q).read(q).write(&o);
        self.run(call, |ops| ops.paged_attention(o.reborrow(), q, cache_k, cache_v, seqs, scale))
    }

    fn swiglu(&self, mut y: ViewMut, gate_up: View) -> Result<()> {
        self.run(call("swiglu", gate_up).read(gate_up).write(&y), |o| o.swiglu(y.reborrow(), gate_up))
    }
    fn swiglu_grad(&self, mut dgate_up: ViewMut, dy: View, gate_up: View) -> Result<()> {
        let call = call("swiglu_grad", gate_up).read(gate_up).read(dy).write(&dgate_up);
        self.run(call, |o| o.swiglu_grad(dgate_up.reborrow(), dy, gate_up))
    }

    fn router(&self, mut probs: ViewMut, mut experts: ViewMut, mut weights: ViewMut, logits: View, normalise: bool) -> Result<()> {
        let call = call("router", logits).read(logits).write(&probs).write(&experts).write(&weights);
        self.run(call, |o| o.router(probs.reborrow(), experts.reborrow(), weights.reborrow(), logits, normalise))
    }
    fn router_stats(
        &self,
        mut counts: ViewMut,
        mut prob_sums: ViewMut,
        mut z_sum: ViewMut,
        probs: View,
        experts: View,
        logits: View,
    ) -> Result<()> {
        let call = call("router_stats", probs).read(probs).read(experts).read(logits).update(&counts).update(&prob_sums).update(&z_sum);
        self.run(call, |o| o.router_stats(counts.reborrow(), prob_sums.reborrow(), z_sum.reborrow(), probs, experts, logits))
    }
    fn balance_loss(
        &self,
        mut loss: ViewMut,
        mut grad: ViewMut,
        counts: View,
        prob_sums: View,
        tokens: usize,
        top_k: usize,
        kind: Balance,
        coef: f64,
    ) -> Result<()> {
        let call = call("balance_loss", counts).read(counts).read(prob_sums).write(&loss).write(&grad);
        self.run(call, |o| o.balance_loss(loss.reborrow(), grad.reborrow(), counts, prob_sums, tokens, top_k, kind, coef))
    }
    fn router_grad(
        &self,
        mut dlogits: ViewMut,
        dweights: View,
        probs: View,
        experts: View,
        weights: View,
        logits: View,
        extra: RouterGrad,
    ) -> Result<()> {
        let call = call("router_grad", probs).read(dweights).read(probs).read(experts).read(weights).write(&dlogits);
        self.run(call, |o| o.router_grad(dlogits.reborrow(), dweights, probs, experts, weights, logits, extra))
    }
    fn moe_sort(&self, mut offsets: ViewMut, mut place: ViewMut, experts: View, first: usize) -> Result<()> {
        let call = call("moe_sort", experts).read(experts).write(&offsets).write(&place);
        self.run(call, |o| o.moe_sort(offsets.reborrow(), place.reborrow(), experts, first))
    }
    fn moe_ranks(&self, mut ranks: ViewMut, mut rows: ViewMut, experts: View, per_rank: usize, slices: usize) -> Result<()> {
        let call = call("moe_ranks", experts).read(experts).write(&ranks).write(&rows);
        self.run(call, |o| o.moe_ranks(ranks.reborrow(), rows.reborrow(), experts, per_rank, slices))
    }
    fn moe_gather(&self, mut out: ViewMut, x: View, place: View) -> Result<()> {
        let call = call("moe_gather", out.as_view()).read(x).read(place).write(&out);
        self.run(call, |o| o.moe_gather(out.reborrow(), x, place))
    }
    fn moe_combine(&self, mut out: ViewMut, y: View, weights: Option<View>, place: View) -> Result<()> {
        let call = call("moe_combine", y).read(y).read_some(weights).read(place).write(&out);
        let call = if weights.is_some() { call.form("weighted") } else { call };
        self.run(call, |o| o.moe_combine(out.reborrow(), y, weights, place))
    }
    fn moe_act_grad(
        &self,
        mut dgate_up: ViewMut,
        mut act: ViewMut,
        mut dweights: ViewMut,
        dact: View,
        gate_up: View,
        weights: View,
        place: View,
    ) -> Result<()> {
        let call = call("moe_act_grad", dact).read(dact).read(gate_up).read(weights).read(place);
        let call = call.write(&dgate_up).write(&act).write(&dweights);
        self.run(call, |o| o.moe_act_grad(dgate_up.reborrow(), act.reborrow(), dweights.reborrow(), dact, gate_up, weights, place))
    }

    fn cross_entropy(&self, mut losses: ViewMut, mut logits: ViewMut, targets: View, grad_weights: Option<View>) -> Result<()> {
        let call = call("cross_entropy", logits.as_view()).read(targets).read_some(grad_weights).write(&losses);
        let call = if grad_weights.is_some() { call.form("and grad").update(&logits) } else { call.read(logits.as_view()) };
        self.run(call, |o| o.cross_entropy(losses.reborrow(), logits.reborrow(), targets, grad_weights))
    }

    fn vocab_stats(&self, mut stats: ViewMut, logits: View, targets: View, first: usize) -> Result<()> {
        let call = call("vocab_stats", logits).read(logits).read(targets).write(&stats);
        self.run(call, |o| o.vocab_stats(stats.reborrow(), logits, targets, first))
    }
    fn cross_entropy_divided(
        &self,
        mut losses: ViewMut,
        mut logits: ViewMut,
        targets: View,
        first: usize,
        stats: View,
        grad_weights: Option<View>,
    ) -> Result<()> {
        let call = call("cross_entropy_divided", logits.as_view()).read(targets).read(stats).read_some(grad_weights).write(&losses);
        let call = if grad_weights.is_some() { call.form("and grad").update(&logits) } else { call.read(logits.as_view()) };
        self.run(call, |o| o.cross_entropy_divided(losses.reborrow(), logits.reborrow(), targets, first, stats, grad_weights))
    }

    fn sum_squares(&self, mut out: ViewMut, x: View) -> Result<()> {
        self.run(call("sum_squares", x).read(x).update(&out), |o| o.sum_squares(out.reborrow(), x))
    }
    fn count_non_finite(&self, mut out: ViewMut, x: View) -> Result<()> {
        self.run(call("count_non_finite", x).read(x).update(&out), |o| o.count_non_finite(out.reborrow(), x))
    }
    fn clip_factor(&self, mut factor: ViewMut, squares: View, guard: View, limit: f64) -> Result<()> {
        let call = call("clip_factor", squares).read(squares).read(guard).write(&factor);
        self.run(call, |o| o.clip_factor(factor.reborrow(), squares, guard, limit))
    }
    fn adamw(&self, state: AdamWState, grad: View, clip: View, step: AdamW) -> Result<()> {
        let AdamWState { mut weight, mut remainder, mut m, mut v } = state;
        let call = call("adamw", weight.as_view()).read(grad).read(clip).update(&weight).update(&m).update(&v);
        let call = remainder.iter().fold(call, Call::update);
        self.run(call, |o| {
            let remainder = remainder.as_mut().map(ViewMut::reborrow);
            o.adamw(AdamWState { weight: weight.reborrow(), remainder, m: m.reborrow(), v: v.reborrow() }, grad, clip, step)
        })
    }
    fn master_split(&self, mut weight: ViewMut, mut remainder: ViewMut, values: View) -> Result<()> {
        let call = call("master_split", values).read(values).write(&weight).write(&remainder);
        self.run(call, |o| o.master_split(weight.reborrow(), remainder.reborrow(), values))
    }
    fn master_join(&self, mut values: ViewMut, weight: View, remainder: View) -> Result<()> {
        let call = call("master_join", weight).read(weight).read(remainder).write(&values);
        self.run(call, |o| o.master_join(values.reborrow(), weight, remainder))
    }

    fn account(&self, purpose: Purpose) -> Purpose {
        self.inner.account(purpose)
    }
    fn memory(&self) -> Option<MemoryUse> {
        self.inner.memory()
    }
    fn reset_memory_peak(&self) {
        self.inner.reset_memory_peak();
    }
    fn stamp(&self) -> Result<Box<dyn Stamp>> {
        self.inner.stamp()
    }
    fn phase(&self, phase: Phase) -> Result<()> {
        self.note_phase(phase)
    }
    fn wait(&self) -> Result<()> {
        self.inner.wait()
    }
}
