// Sums over all elements: partial results of blocks, then their sum in the order of the blocks.
#include "common.cuh"

// Sum over a block in f64, for thread 0.
DI double warp_sum_wide(double x) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
DI double block_sum_wide(double x) {
  __shared__ double warps[32];
  x = warp_sum_wide(x);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  return threadIdx.x < 32 ? warp_sum_wide(threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0) : 0;
}

// partial[block] = sum of squares of f32 or bf16, in steps of FLIGHT accesses of 16 bytes a thread, neighbouring threads side by side.
// Short sums in f32, then f64: products of 32 elements lose nothing that matters, and f64 units stay idle.
#define FLIGHT 4
template <class X> DI void squares(double* partial, const X* x, i64 n) {
  constexpr int W = 16 / sizeof(X);
  const i64 step = (i64)gridDim.x * blockDim.x, wide = (u64)x % 16 == 0 ? n / W : 0;
  const i64 start = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  double total = 0;
  i64 i = start;
  for (; i + (FLIGHT - 1) * step < wide; i += FLIGHT * step) {
    float r[FLIGHT][W], s = 0;
#pragma unroll
    for (int k = 0; k < FLIGHT; k++) load(x + W * (i + k * step), r[k]);
#pragma unroll
    for (int k = 0; k < FLIGHT; k++)
#pragma unroll
      for (int j = 0; j < W; j++) s += r[k][j] * r[k][j];
    total += s;
  }
  for (; i < wide; i += step) {
    float r[W], s = 0;
    load(x + W * i, r);
#pragma unroll
    for (int j = 0; j < W; j++) s += r[j] * r[j];
    total += s;
  }
  for (i = W * wide + start; i < n; i += step) { const float v = to_f32(x[i]); total += v * v; }
  total = block_sum_wide(total);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}
KERNEL __launch_bounds__(256, 6) sum_squares_f32(double* partial, const f32* x, i64 n) { squares(partial, x, n); }
KERNEL __launch_bounds__(256, 6) sum_squares_bf16(double* partial, const bf16* x, i64 n) { squares(partial, x, n); }
// out[0] += at most 1024 partial sums; one block of 1024 threads.
KERNEL finish_squares(double* out, const double* partial, int parts) {
  const double s = block_sum_wide(threadIdx.x < parts ? partial[threadIdx.x] : 0);
  if (threadIdx.x == 0) out[0] += s;
}

// out[0] += number of elements that are NaN or infinite. Integer atomics: the order does not matter.
template <class X> DI void non_finite(int* out, const X* x, i64 n) {
  constexpr int W = 16 / sizeof(X);
  const i64 start = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
  const i64 wide = (u64)x % 16 == 0 ? n / W : 0;
  int bad = 0;
  for (i64 i = start; i < wide; i += step) {
    float r[W];
    load(x + W * i, r);
#pragma unroll
    for (int j = 0; j < W; j++) bad += !(fabsf(r[j]) < INF);
  }
  for (i64 i = W * wide + start; i < n; i += step) bad += !(fabsf(to_f32(x[i])) < INF);
  for (int o = 16; o > 0; o /= 2) bad += __shfl_xor_sync(~0u, bad, o);
  if (threadIdx.x % 32 == 0 && bad) atomicAdd(out, bad);
}
KERNEL count_non_finite_f32(int* out, const f32* x, i64 n) { non_finite(out, x, n); }
KERNEL count_non_finite_bf16(int* out, const bf16* x, i64 n) { non_finite(out, x, n); }
