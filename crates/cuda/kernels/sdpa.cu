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
