// Copies and sums between float types. One kernel a pair of types: out from in, overwritten or accumulated.
#include "common.cuh"
// Four elements a thread when both addresses allow it (n4 groups of four), then the rest one by one.
template <class O, class I, bool ADD>
DI void convert(O* out, const I* in, i64 n, int by4) {
  const i64 start = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
  const i64 n4 = by4 ? n / 4 : 0;
  for (i64 g = start; g < n4; g += step) {
    float x[4], y[4];
    load(in + 4 * g, x);
    if (ADD) {
      load(out + 4 * g, y);
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] += y[j];
    }
    store(out + 4 * g, x);
  }
  for (i64 i = 4 * n4 + start; i < n; i += step) out[i] = from_f32<O>(ADD ? to_f32(out[i]) + to_f32(in[i]) : to_f32(in[i]));
}
#define PAIR(O, I) \
  KERNEL copy_##O##_##I(O* out, const I* in, i64 n, int by4) { convert<O, I, false>(out, in, n, by4); } \
  KERNEL add_##O##_##I(O* out, const I* in, i64 n, int by4) { convert<O, I, true>(out, in, n, by4); }
PAIR(f32, f32) PAIR(f32, bf16) PAIR(f32, f16)
PAIR(bf16, f32) PAIR(bf16, bf16) PAIR(bf16, f16)
PAIR(f16, f32) PAIR(f16, bf16) PAIR(f16, f16)

// Rows of `row` elements in two parts side by side whose sum is x: of f32, x rounded to bf16 and (rounded) what that leaves.
KERNEL split_f32(bf16* out, const f32* x, i64 n, i64 row) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
    bf16* to = out + i / row * row + i;
    const bf16 high = from_f32<bf16>(x[i]);
    to[0] = high; to[row] = from_f32<bf16>(x[i] - to_f32(high));
  }
}
// The same rows twice, side by side: what is multiplied by both parts.
KERNEL repeat_bf16(bf16* out, const bf16* x, i64 n, i64 row) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
    bf16* to = out + i / row * row + i;
    to[0] = to[row] = x[i];
  }
}

// f64 is read and written, not computed with; to f32 it is rounded directly.
template <class O> DI void narrow(O* out, const double* in, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) out[i] = from_f32<O>(to_f32(in[i]));
}
template <class I> DI void widen(double* out, const I* in, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) out[i] = to_f32(in[i]);
}
KERNEL copy_f32_f64(f32* out, const double* in, i64 n, int by4) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) out[i] = (float)in[i];
}
KERNEL copy_bf16_f64(bf16* out, const double* in, i64 n, int by4) { narrow(out, in, n); }
KERNEL copy_f16_f64(f16* out, const double* in, i64 n, int by4) { narrow(out, in, n); }
KERNEL copy_f64_f32(double* out, const f32* in, i64 n, int by4) { widen(out, in, n); }
KERNEL copy_f64_bf16(double* out, const bf16* in, i64 n, int by4) { widen(out, in, n); }
KERNEL copy_f64_f16(double* out, const f16* in, i64 n, int by4) { widen(out, in, n); }

// out = value, for types that are not computed with; the value's bits are those of the type.
KERNEL fill_f64(u64* out, u64 value, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) out[i] = value;
}
KERNEL fill_f16(u16* out, int value, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) out[i] = value;
}
KERNEL fill_i32(int* out, int value, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) out[i] = value;
}
