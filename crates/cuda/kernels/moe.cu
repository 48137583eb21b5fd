// Moving rows between tokens and experts. Legend as in ops.rs: T tokens, K experts a token, S = T*K.
#include "common.cuh"
#define COLS(c) for (int c = threadIdx.x * V; c < H; c += blockDim.x * V)
struct alignas(V * sizeof(T)) Access { T x[V]; };

// place[source[s]] = s.
KERNEL moe_places(int* place, const int* source, int rows) {
  const int s = blockIdx.x * blockDim.x + threadIdx.x;
  if (s < rows) place[source[s]] = s;
}
// out[place[t, k]] = x[t] for each k, rows of `row` accesses. Going by tokens reads x once; by the rows of `out`, x would be pushed
// out of the cache by what is written, and read K times. A thread holds up to HELD accesses of x, and lane k of each warp place[t, k].
#define HELD 2
KERNEL moe_gather(Access* __restrict__ out, const Access* __restrict__ x, const int* __restrict__ place, int K, int row) {
  const i64 t = blockIdx.x;
  for (int base = threadIdx.x; base - threadIdx.x < row; base += HELD * blockDim.x) {  // whole warps go round equally often
    Access r[HELD];
#pragma unroll
    for (int u = 0; u < HELD; u++) if (base + u * blockDim.x < row) r[u] = x[t * row + base + u * blockDim.x];
    for (int first = 0; first < K; first += 32) {
      const int lane = first + threadIdx.x % 32, mine = lane < K ? place[t * K + lane] : 0;
      for (int k = 0; k < min(32, K - first); k++) {
        Access* to = out + (i64)__shfl_sync(~0u, mine, k) * row;
#pragma unroll
        for (int u = 0; u < HELD; u++) if (base + u * blockDim.x < row) to[base + u * blockDim.x] = r[u];
      }
    }
  }
}
// out[t] = sum_k weights[t, k] * y[place[t, k]]; weights null: 1.
KERNEL moe_combine(T* out, const T* y, const float* weights, const int* place, int K, int H) {
  const i64 t = blockIdx.x;
  COLS(c) {
    float acc[V];
#pragma unroll
    for (int j = 0; j < V; j++) acc[j] = 0;
    for (int k = 0; k < K; k++) {
      const float w = weights ? weights[t * K + k] : 1.f;
      float r[V];
      load(y + (i64)place[t * K + k] * H + c, r);
#pragma unroll
      for (int j = 0; j < V; j++) acc[j] += w * r[j];
    }
    store(out + t * H + c, acc);
  }
}
// dy[place[t, k]] = weights[t, k] * dout[t], dweights[t, k] = <y[place[t, k]], dout[t]>. One block a token.
KERNEL moe_combine_grad(T* dy, float* dweights, const T* dout, const T* y, const float* weights, const int* place, int K, int H) {
  __shared__ float buffer[32];
  const i64 t = blockIdx.x;
  for (int k = 0; k < K; k++) {
    const i64 p = place[t * K + k];
    const float w = weights[t * K + k];
    float s = 0;
    COLS(c) {
      float d[V], r[V];
      load(dout + t * H + c, d); load(y + p * H + c, r);
#pragma unroll
      for (int j = 0; j < V; j++) { s += d[j] * r[j]; d[j] *= w; }
      store(dy + p * H + c, d);
    }
    s = block_sum(s, buffer);
    if (threadIdx.x == 0) dweights[t * K + k] = s;
  }
}
