// Element-wise operations over n elements of type T; n is a multiple of V.
#include "common.cuh"
#define EACH(i) for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * V; i < n; i += (i64)gridDim.x * blockDim.x * V)

// out = value
KERNEL fill(T* out, float value, i64 n) {
  float r[V];
#pragma unroll
  for (int j = 0; j < V; j++) r[j] = value;
  EACH(i) store(out + i, r);
}
// out = a + b
KERNEL add(T* out, const T* a, const T* b, i64 n) {
  EACH(i) {
    float x[V], y[V];
    load(a + i, x); load(b + i, y);
#pragma unroll
    for (int j = 0; j < V; j++) x[j] += y[j];
    store(out + i, x);
  }
}
// out *= factor
KERNEL scale(T* out, float factor, i64 n) {
  EACH(i) {
    float x[V];
    load(out + i, x);
#pragma unroll
    for (int j = 0; j < V; j++) x[j] *= factor;
    store(out + i, x);
  }
}
// y[rows, cols] += bias[cols]
KERNEL add_bias(T* y, const T* bias, i64 n, int cols) {
  EACH(i) {
    float x[V], b[V];
    load(y + i, x); load(bias + i % cols, b);
#pragma unroll
    for (int j = 0; j < V; j++) x[j] += b[j];
    store(y + i, x);
  }
}
