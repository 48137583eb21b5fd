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
// Block (t, k) has the row r = place[t, k], if it is below R: dweights[t, k] = <a, dact[r]> with a = silu(gate) * up, act[r] = w * a, and
// the gradient of gate and up from w * dact[r].
KERNEL moe_act_grad(T* dgate_up, T* act, float* dweights, const T* dact, const T* gate_up, const float* weights, const int* place,
                    int I, int R) {
  __shared__ float buffer[32];
  const i64 r = place[blockIdx.x];
  if (r >= R) {
    if (threadIdx.x == 0) dweights[blockIdx.x] = 0;
    return;
  }
  const float w = weights[blockIdx.x];
  float sum = 0;
  for (int c = threadIdx.x * V; c < I; c += blockDim.x * V) {
    const i64 at = r * 2 * I + c;
    float g[V], u[V], d[V];
    load(gate_up + at, g); load(gate_up + at + I, u); load(dact + r * I + c, d);
#pragma unroll
    for (int j = 0; j < V; j++) {
      const float s = sigmoid(g[j]), x = g[j], a = x * s * u[j];
      sum += a * d[j];
      d[j] *= w;
      g[j] = d[j] * u[j] * s * (1.f + x * (1.f - s));
      u[j] = d[j] * x * s;
      d[j] = w * a;
    }
    store(dgate_up + at, g);
    store(dgate_up + at + I, u);
    store(act + r * I + c, d);
  }
  sum = block_sum(sum, buffer);
  if (threadIdx.x == 0) dweights[blockIdx.x] = sum;
}
