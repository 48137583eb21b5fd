// Moving rows between tokens and experts. Legend as in ops.rs: T tokens, K experts a token,
// R rows of the experts that are here, N ranks.
#include "common.cuh"
#define COLS(c) for (int c = threadIdx.x * V; c < H; c += blockDim.x * V)
struct alignas(V * sizeof(T)) Access { T x[V]; };

// out[place[t, k]] = x[t] for each k whose place lies below R, rows of `row` accesses. Going by tokens reads x once; by the rows of `out`, x would be pushed
// out of the cache by what is written, and read K times. A thread holds up to HELD accesses of x, and lane k of each warp place[t, k].
#define HELD 2
KERNEL moe_gather(Access* __restrict__ out, const Access* __restrict__ x, const int* __restrict__ place, int K, int row, int R) {
  const i64 t = blockIdx.x;
  for (int base = threadIdx.x; base - threadIdx.x < row; base += HELD * blockDim.x) {  // whole warps go round equally often
    Access r[HELD];
#pragma unroll
    for (int u = 0; u < HELD; u++) if (base + u * blockDim.x < row) r[u] = x[t * row + base + u * blockDim.x];
    for (int first = 0; first < K; first += 32) {
      const int lane = first + threadIdx.x % 32, mine = lane < K ? place[t * K + lane] : 0;
      for (int k = 0; k < min(32, K - first); k++) {
        const int at = __shfl_sync(~0u, mine, k);
        if (at >= R) continue;  // the whole warp
        Access* to = out + (i64)at * row;
#pragma unroll
        for (int u = 0; u < HELD; u++) if (base + u * blockDim.x < row) to[base + u * blockDim.x] = r[u];
      }
    }
  }
}
// out[t] = sum_k weights[t, k] * y[place[t, k]] over places below R; weights null: 1.
KERNEL moe_combine(T* out, const T* y, const float* weights, const int* place, int K, int H, int R) {
  const i64 t = blockIdx.x;
  COLS(c) {
    float acc[V];
#pragma unroll
    for (int j = 0; j < V; j++) acc[j] = 0;
    for (int k = 0; k < K; k++) {
      const int at = place[t * K + k];
      if (at >= R) continue;
      const float w = weights ? weights[t * K + k] : 1.f;
      float r[V];
      load(y + (i64)at * H + c, r);
#pragma unroll
      for (int j = 0; j < V; j++) acc[j] += w * r[j];
    }
    store(out + t * H + c, acc);
  }
}
