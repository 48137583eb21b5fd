// Cross-entropy of logits[N, C] against targets[N]; one block a row.
//   losses[n] = logsumexp(logits[n]) - logits[n, target], 0 where the target is -100, NaN where it is outside the classes;
//   with `weights`, logits are replaced by weights[n] * (softmax - onehot).
#include "common.cuh"
#define IGNORE -100
#define COLS(c) for (i64 c = threadIdx.x * V; c < C; c += blockDim.x * V)

// The block's row of C values: the largest, and the sum of exp(x - largest).
DI void row_mass(const T* row, i64 C, float* buffer, float& top, float& sum) {
  float r[V], m = -INF, s = 0;
  COLS(c) {
    load(row + c, r);
    float most = r[0];
#pragma unroll
    for (int j = 1; j < V; j++) most = fmaxf(most, r[j]);
    if (most > m) { s *= __expf(m - most); m = most; }
    if (m > -INF) {
#pragma unroll
      for (int j = 0; j < V; j++) s += __expf(r[j] - m);
    }
  }
  top = block_max(m, buffer);
  sum = block_sum(m > -INF ? s * __expf(m - top) : s, buffer);
}

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
  float top, s;
  row_mass(row, C, buffer, top, s);
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

#if __CUDA_ARCH__ >= 900
// The same with gradient, reading the logits once: a cluster of SHARE blocks holds a row in its shared memory. Block r of the
// cluster takes the columns r * part .. (r + 1) * part; a thread reads back only what it held itself. Dynamic shared memory: part
// elements.
#define SHARE 8
#define FLIGHT 4  // loads of a thread in flight
#define LOG2E 1.4426950408889634f
DI float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
struct alignas(V * sizeof(T)) Access { T x[V]; };
DI void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
// A float of the same place in the shared memory of block `rank` of the cluster.
DI float remote(const float* p, int rank) {
  u32 at; float x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
KERNEL __cluster_dims__(SHARE, 1, 1) __launch_bounds__(256) cross_entropy_cluster(float* losses, T* logits, const int* targets, const float* weights, i64 C, i64 part) {
  extern __shared__ Access held[];
  __shared__ float buffer[32], mine[2];
  const i64 n = blockIdx.x / SHARE, first = blockIdx.x % SHARE * part;
  const int rank = blockIdx.x % SHARE, target = targets[n];
  const int count = C > first ? (int)((C - first < part ? C - first : part) / V) : 0;  // accesses of this block
  Access* row = (Access*)(logits + n * C + first);
  if (target == IGNORE) {
    for (int i = threadIdx.x; i < count; i += 256) row[i] = Access{};
    if (rank == 0 && threadIdx.x == 0) losses[n] = 0;
    return;
  }
  const i64 own = target - first;  // the target's place in this block's columns
  const bool here = target >= 0 && own >= 0 && own < (i64)count * V;
  const float picked = here ? to_f32(((T*)row)[own]) : 0.f;
  float m = -INF, s = 0;
  for (int base = threadIdx.x; base < count; base += 256 * FLIGHT) {
    Access x[FLIGHT];
#pragma unroll
    for (int u = 0; u < FLIGHT; u++) if (base + 256 * u < count) x[u] = row[base + 256 * u];
#pragma unroll
    for (int u = 0; u < FLIGHT; u++) {
      if (base + 256 * u >= count) break;
      held[base + 256 * u] = x[u];
      float top = to_f32(x[u].x[0]);
#pragma unroll
      for (int j = 1; j < V; j++) top = fmaxf(top, to_f32(x[u].x[j]));
      if (top > m) { s *= exp2_of((m - top) * LOG2E); m = top; }
      if (m > -INF) {
#pragma unroll
        for (int j = 0; j < V; j++) s += exp2_of(to_f32(x[u].x[j]) * LOG2E - m * LOG2E);
      }
    }
  }
  const float top = block_max(m, buffer);
  s = block_sum(m > -INF ? s * __expf(m - top) : s, buffer);
  if (threadIdx.x == 0) { mine[0] = top; mine[1] = s; }
  cluster_sync();
  float all = -INF, sum = 0;
  for (int r = 0; r < SHARE; r++) all = fmaxf(all, remote(mine, r));
  for (int r = 0; r < SHARE; r++) {
    const float t = remote(mine, r), x = remote(mine + 1, r);
    sum += t > -INF ? x * __expf(t - all) : x;
  }
  cluster_sync();  // nobody leaves before all have read
  const float lse = all + logf(sum), w = weights[n];
  const bool valid = target >= 0 && target < C;
  if (threadIdx.x == 0 && (here || (!valid && rank == 0))) losses[n] = valid ? lse - picked : NAN_F;
  for (int i = threadIdx.x; i < count; i += 256) {
    const Access x = held[i];
    float r[V];
#pragma unroll
    for (int j = 0; j < V; j++) r[j] = w * exp2_of(to_f32(x.x[j]) * LOG2E - lse * LOG2E);
    if (here && i == own / V) {
#pragma unroll
      for (int j = 0; j < V; j++) if (j == own % V) r[j] -= w;
    }
    store((T*)(row + i), r);
  }
}
#endif

// Of a vocabulary divided over ranks, the classes `first .. first + C` being here: stats[n] = {largest, sum of exp(x - largest), the
// target's logit or 0}. One block a row.
KERNEL vocab_stats(float* stats, const T* logits, const int* targets, i64 C, i64 first) {
  __shared__ float buffer[32];
  const i64 n = blockIdx.x, own = targets[n] - first;
  const T* row = logits + n * C;
  float top, s;
  row_mass(row, C, buffer, top, s);
  if (threadIdx.x == 0) {
    stats[n * 3] = top;
    stats[n * 3 + 1] = s;
    stats[n * 3 + 2] = own >= 0 && own < C ? to_f32(row[own]) : 0.f;
  }
}

// Loss and gradient of the classes here from the stats[P, N, 3] of all P ranks. One block a row.
KERNEL cross_entropy_divided(float* losses, T* logits, const int* targets, const float* stats, const float* weights, i64 C, i64 first, i64 P) {
  const i64 n = blockIdx.x, N = gridDim.x, own = targets[n] - first;
  T* row = logits + n * C;
  float r[V];
  if (targets[n] == IGNORE) {
    if (threadIdx.x == 0) losses[n] = 0;
    if (weights) {
#pragma unroll
      for (int j = 0; j < V; j++) r[j] = 0;
      COLS(c) store(row + c, r);
    }
    return;
  }
  float top = -INF, sum = 0, picked = 0;
  for (i64 p = 0; p < P; p++) top = fmaxf(top, stats[(p * N + n) * 3]);
  for (i64 p = 0; p < P; p++) {
    const float* x = stats + (p * N + n) * 3;
    sum += x[0] > -INF ? x[1] * __expf(x[0] - top) : x[1];
    picked += x[2];
  }
  const float lse = top + logf(sum);
  if (threadIdx.x == 0) losses[n] = lse - picked;
  if (!weights) return;
  const float w = weights[n];
  COLS(c) {
    load(row + c, r);
#pragma unroll
    for (int j = 0; j < V; j++) r[j] = w * (__expf(r[j] - lse) - (c + j == own ? 1.f : 0.f));
    store(row + c, r);
  }
}
