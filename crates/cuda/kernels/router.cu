// The router of a mixture of experts, in f32. One warp a token; lane l holds experts l, l + 32, ... (PER of them).
#include "common.cuh"
#define ALL(i) _Pragma("unroll") for (int i = 0; i < PER; i++)
#define TOKEN() const i64 t = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; const int lane = threadIdx.x % 32; if (t >= tokens) return

template <int PER> DI void load_row(float (&x)[PER], const float* row, int E, float fill) {
  const int lane = threadIdx.x % 32;
  ALL(i) { const int e = lane + 32 * i; x[i] = e < E ? row[e] : fill; }
}
// Largest of a row and sum of exp(x - largest).
template <int PER> DI void softmax_stats(const float (&x)[PER], float& m, float& s) {
  m = -INF; s = 0;
  ALL(i) m = fmaxf(m, x[i]);
  m = warp_max(m);
  ALL(i) s += expf(x[i] - m);
  s = warp_sum(s);
}

// Softmax, and the K largest in descending order; of equals the lower expert comes first.
template <int PER> DI void route(float* probs, int* experts, float* weights, const float* logits, i64 tokens, int E, int K, int normalise) {
  TOKEN();
  float x[PER], m, s;
  load_row(x, logits + t * E, E, -INF);
  softmax_stats(x, m, s);
  ALL(i) {
    x[i] = expf(x[i] - m) / s;
    const int e = lane + 32 * i;
    if (e < E) probs[t * E + e] = x[i];
    // NaN ranks below every number, so that even then K different experts are named.
    x[i] = e >= E ? -3.f : x[i] != x[i] ? -1.f : x[i];
  }
  float sum = 0, mine = 0;
  for (int k = 0; k < K; k++) {
    float best = -4; int at = 1 << 30;
    ALL(i) if (x[i] > best) { best = x[i]; at = lane + 32 * i; }
    for (int o = 16; o > 0; o /= 2) {
      const float b = __shfl_xor_sync(~0u, best, o); const int a = __shfl_xor_sync(~0u, at, o);
      if (b > best || (b == best && a < at)) { best = b; at = a; }
    }
    ALL(i) if (lane + 32 * i == at) x[i] = -2;
    const float p = best < 0 ? NAN_F : best;
    sum += p;
    if (lane == k) mine = p;
    if (lane == 0) experts[t * K + k] = at;
  }
  if (lane < K) weights[t * K + lane] = normalise ? mine / sum : mine;
}

// dlogits = p * (dp - sum p dp) + 2 z / tokens * lse * p, where dp comes from the K weights and the balancing loss.
template <int PER> DI void route_grad(float* dlogits, const float* dweights, const float* probs, const int* experts, const float* weights,
                                      const float* logits, const float* balance, i64 tokens, int E, int K, float z, int normalised) {
  TOKEN();
  float p[PER], dp[PER];
  load_row(p, probs + t * E, E, 0.f);
  ALL(i) { const int e = lane + 32 * i; dp[i] = balance && e < E ? balance[e] : 0.f; }
  float dw = 0, w = 0, picked = 0;
  int mine = -1;
  if (lane < K) {
    dw = dweights[t * K + lane]; w = weights[t * K + lane]; mine = experts[t * K + lane];
    picked = probs[t * E + mine];
  }
  if (normalised) dw = (dw - warp_sum(dw * w)) / warp_sum(picked);  // w = p / sum(p)
  for (int k = 0; k < K; k++) {
    const int e = __shfl_sync(~0u, mine, k);
    const float g = __shfl_sync(~0u, dw, k);
    ALL(i) if (lane + 32 * i == e) dp[i] += g;
  }
  float dot = 0;
  ALL(i) dot += p[i] * dp[i];
  dot = warp_sum(dot);
  float zl = 0;
  if (z != 0.f) {
    float x[PER], m, s;
    load_row(x, logits + t * E, E, -INF);
    softmax_stats(x, m, s);
    zl = 2.f * z / tokens * (m + logf(s));
  }
  ALL(i) { const int e = lane + 32 * i; if (e < E) dlogits[t * E + e] = p[i] * (dp[i] - dot + zl); }
}

// partial[block] = sum over its tokens of logsumexp(logits)^2.
template <int PER> DI void z_sum(float* partial, const float* logits, i64 tokens, int per_block, int E) {
  __shared__ float buffer[32];
  const i64 first = (i64)blockIdx.x * per_block, end = first + per_block < tokens ? first + per_block : tokens;
  float total = 0;
  for (i64 t = first + threadIdx.x / 32; t < end; t += blockDim.x / 32) {
    float x[PER], m, s;
    load_row(x, logits + t * E, E, -INF);
    softmax_stats(x, m, s);
    const float lse = m + logf(s);
    if (threadIdx.x % 32 == 0) total += lse * lse;
  }
  total = block_sum(total, buffer);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}
#define SIZE(P) \
  KERNEL router_##P(float* probs, int* experts, float* weights, const float* logits, i64 tokens, int E, int K, int normalise) { \
    route<P>(probs, experts, weights, logits, tokens, E, K, normalise); } \
  KERNEL router_grad_##P(float* dlogits, const float* dweights, const float* probs, const int* experts, const float* weights, \
                         const float* logits, const float* balance, i64 tokens, int E, int K, float z, int normalised) { \
    route_grad<P>(dlogits, dweights, probs, experts, weights, logits, balance, tokens, E, K, z, normalised); } \
  KERNEL router_z_##P(float* partial, const float* logits, i64 tokens, int per_block, int E) { z_sum<P>(partial, logits, tokens, per_block, E); }
SIZE(1) SIZE(2) SIZE(4) SIZE(8) SIZE(16)

// Rows per expert; integer atomics, so the order does not matter. Dynamic shared memory: E ints.
KERNEL router_counts(int* counts, const int* experts, i64 rows, int E) {
  extern __shared__ int c[];
  for (int e = threadIdx.x; e < E; e += blockDim.x) c[e] = 0;
  __syncthreads();
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < rows; i += (i64)gridDim.x * blockDim.x) {
    const int e = experts[i];
    if (e >= 0 && e < E) atomicAdd(&c[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += blockDim.x) if (c[e]) atomicAdd(&counts[e], c[e]);
}
KERNEL add_counts(float* out, const int* counts, int E) {
  const int e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e < E) out[e] += counts[e];
}

// Balancing loss and its gradient from counts[L, E] and prob_sums[L, E]; one block (docs/NUMERICS.md).
//   hf:       n = L * tokens, loss = E * sum_e (sum_l counts / n) (sum_l probs / n)
//   megatron: loss = sum_l E / (K tokens^2) sum_e counts probs
KERNEL balance_loss(float* loss, float* grad, const float* counts, const float* probs, int L, int E, float tokens, int K, int megatron, float coef) {
  __shared__ float buffer[32];
  float total = 0;
  for (int e = threadIdx.x; e < E; e += blockDim.x) {
    float c = 0, p = 0;
    for (int l = 0; l < L; l++) { c += counts[l * E + e]; p += probs[l * E + e]; }
    const float n = L * tokens;
    if (!megatron) total += E * (c / n) * (p / n);
    for (int l = 0; l < L; l++) {
      const float own = counts[l * E + e], k = E / (K * tokens * tokens);
      if (megatron) total += k * own * probs[l * E + e];
      grad[l * E + e] = coef * (megatron ? k * own : E * (c / n) / n);
    }
  }
  total = block_sum(total, buffer);
  if (threadIdx.x == 0) loss[0] = total;
}
