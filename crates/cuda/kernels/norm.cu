// RMSNorm: y = w * x * rstd, rstd = 1 / sqrt(mean(x^2) + eps), over rows of H elements. One block a row.
// dx = residual + rstd * (w * dy - x * rstd^2 * mean(w * dy * x));  dw += sum over rows of dy * x * rstd.
#include "common.cuh"
#define COLS(c) for (int c = threadIdx.x * V; c < H; c += blockDim.x * V)

KERNEL rms_norm(T* y, float* rstd, const T* x, const T* w, int H, float eps) {
  __shared__ float buffer[32];
  const i64 row = blockIdx.x;
  x += row * H; y += row * H;
  float s = 0;
  COLS(c) {
    float r[V];
    load(x + c, r);
#pragma unroll
    for (int j = 0; j < V; j++) s += r[j] * r[j];
  }
  const float k = rsqrtf(block_sum(s, buffer) / H + eps);
  if (threadIdx.x == 0) rstd[row] = k;
  COLS(c) {
    float r[V], g[V];
    load(x + c, r); load(w + c, g);
#pragma unroll
    for (int j = 0; j < V; j++) r[j] *= k * g[j];
    store(y + c, r);
  }
}

// The sum is rounded to T first, and the norm is of the rounded sum: the backward pass reads that.
KERNEL add_rms_norm(T* sum, T* y, float* rstd, const T* a, const T* b, const T* w, int H, float eps) {
  __shared__ float buffer[32];
  const i64 row = blockIdx.x;
  a += row * H; b += row * H; sum += row * H; y += row * H;
  float s = 0;
  COLS(c) {
    float r[V], q[V];
    load(a + c, r); load(b + c, q);
#pragma unroll
    for (int j = 0; j < V; j++) {
      r[j] = rounded<T>(r[j] + q[j]);
      s += r[j] * r[j];
    }
    store(sum + c, r);
  }
  const float k = rsqrtf(block_sum(s, buffer) / H + eps);
  if (threadIdx.x == 0) rstd[row] = k;
  COLS(c) {
    float r[V], g[V];
    load(sum + c, r); load(w + c, g);  // each thread reads what it wrote
#pragma unroll
    for (int j = 0; j < V; j++) r[j] *= k * g[j];
    store(y + c, r);
  }
}

KERNEL rms_norm_grad_input(T* dx, const T* dy, const T* x, const T* w, const float* rstd, const T* residual, int H) {
  __shared__ float buffer[32];
  const i64 row = blockIdx.x;
  x += row * H; dy += row * H; dx += row * H;
  const float k = rstd[row];
  float s = 0;
  COLS(c) {
    float r[V], d[V], g[V];
    load(x + c, r); load(dy + c, d); load(w + c, g);
#pragma unroll
    for (int j = 0; j < V; j++) s += r[j] * d[j] * g[j];
  }
  const float m = block_sum(s, buffer) / H * k * k;
  COLS(c) {
    float r[V], d[V], g[V];
    load(x + c, r); load(dy + c, d); load(w + c, g);
#pragma unroll
    for (int j = 0; j < V; j++) r[j] = k * (g[j] * d[j] - r[j] * m);
    if (residual) {
      load(residual + row * H + c, d);
#pragma unroll
      for (int j = 0; j < V; j++) r[j] += d[j];
    }
    store(dx + c, r);
  }
}

// ---- sums over rows ----
// out[c] += sum over rows of f(row, c); `out` is f32 or bf16. A block has 32 lanes of V columns and 8 row lanes, and takes a chunk of rows:
// partial[chunk, c]. The last block of its columns adds the chunks up, in their order.
#define COLUMN_BLOCKS 8192        // also in src/ops/reduce.rs
__device__ u32 arrived[COLUMN_BLOCKS];
template <class F> DI void column_sum(void* out, int out_f32, float* partial, i64 rows, int per_chunk, int H, F f) {
  __shared__ float s[8][32 * V + 1];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int c = (blockIdx.x * 32 + lane) * V;
  const i64 first = (i64)blockIdx.y * per_chunk, end = first + per_chunk < rows ? first + per_chunk : rows;
  float acc[V];
  EACH(j, V) acc[j] = 0;
  if (c < H)
#pragma unroll 4
    for (i64 row = first + part; row < end; row += 8) f(acc, row, c);
  EACH(j, V) s[part][lane * V + j] = acc[j];
  __syncthreads();
  const int i = threadIdx.x, col = blockIdx.x * 32 * V + i;
  const bool mine = i < 32 * V && col < H;
  if (mine) {
    float t = 0;
    EACH(p, 8) t += s[p][i];
    partial[(i64)blockIdx.y * H + col] = t;
  }
  if (!last_block(arrived + blockIdx.x, gridDim.y) || !mine) return;
  float t = 0;
#pragma unroll 8
  for (int p = 0; p < gridDim.y; p++) t += __ldcg(partial + (i64)p * H + col);
  add_to(out, out_f32, col, t);
}
KERNEL norm_weight(void* dw, int dw_f32, float* partial, const T* __restrict__ dy, const T* __restrict__ x, const float* __restrict__ rstd,
                   i64 rows, int per_chunk, int H) {
  column_sum(dw, dw_f32, partial, rows, per_chunk, H, [=](float (&acc)[V], i64 row, int c) {
    float d[V], r[V];
    load(dy + row * H + c, d); load(x + row * H + c, r);
    const float k = rstd[row];
    EACH(j, V) acc[j] += d[j] * r[j] * k;
  });
}
KERNEL column_sums(void* out, int out_f32, float* partial, const T* __restrict__ dy, i64 rows, int per_chunk, int H) {
  column_sum(out, out_f32, partial, rows, per_chunk, H, [=](float (&acc)[V], i64 row, int c) {
    float d[V];
    load(dy + row * H + c, d);
    EACH(j, V) acc[j] += d[j];
  });
}
