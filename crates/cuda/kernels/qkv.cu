// Between the QKV product and attention: split, per-head RMSNorm, rotary embedding; and back.
// A group of `lanes` neighbouring lanes (a power of two) owns one head of one token. The pair (i, i + D/2) is rotated by
// the angle of (position, i):  o1 = n1 cos - n2 sin,  o2 = n2 cos + n1 sin.
#include "common.cuh"

struct Head {
  i64 t;         // token
  int h;         // head in qkv: q heads, then k, then v
  int lane;      // in the group
  bool live;
};
DI Head which_head(i64 tokens, int heads, int lanes) {
  const i64 g = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / lanes;
  return {g / heads, (int)(g % heads), (int)(threadIdx.x % lanes), g < tokens * heads};
}
// Where head h of token t lies in the separate tensors.
template <class P> DI P* part(P* q, P* k, P* v, const Head& x, int Nq, int Nk, int D) {
  if (x.h < Nq) return q + (x.t * Nq + x.h) * D;
  if (x.h < Nq + Nk) return k + (x.t * Nk + x.h - Nq) * D;
  return v + (x.t * Nk + x.h - Nq - Nk) * D;
}
#define HALF(i) for (int i = x.lane * V; i < half; i += lanes * V)

// wq, wk, rstd null without norm.
KERNEL qkv_prepare(T* q, T* k, T* v, float* rstd, const T* qkv, const T* wq, const T* wk, float eps, const float* cos,
                   const float* sin, const int* positions, i64 tokens, int Nq, int Nk, int D, int lanes) {
  const Head x = which_head(tokens, Nq + 2 * Nk, lanes);
  const int half = D / 2;
  const T* in = qkv + (x.t * (Nq + 2 * Nk) + x.h) * D;
  T* out = part(q, k, v, x, Nq, Nk, D);
  const bool rotate = x.h < Nq + Nk;
  float r = 1;
  if (wq) {
    float s = 0;
    if (x.live && rotate)
      HALF(i) {
        float a[V], b[V];
        load(in + i, a); load(in + half + i, b);
#pragma unroll
        for (int j = 0; j < V; j++) s += a[j] * a[j] + b[j] * b[j];
      }
    r = rsqrtf(group_sum(s, lanes) / D + eps);
    if (x.live && rotate && x.lane == 0) rstd[x.t * (Nq + Nk) + x.h] = r;
  }
  if (!x.live) return;
  const T* w = x.h < Nq ? wq : wk;
  const i64 p = (i64)positions[x.t] * half;
  HALF(i) {
    float a[V], b[V], c[V], s[V];
    load(in + i, a); load(in + half + i, b);
    if (rotate) {
      if (wq) {
        load(w + i, c); load(w + half + i, s);
#pragma unroll
        for (int j = 0; j < V; j++) { a[j] *= r * c[j]; b[j] *= r * s[j]; }
      }
      load(cos + p + i, c); load(sin + p + i, s);
#pragma unroll
      for (int j = 0; j < V; j++) {
        const float n1 = a[j], n2 = b[j];
        a[j] = n1 * c[j] - n2 * s[j];
        b[j] = n2 * c[j] + n1 * s[j];
      }
    }
    store(out + i, a); store(out + half + i, b);
  }
}

// Gradient of the normed head from the gradient of the rotated one, at pair i.
DI void unrotate(float (&a)[V], float (&b)[V], const float* cos, const float* sin, i64 at) {
  float c[V], s[V];
  load(cos + at, c); load(sin + at, s);
#pragma unroll
  for (int j = 0; j < V; j++) {
    const float o1 = a[j], o2 = b[j];
    a[j] = o1 * c[j] + o2 * s[j];
    b[j] = o2 * c[j] - o1 * s[j];
  }
}

KERNEL qkv_prepare_grad_input(T* dqkv, const T* dq, const T* dk, const T* dv, const T* qkv, const T* wq, const T* wk,
                              const float* rstd, const float* cos, const float* sin, const int* positions, i64 tokens,
                              int Nq, int Nk, int D, int lanes) {
  const Head x = which_head(tokens, Nq + 2 * Nk, lanes);
  const int half = D / 2;
  const i64 at = (x.t * (Nq + 2 * Nk) + x.h) * D;
  const T* g = part(dq, dk, dv, x, Nq, Nk, D);
  const bool rotate = x.h < Nq + Nk;
  const T* w = x.h < Nq ? wq : wk;
  const i64 p = x.live ? (i64)positions[x.t] * half : 0;
  float r = 1, m = 0;
  if (wq) {
    float s = 0;
    if (x.live && rotate) {
      r = rstd[x.t * (Nq + Nk) + x.h];
      HALF(i) {
        float a[V], b[V], y[V], z[V];
        load(g + i, a); load(g + half + i, b);
        unrotate(a, b, cos, sin, p + i);
        load(w + i, y); load(w + half + i, z);
#pragma unroll
        for (int j = 0; j < V; j++) { a[j] *= y[j]; b[j] *= z[j]; }
        load(qkv + at + i, y); load(qkv + at + half + i, z);
#pragma unroll
        for (int j = 0; j < V; j++) s += a[j] * y[j] + b[j] * z[j];
      }
    }
    m = group_sum(s, lanes) / D * r * r;
  }
  if (!x.live) return;
  HALF(i) {
    float a[V], b[V];
    load(g + i, a); load(g + half + i, b);
    if (rotate) {
      unrotate(a, b, cos, sin, p + i);
      if (wq) {
        float y[V], z[V];
        load(w + i, y); load(w + half + i, z);
#pragma unroll
        for (int j = 0; j < V; j++) { a[j] *= y[j]; b[j] *= z[j]; }
        load(qkv + at + i, y); load(qkv + at + half + i, z);
#pragma unroll
        for (int j = 0; j < V; j++) { a[j] = r * (a[j] - y[j] * m); b[j] = r * (b[j] - z[j] * m); }
      }
    }
    store(dqkv + at + i, a); store(dqkv + at + half + i, b);
  }
}

// First stage of dwq[D], dwk[D]: partial[chunk, 0..D] for q heads, [chunk, D..2D] for k heads. A block of 256 threads
// takes the tokens of a chunk; each group of lanes owns some of its heads, and the groups are summed in order.
// Dynamic shared memory: (256 / lanes) * D floats.
KERNEL qk_norm_weight_partial(float* partial, const T* dq, const T* dk, const T* qkv, const float* rstd, const float* cos,
                              const float* sin, const int* positions, i64 tokens, int per_chunk, int Nq, int Nk, int D,
                              int lanes) {
  extern __shared__ float s[];
  const int half = D / 2, groups = 256 / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const i64 first = (i64)blockIdx.x * per_chunk, end = first + per_chunk < tokens ? first + per_chunk : tokens;
  for (int side = 0; side < 2; side++) {
    const int heads = side ? Nk : Nq;
    const T* g = side ? dk : dq;
    for (int base = 0; base < half; base += lanes * V) {
      const int i = base + lane * V;
      float wa[V], wb[V];
#pragma unroll
      for (int j = 0; j < V; j++) wa[j] = wb[j] = 0;
      if (i < half)
        for (i64 n = first * heads + group; n < end * heads; n += groups) {
          const i64 t = n / heads;
          const int h = n % heads + (side ? Nq : 0);
          const i64 at = (t * (Nq + 2 * Nk) + h) * D;
          const float r = rstd[t * (Nq + Nk) + h];
          float a[V], b[V], y[V];
          load(g + n * D + i, a); load(g + n * D + half + i, b);
          unrotate(a, b, cos, sin, (i64)positions[t] * half + i);
          load(qkv + at + i, y);
#pragma unroll
          for (int j = 0; j < V; j++) wa[j] += a[j] * y[j] * r;
          load(qkv + at + half + i, y);
#pragma unroll
          for (int j = 0; j < V; j++) wb[j] += b[j] * y[j] * r;
        }
      if (i < half) {
#pragma unroll
        for (int j = 0; j < V; j++) { s[group * D + i + j] = wa[j]; s[group * D + half + i + j] = wb[j]; }
      }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < D; c += 256) {
      float sum = 0;
      for (int k = 0; k < groups; k++) sum += s[k * D + c];
      partial[((i64)blockIdx.x * 2 + side) * D + c] = sum;
    }
    __syncthreads();
  }
}
