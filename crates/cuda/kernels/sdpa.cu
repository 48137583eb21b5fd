// What cuDNN's packed attention wants to know of the sequences, from their starts cu[B+1]: lengths (b entries, unused ones
// 0) and offsets in elements (b + 1 entries, unused ones repeating the last).
#include "common.cuh"
KERNEL sdpa_lengths(i64* off_q, i64* off_k, i64* off_stats, int* lengths, const int* cu, int B, int b, int q_width, int k_width, int q_heads) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i > b) return;
  const i64 start = cu[min(i, B)];
  off_q[i] = start * q_width; off_k[i] = start * k_width; off_stats[i] = start * q_heads;
  if (i < b) lengths[i] = i < B ? cu[i + 1] - (int)start : 0;
}
// out[i][c][r] = in[i][r][c] of matrices [rows, cols], n elements in all: statistics between [s, heads] and the [heads, s] of dense plans.
KERNEL sdpa_transpose(float* out, const float* in, i64 n, int rows, int cols) {
  const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= n) return;
  const i64 i = at / (rows * cols);
  const int r = at % rows, c = at / rows % cols;
  out[at] = in[(i * rows + r) * cols + c];
}
