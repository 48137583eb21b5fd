// Generation: a paged KV cache and attention against it. D (head size) <= 256.
#include "common.cuh"

// Row slots[t] of the caches takes k[t], v[t]; a negative slot is skipped. One block a token.
KERNEL kv_cache_write(T* cache_k, T* cache_v, const T* k, const T* v, const int* slots, int width) {
  const i64 t = blockIdx.x, slot = slots[t];
  if (slot < 0) return;
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    cache_k[slot * width + c] = k[t * width + c];
    cache_v[slot * width + c] = v[t * width + c];
  }
}

// One block of 4 warps a (query row, query head). Warp w takes keys w, w + 4, ...; lane l holds elements l, l + 32, ...
#define PER 8
KERNEL paged_attention(T* o, const T* q, const T* cache_k, const T* cache_v, const int* cu_q, const int* context,
                       const int* blocks, int sequences, int max_blocks, int block_size, int Nq, int Nk, int d, float scale) {
  __shared__ float top[4], sum[4], acc[4][32 * PER];
  const int t = blockIdx.x, h = blockIdx.y, kv = h / (Nq / Nk), lane = threadIdx.x % 32, w = threadIdx.x / 32;
  const int b = sequence_of(cu_q, sequences, t);
  const int keys = context[b] - (cu_q[b + 1] - cu_q[b]) + (t - cu_q[b]) + 1;
  float x[PER], a[PER], m = -INF, l = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int c = lane + 32 * i;
    x[i] = c < d ? to_f32(q[((i64)t * Nq + h) * d + c]) * scale : 0.f;
    a[i] = 0;
  }
  for (int j = w; j < keys; j += 4) {
    const i64 row = (i64)blocks[(i64)b * max_blocks + j / block_size] * block_size + j % block_size;
    const T* kr = cache_k + (row * Nk + kv) * d;
    const T* vr = cache_v + (row * Nk + kv) * d;
    float s = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) { const int c = lane + 32 * i; if (c < d) s += x[i] * to_f32(kr[c]); }
    s = warp_sum(s);
    const float n = fmaxf(m, s), old = expf(m - n), p = expf(s - n);
    m = n; l = l * old + p;
#pragma unroll
    for (int i = 0; i < PER; i++) { const int c = lane + 32 * i; if (c < d) a[i] = a[i] * old + p * to_f32(vr[c]); }
  }
  if (lane == 0) { top[w] = m; sum[w] = l; }
#pragma unroll
  for (int i = 0; i < PER; i++) acc[w][lane + 32 * i] = a[i];
  __syncthreads();
  float n = -INF, total = 0;
  for (int k = 0; k < 4; k++) n = fmaxf(n, top[k]);
  for (int k = 0; k < 4; k++) if (sum[k] > 0) total += sum[k] * expf(top[k] - n);
  for (int c = threadIdx.x; c < d; c += 128) {
    float r = 0;
    for (int k = 0; k < 4; k++) if (sum[k] > 0) r += acc[k][c] * expf(top[k] - n);
    o[((i64)t * Nq + h) * d + c] = from_f32<T>(r / total);
  }
}
