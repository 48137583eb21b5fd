// Cross-entropy of logits[N, C] against targets[N]; one block a row.
//   losses[n] = logsumexp(logits[n]) - logits[n, target], 0 where the target is -100, NaN where it is outside the classes;
//   with `weights`, logits are replaced by weights[n] * (softmax - onehot).
#include "common.cuh"
#define IGNORE -100
#define COLS(c) for (i64 c = threadIdx.x * V; c < C; c += blockDim.x * V)

KERNEL cross_entropy(float* losses, T* logits, const int* targets, const float* weights, i64 C) {
  __shared__ float buffer[32];
  const i64 n = blockIdx.x;
  const int target = targets[n];
  T* row = logits + n * C;
  float r[V];
  if (target == IGNORE) {
    if (threadIdx.x == 0) losses[n] = 0;
    if (weights) {
#pragma unroll
      for (int j = 0; j < V; j++) r[j] = 0;
      COLS(c) store(row + c, r);
    }
    return;
  }
  float m = -INF, s = 0;
  COLS(c) {
    load(row + c, r);
    float top = r[0];
#pragma unroll
    for (int j = 1; j < V; j++) top = fmaxf(top, r[j]);
    if (top > m) { s *= __expf(m - top); m = top; }
    if (m > -INF) {
#pragma unroll
      for (int j = 0; j < V; j++) s += __expf(r[j] - m);
    }
  }
  const float top = block_max(m, buffer);
  s = block_sum(m > -INF ? s * __expf(m - top) : s, buffer);
  const float lse = top + logf(s);
  const bool valid = target >= 0 && target < C;
  if (threadIdx.x == 0) losses[n] = valid ? lse - to_f32(row[target]) : NAN_F;
  if (!weights) return;
  __syncthreads();  // the target's logit has been read
  const float w = weights[n];
  // From the end of the row, which was read last: that much of it is still in the L2 cache.
  const i64 step = (i64)blockDim.x * V, rest = C - (i64)threadIdx.x * V;
  if (rest <= 0) return;
  for (i64 c = threadIdx.x * V + (rest - 1) / step * step; c >= 0; c -= step) {
    load(row + c, r);
#pragma unroll
    for (int j = 0; j < V; j++) r[j] = w * (__expf(r[j] - lse) - (c + j == target ? 1.f : 0.f));
    store(row + c, r);
  }
}
