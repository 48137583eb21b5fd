// Copies and sums between float types. One kernel a pair of types: out from in, overwritten or accumulated.
#include "common.cuh"
// Four elements a thread when both addresses allow it (n4 groups of four), then the rest one by one.
template <class O, class I, bool ADD>
DI void convert(O* out, const I* in, i64 n, int by4) {
  const i64 start = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
  const i64 n4 = by4 ? n / 4 : 0;
  for (i64 g = start; g < n4; g += step) {
    float x[4], y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = to_f32(in[4 * g + j]);
    if (ADD) {
#pragma unroll
      for (int j = 0; j < 4; j++) y[j] = to_f32(out[4 * g + j]) + x[j];
    }
#pragma unroll
    for (int j = 0; j < 4; j++) out[4 * g + j] = from_f32<O>(ADD ? y[j] : x[j]);
  }
  for (i64 i = 4 * n4 + start; i < n; i += step) out[i] = from_f32<O>(ADD ? to_f32(out[i]) + to_f32(in[i]) : to_f32(in[i]));
}
#define PAIR(O, I) \
  KERNEL copy_##O##_##I(O* out, const I* in, i64 n, int by4) { convert<O, I, false>(out, in, n, by4); } \
  KERNEL add_##O##_##I(O* out, const I* in, i64 n, int by4) { convert<O, I, true>(out, in, n, by4); }
PAIR(f32, f32) PAIR(f32, bf16) PAIR(f32, f16)
PAIR(bf16, f32) PAIR(bf16, bf16) PAIR(bf16, f16)
PAIR(f16, f32) PAIR(f16, bf16) PAIR(f16, f16)

// out = value, for integers.
KERNEL fill_i32(int* out, int value, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) out[i] = value;
}
