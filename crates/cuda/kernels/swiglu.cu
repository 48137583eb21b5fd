// SwiGLU: y = silu(gate) * up with gate_up[T, 2I] = [gate | up]; silu(g) = g * s, s = 1 / (1 + exp(-g)).
// dgate = dy * up * s * (1 + g * (1 - s)), dup = dy * g * s.
#include "common.cuh"
DI float sigmoid(float g) { return 1.f / (1.f + __expf(-g)); }
#define EACH(i) for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * V; i < n; i += (i64)gridDim.x * blockDim.x * V)

// n = tokens * I
KERNEL swiglu(T* y, const T* gate_up, i64 n, int I) {
  EACH(i) {
    const T* row = gate_up + i / I * 2 * I + i % I;
    float g[V], u[V];
    load(row, g); load(row + I, u);
#pragma unroll
    for (int j = 0; j < V; j++) g[j] = g[j] * sigmoid(g[j]) * u[j];
    store(y + i, g);
  }
}
KERNEL swiglu_grad(T* dgate_up, const T* dy, const T* gate_up, i64 n, int I) {
  EACH(i) {
    const i64 at = i / I * 2 * I + i % I;
    float g[V], u[V], d[V];
    load(gate_up + at, g); load(gate_up + at + I, u); load(dy + i, d);
#pragma unroll
    for (int j = 0; j < V; j++) {
      const float s = sigmoid(g[j]), x = g[j];
      g[j] = d[j] * u[j] * s * (1.f + x * (1.f - s));
      u[j] = d[j] * x * s;
    }
    store(dgate_up + at, g);
    store(dgate_up + at + I, u);
  }
}
