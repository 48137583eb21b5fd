// AdamW (decoupled decay), as torch.optim.AdamW:
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w (1 - lr decay) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
// Weights: f32; bf16; or exact f32 masters held as a bf16 weight and a signed 16-bit remainder:
//   bits(master) = (bits(weight) << 16) + remainder, the weight being the master rounded to nearest (ties away from zero).
#include "common.cuh"
struct Step { float lr, b1, b2, eps, decay, step_size, v_scale, grad_scale; };

struct Plain32 { f32* w; DI float get(i64 i) const { return w[i]; } DI void set(i64 i, float x) const { w[i] = x; } };
struct Plain16 {
  bf16* w;
  DI float get(i64 i) const { return to_f32(w[i]); }
  DI void set(i64 i, float x) const { w[i] = from_f32<bf16>(x); }
};
struct Master {
  bf16* w; short* rest;
  DI float get(i64 i) const { return __uint_as_float(((u32)w[i].bits << 16) + (u32)(int)rest[i]); }
  DI void set(i64 i, float x) const {
    const u32 bits = __float_as_uint(x), top = (bits + 0x8000u) >> 16;
    w[i].bits = (u16)top; rest[i] = (short)(bits - (top << 16));
  }
};

// Four neighbouring elements a thread; the compiler merges their accesses when the addresses are known to be aligned,
// and the warp's accesses are contiguous in any case.
template <class W, class M, class G>
DI void adamw(W w, M* m, M* v, const G* grad, i64 n, Step s, const float* scale) {
  const float gs = scale ? s.grad_scale * scale[0] : s.grad_scale;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
    const float g = to_f32(grad[i]) * gs;
    const float m1 = s.b1 * to_f32(m[i]) + (1.f - s.b1) * g;
    const float v1 = s.b2 * to_f32(v[i]) + (1.f - s.b2) * g * g;
    const float x = w.get(i);
    w.set(i, x - s.lr * s.decay * x - s.step_size * m1 / (sqrtf(v1) * s.v_scale + s.eps));
    m[i] = from_f32<M>(m1);
    v[i] = from_f32<M>(v1);
  }
}
#define PARAMS(M, G) M* m, M* v, const G* grad, i64 n, float lr, float b1, float b2, float eps, float decay, float step_size, float v_scale, float grad_scale, const float* scale
#define STEP Step{lr, b1, b2, eps, decay, step_size, v_scale, grad_scale}
#define COMBINE(M, G) \
  KERNEL adamw_f32_##M##_##G(f32* w, short* rest, PARAMS(M, G)) { adamw(Plain32{w}, m, v, grad, n, STEP, scale); } \
  KERNEL adamw_bf16_##M##_##G(bf16* w, short* rest, PARAMS(M, G)) { adamw(Plain16{w}, m, v, grad, n, STEP, scale); } \
  KERNEL adamw_master_##M##_##G(bf16* w, short* rest, PARAMS(M, G)) { adamw(Master{w, rest}, m, v, grad, n, STEP, scale); }
COMBINE(f32, f32) COMBINE(f32, bf16) COMBINE(bf16, f32) COMBINE(bf16, bf16)

// Splits f32 values into weight and remainder, and joins them.
KERNEL master_split(bf16* w, short* rest, const f32* x, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) Master{w, rest}.set(i, x[i]);
}
KERNEL master_join(f32* x, bf16* w, short* rest, i64 n) {
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) x[i] = Master{w, rest}.get(i);
}
// factor[0] = min(1, limit / (sqrt(sum of squares) + 1e-6)): gradient clipping without the host.
KERNEL clip_factor(float* factor, const double* squares, float limit) { factor[0] = fminf(1.f, limit / ((float)sqrt(squares[0]) + 1e-6f)); }
