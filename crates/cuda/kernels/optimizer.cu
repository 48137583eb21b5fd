// AdamW (decoupled decay), as torch.optim.AdamW:
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w (1 - lr decay) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
// Weights: f32; bf16; or exact f32 masters held as a bf16 weight and a signed 16-bit remainder:
//   bits(master) = (bits(weight) << 16) + remainder, the weight being the master rounded to nearest (ties away from zero).
#include "common.cuh"
struct Step { float lr, b1, b2, eps, decay, step_size, v_scale; };

// Weights as f32, N neighbouring ones at a time.
struct Plain32 {
  f32* w;
  template <int N> DI void get(i64 i, float (&x)[N]) const { load(w + i, x); }
  template <int N> DI void set(i64 i, const float (&x)[N]) const { store(w + i, x); }
};
struct Plain16 {
  bf16* w;
  template <int N> DI void get(i64 i, float (&x)[N]) const { load(w + i, x); }
  template <int N> DI void set(i64 i, const float (&x)[N]) const { store(w + i, x); }
};
struct Master {
  bf16* w; short* rest;
  template <int N> DI void get(i64 i, float (&x)[N]) const {
    struct alignas(2 * N) Bits { u16 x[N]; };
    const Bits top = *(const Bits*)(w + i), low = *(const Bits*)(rest + i);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = __uint_as_float(((u32)top.x[j] << 16) + (u32)(int)(short)low.x[j]);
  }
  template <int N> DI void set(i64 i, const float (&x)[N]) const {
    struct alignas(2 * N) Bits { u16 x[N]; };
    Bits top, low;
#pragma unroll
    for (int j = 0; j < N; j++) {
      const u32 bits = __float_as_uint(x[j]), t = (bits + 0x8000u) >> 16;
      top.x[j] = (u16)t; low.x[j] = (u16)(bits - (t << 16));
    }
    *(Bits*)(w + i) = top; *(Bits*)(rest + i) = low;
  }
};

template <int N, class W, class M, class G>
DI void update(W w, M* m, M* v, const G* grad, i64 i, const Step& s, float gs) {
  float g[N], m1[N], v1[N], x[N];
  load(grad + i, g); load(m + i, m1); load(v + i, v1); w.get(i, x);
#pragma unroll
  for (int j = 0; j < N; j++) {
    const float d = g[j] * gs;
    m1[j] = s.b1 * m1[j] + (1.f - s.b1) * d;
    v1[j] = s.b2 * v1[j] + (1.f - s.b2) * d * d;
    x[j] = x[j] - s.lr * s.decay * x[j] - s.step_size * m1[j] / (sqrtf(v1[j]) * s.v_scale + s.eps);
  }
  w.set(i, x); store(m + i, m1); store(v + i, v1);
}
// Four neighbouring elements a thread when all addresses allow it (`by4`), then the rest one by one.
template <class W, class M, class G>
DI void adamw(W w, M* m, M* v, const G* grad, i64 n, Step s, const float* clip, int by4) {
  const float gs = clip[0];
  if (gs != gs) return;  // loss or gradient not finite: no update
  const i64 start = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x, n4 = by4 ? n / 4 : 0;
  for (i64 i = start; i < n4; i += step) update<4>(w, m, v, grad, 4 * i, s, gs);
  for (i64 i = 4 * n4 + start; i < n; i += step) update<1>(w, m, v, grad, i, s, gs);
}
#define PARAMS(M, G) M* m, M* v, const G* grad, i64 n, float lr, float b1, float b2, float eps, float decay, float step_size, float v_scale, const float* clip, int by4
#define STEP Step{lr, b1, b2, eps, decay, step_size, v_scale}
#define COMBINE(M, G) \
  KERNEL adamw_f32_##M##_##G(f32* w, short* rest, PARAMS(M, G)) { adamw(Plain32{w}, m, v, grad, n, STEP, clip, by4); } \
  KERNEL adamw_bf16_##M##_##G(bf16* w, short* rest, PARAMS(M, G)) { adamw(Plain16{w}, m, v, grad, n, STEP, clip, by4); } \
  KERNEL adamw_master_##M##_##G(bf16* w, short* rest, PARAMS(M, G)) { adamw(Master{w, rest}, m, v, grad, n, STEP, clip, by4); }
COMBINE(f32, f32) COMBINE(f32, bf16) COMBINE(bf16, f32) COMBINE(bf16, bf16)

// Splits f32 values into weight and remainder, and joins them.
KERNEL master_split(bf16* w, short* rest, const f32* x, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) { const float v[1] = {x[i]}; Master{w, rest}.set(i, v); }
}
KERNEL master_join(f32* x, bf16* w, short* rest, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) { float v[1]; Master{w, rest}.get(i, v); x[i] = v[0]; }
}
// factor[0] = min(1, limit / (sqrt(sum of squares) + 1e-6)), 1 without a limit, NaN when something is not finite: clipping without the host.
KERNEL clip_factor(float* factor, const double* squares, const double* guard, float limit) {
  const double s = squares[0], g = guard[0];
  factor[0] = !isfinite(s) || !isfinite(g) ? __int_as_float(0x7fffffff) : limit > 0.f ? fminf(1.f, (float)(limit / (sqrt(s) + 1e-6))) : 1.f;
}
