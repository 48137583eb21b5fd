//! The contract of a compute backend.
//!
//! Rules for every operation:
//! - The caller supplies the outputs. "overwritten" outputs may hold anything before; outputs marked `+=` accumulate.
//! - Shapes and dtypes are checked at the boundary; a mismatch is an [`Error`](crate::Error), never a panic.
//! - Activations and weights of one call share one dtype `A` (F64, F32, BF16); outputs marked `+=` that are gradients of
//!   weights are of dtype `A` or, beside BF16, F32; statistics have dtype
//!   [`A.stat()`](crate::DType::stat); indices are I32. Accumulation is at least f32, f64 for F64.
//! - No operation reads device memory back to the host, except [`Ops::to_host`].
//! - The result does not depend on the number of threads, and two equal calls give equal bits.
//!
//! Legend: T tokens of the packed batch, H hidden size, V vocabulary, D head size, Nq query heads, Nk key/value
//! heads, I intermediate size, E experts, K experts per token, S = T*K routed rows, B sequences.

use crate::{DType, MemoryUse, Phase, Purpose, Result, Stamp, Tensor, View, ViewMut};

/// How a matrix operand is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trans {
    /// As stored.
    No,
    /// Transposed.
    Yes,
}

/// What happens to the old contents of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beta {
    /// Overwrite.
    Zero,
    /// Accumulate.
    One,
}

/// The three products of a layer of experts. `offsets[e]..offsets[e+1]` are the rows of expert `e`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupedGemm {
    /// `c[S, N] = a[S, M] . b[E, N, M]^T` per expert, overwritten.
    Forward,
    /// `c[S, M] = a[S, N] . b[E, N, M]` per expert, overwritten.
    InputGrad,
    /// `c[E, N, M] = a[S, N]^T . b[S, M]` per expert, overwritten or accumulated; an expert without rows has the product 0.
    WeightGrad(Beta),
}

/// Which load-balancing loss (facts and formulas: docs/NUMERICS.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balance {
    /// Hugging Face `load_balancing_loss_func`: all layers pooled, balanced value K.
    Hf,
    /// Megatron `switch_load_balancing_loss_func`: per layer, summed over layers, balanced value 1 per layer.
    Megatron,
}

/// Rotary tables, each [P, D/2], of the stat dtype: `cos(p * theta^(-2i/D))` and `sin(...)`.
#[derive(Clone, Copy)]
pub struct RopeTable<'a> {
    /// Cosines.
    pub cos: View<'a>,
    /// Sines.
    pub sin: View<'a>,
}

/// The sequences of a packed batch.
#[derive(Clone, Copy)]
pub struct PackedSeqs<'a> {
    /// First row of each sequence in k and v and the end of the last, I32 [B+1], rising from 0 to S = skip + T.
    pub cu: View<'a>,
    /// Length of the longest sequence, which the host knows: plans are chosen by it.
    pub longest: usize,
    /// Leading rows of k and v that have no queries: the queries are those of the rows after them. 0 but where other ranks have them.
    pub skip: usize,
}

/// Sizes of a call of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSizes {
    /// Type of queries, keys and values.
    pub dtype: DType,
    /// Tokens of the packed batch.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Tokens of the longest.
    pub longest: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads.
    pub k_heads: usize,
    /// Head size.
    pub head: usize,
}

/// Where the tokens of a step of generation sit in a paged KV cache.
#[derive(Clone, Copy)]
pub struct PagedSeqs<'a> {
    /// First query row of each sequence, [B+1].
    pub cu_q: View<'a>,
    /// Tokens in the cache of each sequence after this step's were written, `[B]`.
    pub context: View<'a>,
    /// Cache blocks of each sequence in order, [B, max_blocks]; unused entries are -1.
    pub blocks: View<'a>,
}

/// What [`Ops::router_grad`] adds besides the gradient that comes through the weights.
#[derive(Clone, Copy)]
pub struct RouterGrad<'a> {
    /// Constant gradient of the balancing loss with respect to every token's probability of expert e, `[E]`.
    pub balance: Option<View<'a>>,
    /// Coefficient c of the z-loss `c * mean_t(logsumexp(logits_t)^2)`, already multiplied by the loss scale.
    pub z_coef: f64,
    /// Whether the K weights were normalised to sum to one.
    pub normalised: bool,
}

/// Constants of one AdamW step (decoupled decay; Loshchilov and Hutter 2019, as `torch.optim.AdamW`).
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay (0 for parameters that do not decay).
    pub weight_decay: f64,
    /// Number of this step, from 1.
    pub step: u64,
}

/// What one AdamW step changes: a weight and its moments, of one shape.
pub struct AdamWState<'a> {
    /// The weight, of dtype A.
    pub weight: ViewMut<'a>,
    /// With BF16 weights, what makes them exact f32 masters: `bits(master) = (bits(weight) << 16) + remainder`, the remainder a
    /// signed 16-bit number held in the bits of an F16 element, the weight the master rounded to nearest (ties away from zero).
    pub remainder: Option<ViewMut<'a>>,
    /// First moment, of the stat dtype, or BF16.
    pub m: ViewMut<'a>,
    /// Second moment, of the dtype of the first.
    pub v: ViewMut<'a>,
}

/// A compute backend. Object-safe: layers hold `&dyn Ops` and never know which one it is.
pub trait Ops: Send + Sync {
    /// Name for logs, for example `cpu (2 threads)`.
    fn name(&self) -> String;

    /// Whether tensors lie in the memory of a device, apart from the host's.
    fn on_device(&self) -> bool {
        false
    }
    /// Dtypes that weights and activations may have, the preferred one first.
    fn dtypes(&self) -> &'static [DType];

    // ---- memory ----

    /// A tensor with unspecified contents.
    fn alloc(&self, dtype: DType, shape: &[usize]) -> Result<Tensor>;
    /// A tensor of zeros.
    fn zeros(&self, dtype: DType, shape: &[usize]) -> Result<Tensor>;
    /// As [`Ops::zeros`], in host memory that the backend's operations reach: slower, for what is touched once a step.
    fn zeros_on_host(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.zeros(dtype, shape)
    }
    /// A copy of a host view on this backend.
    #[allow(clippy::wrong_self_convention)]
    fn from_host(&self, x: View) -> Result<Tensor>;
    /// A host tensor moved to this backend.
    fn adopt(&self, x: Tensor) -> Result<Tensor> {
        self.from_host(x.view())
    }
    /// A host copy. Waits for the backend.
    fn to_host(&self, x: View) -> Result<Tensor>;

    // ---- element-wise ----

    /// `out = value` everywhere.
    fn fill(&self, out: ViewMut, value: f64) -> Result<()>;
    /// `out = x`, converting between float dtypes (round to nearest even).
    fn copy(&self, out: ViewMut, x: View) -> Result<()>;
    /// `out = a + b`, overwritten.
    fn add(&self, out: ViewMut, a: View, b: View) -> Result<()>;
    /// `out += a`.
    fn add_assign(&self, out: ViewMut, a: View) -> Result<()>;
    /// `out *= factor`.
    fn scale(&self, out: ViewMut, factor: f64) -> Result<()>;

    // ---- linear ----

    /// `c[m, n] = op(a) . op(b)`, overwritten or accumulated. With `Trans::Yes` `a` is stored [k, m] and `b` [n, k].
    ///
    /// Beside a BF16 `b`, `c` may be F32, and so may `a`, of which at least 16 bits of each element then count; a BF16 `c` is rounded once.
    fn gemm(&self, c: ViewMut, a: View, ta: Trans, b: View, tb: Trans, beta: Beta) -> Result<()>;
    /// `y[T, N] += bias[N]` in every row.
    fn add_bias(&self, y: ViewMut, bias: View) -> Result<()>;
    /// `dbias[N] += sum_t dy[t, N]`.
    fn bias_grad(&self, dbias: ViewMut, dy: View) -> Result<()>;
    /// One of the three products of a layer of experts; `offsets` is I32 [E+1].
    fn grouped_gemm(&self, kind: GroupedGemm, c: ViewMut, a: View, b: View, offsets: View) -> Result<()>;

    // ---- embedding ----

    /// `out[T, H] = table[ids[t], :]`.
    fn embedding(&self, out: ViewMut, table: View, ids: View) -> Result<()>;
    /// `dtable[V, H][ids[t], :] += dy[t, :]`, in the order of t.
    fn embedding_grad(&self, dtable: ViewMut, dy: View, ids: View) -> Result<()>;

    // ---- RMSNorm: y = w * x / sqrt(mean(x^2) + eps) ----

    /// `y[N, H]`, `rstd[N]` (stat dtype) from `x[N, H]`, `w[H]`; both overwritten.
    fn rms_norm(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, eps: f64) -> Result<()>;
    /// `sum = a + b`, then `y`, `rstd` of `sum`. All overwritten.
    fn add_rms_norm(&self, sum: ViewMut, y: ViewMut, rstd: ViewMut, a: View, b: View, w: View, eps: f64) -> Result<()>;
    /// `dx = residual? + d(rms_norm)/dx . dy`, overwritten; `residual` has the shape of x.
    fn rms_norm_grad_input(&self, dx: ViewMut, dy: View, x: View, w: View, rstd: View, residual: Option<View>) -> Result<()>;
    /// `dw[H] += sum_n dy * x * rstd`.
    fn rms_norm_grad_weight(&self, dw: ViewMut, dy: View, x: View, rstd: View) -> Result<()>;

    // ---- between the QKV product and attention ----

    /// Splits `qkv[T, (Nq+2Nk)*D]` (all q heads, then k, then v), applies per-head RMSNorm with `norm = (wq[D], wk[D], eps)`
    /// when given, then rotary embedding (halves rotated, as Hugging Face `rotate_half`) at `positions[T]`.
    /// Overwrites `q[T, Nq, D]`, `k[T, Nk, D]`, `v[T, Nk, D]` and, with `norm`, `rstd[T, Nq+Nk]`.
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
    ) -> Result<()>;
    /// Overwrites `dqkv[T, (Nq+2Nk)*D]` from `dq, dk, dv`. With `norm = (wq, wk, rstd)`, through the norm.
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
    ) -> Result<()>;
    /// `dwq[D] += ..., dwk[D] += ...` summed over tokens and heads.
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
    ) -> Result<()>;

    // ---- attention ----

    /// Attention of these sizes, forward and backward, is going to be asked for. A backend that compiles something for it begins now and
    /// does not make the caller wait.
    fn prepare_attention(&self, _sizes: &[AttentionSizes]) {}
    /// Causal attention within each sequence of the packed batch (k and v have S = `seqs.skip` + T rows). `o[T, Nq, D]`, `lse[T, Nq]` (stat dtype, natural log of the
    /// softmax denominator of the scaled scores) overwritten. Query head h reads key head h / (Nq/Nk).
    fn attention(&self, o: ViewMut, lse: ViewMut, q: View, k: View, v: View, seqs: PackedSeqs, scale: f64) -> Result<()>;
    /// Overwrites `dq[T, Nq, D]`, `dk[S, Nk, D]`, `dv[S, Nk, D]`.
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
    ) -> Result<()>;
    /// Writes `k[T, Nk, D]`, `v[T, Nk, D]` to rows `slots[T]` of the caches `[blocks, block_size, Nk, D]` seen as `[blocks*block_size, Nk*D]`.
    fn kv_cache_write(&self, cache_k: ViewMut, cache_v: ViewMut, k: View, v: View, slots: View) -> Result<()>;
    /// Attention of `q[T, Nq, D]` against a paged cache: the queries of a sequence are its last tokens. `o` overwritten.
    fn paged_attention(&self, o: ViewMut, q: View, cache_k: View, cache_v: View, seqs: PagedSeqs, scale: f64) -> Result<()>;

    // ---- SwiGLU: y = silu(gate) * up, gate_up[T, 2I] = [gate | up] ----

    /// `y[T, I]` overwritten.
    fn swiglu(&self, y: ViewMut, gate_up: View) -> Result<()>;
    /// `dgate_up[T, 2I]` overwritten.
    fn swiglu_grad(&self, dgate_up: ViewMut, dy: View, gate_up: View) -> Result<()>;

    // ---- mixture of experts ----

    /// Softmax over `logits[T, E]` (stat dtype) and the K largest (ties: the lower expert first), in descending order.
    /// Overwrites `probs[T, E]`, `experts[T, K]` (I32), `weights[T, K]` (stat dtype; divided by their sum when `normalise`).
    fn router(&self, probs: ViewMut, experts: ViewMut, weights: ViewMut, logits: View, normalise: bool) -> Result<()>;
    /// `counts[E] +=` routed rows per expert, `prob_sums[E] +=` sum over tokens of probs, `z_sum[1] +=` sum over tokens of logsumexp(logits)^2. All stat dtype.
    fn router_stats(&self, counts: ViewMut, prob_sums: ViewMut, z_sum: ViewMut, probs: View, experts: View, logits: View) -> Result<()>;
    /// The balancing loss and its gradient from `counts[L, E]`, `prob_sums[L, E]` over `tokens` tokens a layer.
    /// `loss[1]` overwritten (without coefficient); `grad[L, E]` overwritten with `coef * dloss/dp` (the same for every token).
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
    ) -> Result<()>;
    /// Overwrites `dlogits[T, E]` from `dweights[T, K]`.
    fn router_grad(
        &self,
        dlogits: ViewMut,
        dweights: View,
        probs: View,
        experts: View,
        weights: View,
        logits: View,
        extra: RouterGrad,
    ) -> Result<()>;
    /// Where each of the T*K routed rows lies once those of experts `first..first + E` are sorted by expert, stable in token order:
    /// `place[T, K]`, with `offsets[E+1]` the borders between these experts. Rows of other experts come behind them all, in token
    /// order. All I32, overwritten.
    fn moe_sort(&self, offsets: ViewMut, place: ViewMut, experts: View, first: usize) -> Result<()>;
    /// `ranks[T, N]` and `rows[N]`, both I32, overwritten, where rank r of N holds the `per_rank` experts from `r / slices * per_rank`:
    /// `ranks[t, r]` is r where rank r holds one of the experts of t, else N; `rows[r]` counts the routed rows of its experts.
    fn moe_ranks(&self, ranks: ViewMut, rows: ViewMut, experts: View, per_rank: usize, slices: usize) -> Result<()>;
    /// `out[place[t, k], :] = x[t, :]`, out[R, H]; places at or past R are nowhere, and each row of `out` is the place of one (t, k).
    /// Also for I32.
    fn moe_gather(&self, out: ViewMut, x: View, place: View) -> Result<()>;
    /// `out[T, H] = sum_k weights[t, k] * y[place[t, k], :]` of y[R, H], overwritten; without weights, weights are 1. Places at or
    /// past R are nowhere and add nothing.
    fn moe_combine(&self, out: ViewMut, y: View, weights: Option<View>, place: View) -> Result<()>;
    /// Backward of a weighted SwiGLU, `out = moe_combine(act . W, weights)` with `act = swiglu(gate_up)`, from the gradient that reaches
    /// `act` without the weights, `dact[R, I]`; r is `place[t, k]`. Overwrites `dweights[t, k] = <act[r], dact[r]>` (0 for places that
    /// are nowhere), `act[r] = weights[t, k] * act[r]`, which the gradient of W takes, and `dgate_up[R, 2I]`, of `weights * dact`.
    fn moe_act_grad(
        &self,
        dgate_up: ViewMut,
        act: ViewMut,
        dweights: ViewMut,
        dact: View,
        gate_up: View,
        weights: View,
        place: View,
    ) -> Result<()>;

    // ---- loss ----

    /// Cross-entropy of `logits[N, V]`: `losses[n] = logsumexp(logits[n]) - logits[n, targets[n]]` (stat dtype, overwritten; 0 where the
    /// target is -100). With `grad`, `logits` is replaced by `grad_weights[n] * (softmax - onehot)`, which is 0 where the target is -100.
    fn cross_entropy(&self, losses: ViewMut, logits: ViewMut, targets: View, grad_weights: Option<View>) -> Result<()>;

    /// Of a vocabulary divided over ranks, this rank's classes being `first..first + V`: `stats[N, 3]` (stat dtype, overwritten) of
    /// `logits[N, V]`: the largest, the sum of exp(logit - largest), and the target's logit (0 where another rank has it).
    fn vocab_stats(&self, stats: ViewMut, logits: View, targets: View, first: usize) -> Result<()>;
    /// As [`Ops::cross_entropy`] of this rank's classes, from the [`Ops::vocab_stats`] of all P ranks, `stats[P, N, 3]`.
    fn cross_entropy_divided(
        &self,
        losses: ViewMut,
        logits: ViewMut,
        targets: View,
        first: usize,
        stats: View,
        grad_weights: Option<View>,
    ) -> Result<()>;

    // ---- optimizer ----

    /// `out[0] += sum(x^2)`; `out` is F64 `[1]`, partial sums at least f32.
    fn sum_squares(&self, out: ViewMut, x: View) -> Result<()>;
    /// `out[0] +=` the number of NaN and infinite elements; `out` is I32 `[1]`.
    fn count_non_finite(&self, out: ViewMut, x: View) -> Result<()>;
    /// Gradient clipping without the host: `factor[0] = min(1, limit / (sqrt(squares[0]) + 1e-6))`, as torch's `clip_grad_norm_`;
    /// 1 when `limit` is 0. NaN when `squares` or `guard` (F64 `[1]`) is not finite, which makes [`Ops::adamw`] change nothing.
    /// `factor` is of the stat dtype.
    fn clip_factor(&self, factor: ViewMut, squares: View, guard: View, limit: f64) -> Result<()>;
    /// One AdamW step; the gradient (F32, or of dtype A) is read times `clip[0]` (stat dtype). Nothing changes when `clip[0]` is NaN.
    fn adamw(&self, state: AdamWState, grad: View, clip: View, step: AdamW) -> Result<()>;
    /// Splits F32 `values` into BF16 weights and remainders (see [`AdamWState::remainder`]).
    fn master_split(&self, weight: ViewMut, remainder: ViewMut, values: View) -> Result<()>;
    /// Joins BF16 weights and remainders to F32 `values`.
    fn master_join(&self, values: ViewMut, weight: View, remainder: View) -> Result<()>;

    // ---- observation ----

    /// From here on tensors count as `purpose` (at first: activations). Returns the purpose so far.
    fn account(&self, _purpose: Purpose) -> Purpose {
        Purpose::Activations
    }
    /// Memory by purpose, where the backend keeps account of it.
    fn memory(&self) -> Option<MemoryUse> {
        None
    }
    /// Starts the memory peaks anew.
    fn reset_memory_peak(&self) {}
    /// A mark in the backend's order of work, for timing.
    fn stamp(&self) -> Result<Box<dyn Stamp>> {
        Ok(Box::new(std::time::Instant::now()))
    }
    /// What comes next belongs to this part of a step. Only [`Traced`](crate::Traced) takes note.
    fn phase(&self, _phase: Phase) -> Result<()> {
        Ok(())
    }
    /// Waits until everything enqueued is done.
    fn wait(&self) -> Result<()> {
        Ok(())
    }
}
