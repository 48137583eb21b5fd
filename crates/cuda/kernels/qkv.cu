// Between the QKV product and attention: split, per-head RMSNorm, rotary embedding; and back. D (head size) <= 256.
// `lanes` neighbouring lanes (a power of two) own one head of one token. The pair (i, i + D/2) is rotated by the angle of
// (position, i):  o1 = n1 cos - n2 sin,  o2 = n2 cos + n1 sin.
//
// What a warp reads is asked for before anything is computed, so that many requests are on their way: a lane holds BATCH heads
// (WEIGHT_BATCH, where each has two operands) of its token as they came, PER accesses a half.
#include "common.cuh"
struct alignas(V * sizeof(T)) Access { T x[V]; };
#define PER (V == 1 ? 4 : 1)
#define BATCH ((V + 1) / 2)       // also in src/ops/qkv.rs
#define WEIGHT_BATCH ((V + 3) / 4)
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; i++)
#define COLUMN(p) ((lane + (p) * lanes) * V)
// The accesses of a lane: those of its columns that exist.
#define ACCESSES(p) EACH(p, PER) if (COLUMN(p) < half)

// A head as it lies in memory, and as numbers.
struct Raw { Access a[PER], b[PER]; };
struct Pairs { float a[PER][V], b[PER][V]; };
DI void fetch(Raw& r, const T* p, int half, int lane, int lanes) {
  ACCESSES(p_) { r.a[p_] = *(const Access*)(p + COLUMN(p_)); r.b[p_] = *(const Access*)(p + half + COLUMN(p_)); }
}
DI void widen(Pairs& y, const Raw& r) {
  EACH(p, PER) EACH(j, V) { y.a[p][j] = to_f32(r.a[p].x[j]); y.b[p][j] = to_f32(r.b[p].x[j]); }
}
DI void put(T* to, const Pairs& y, int half, int lane, int lanes) {
  ACCESSES(p) { store(to + COLUMN(p), y.a[p]); store(to + half + COLUMN(p), y.b[p]); }
}
// cos (a) and sin (b) of a position, or the two halves of a norm's weight.
template <class X> DI void halves(Pairs& y, const X* a, const X* b, int half, int lane, int lanes) {
  ACCESSES(p) { load(a + COLUMN(p), y.a[p]); load(b + COLUMN(p), y.b[p]); }
}
DI void rotate(Pairs& y, const Pairs& angle) {
  EACH(p, PER) EACH(j, V) {
    const float n1 = y.a[p][j], n2 = y.b[p][j];
    y.a[p][j] = n1 * angle.a[p][j] - n2 * angle.b[p][j];
    y.b[p][j] = n2 * angle.a[p][j] + n1 * angle.b[p][j];
  }
}
// Gradient of what was rotated from the gradient of the result.
DI void unrotate(Pairs& y, const Pairs& angle) {
  EACH(p, PER) EACH(j, V) {
    const float o1 = y.a[p][j], o2 = y.b[p][j];
    y.a[p][j] = o1 * angle.a[p][j] + o2 * angle.b[p][j];
    y.b[p][j] = o2 * angle.a[p][j] - o1 * angle.b[p][j];
  }
}
DI void scale_by(Pairs& y, const Pairs& w, float r) {
  EACH(p, PER) EACH(j, V) { y.a[p][j] *= r * w.a[p][j]; y.b[p][j] *= r * w.b[p][j]; }
}
DI float inner(const Pairs& x, const Pairs& y, int half, int lane, int lanes) {
  float s = 0;
  ACCESSES(p) EACH(j, V) s += x.a[p][j] * y.a[p][j] + x.b[p][j] * y.b[p][j];
  return s;
}
// Where head h of token t lies in the separate tensors.
template <class P> DI P* part(P* q, P* k, P* v, i64 t, int h, int Nq, int Nk, int D) {
  if (h < Nq) return q + (t * Nq + h) * D;
  if (h < Nq + Nk) return k + (t * Nk + h - Nq) * D;
  return v + (t * Nk + h - Nq - Nk) * D;
}
// HEAD(n) is the n-th head of this lane; those of a warp are neighbours.
#define HEAD(n) (first + (n) * beside)

// wq, wk, rstd null without norm. `warps` warps share the heads of a token.
KERNEL __launch_bounds__(128) qkv_prepare(T* q, T* k, T* v, float* rstd, const T* __restrict__ qkv, const T* wq, const T* wk,
    float eps, const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions, i64 tokens,
    int Nq, int Nk, int D, int warps, int lanes) {
  const i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32, t = warp / warps;
  if (t >= tokens) return;
  const int lane = threadIdx.x % lanes, beside = 32 / lanes, half = D / 2, heads = Nq + 2 * Nk;
  const int first = (int)(warp % warps) * BATCH * beside + threadIdx.x % 32 / lanes;
  const i64 at = (i64)positions[t] * half;
  Raw in[BATCH];
  EACH(n, BATCH) if (HEAD(n) < heads) fetch(in[n], qkv + (t * heads + HEAD(n)) * D, half, lane, lanes);
  Pairs angle;
  halves(angle, cos + at, sin + at, half, lane, lanes);
  EACH(n, BATCH) {
    const int h = HEAD(n);
    const bool live = h < heads, turns = h < Nq + Nk;
    Pairs y;
    widen(y, in[n]);
    if (wq) {
      const float r = rsqrtf(group_sum(inner(y, y, half, lane, lanes), lanes) / D + eps);
      if (turns) {
        Pairs w;
        const T* weight = h < Nq ? wq : wk;
        halves(w, weight, weight + half, half, lane, lanes);
        scale_by(y, w, r);
        if (lane == 0) rstd[t * (Nq + Nk) + h] = r;
      }
    }
    if (turns) rotate(y, angle);
    if (live) put(part(q, k, v, t, h, Nq, Nk, D), y, half, lane, lanes);
  }
}

// dx = r (g w - x m) with g the gradient before the rotation and m = r^2 mean(g w x); without norm dx = g. One head a group of lanes, whose
// two passes read their operands anew, from the L1 cache: held in registers, as above, they cost more warps than they save.
#define HALF(i) for (int i = lane * V; i < half; i += lanes * V)
DI void unrotated(float (&a)[V], float (&b)[V], const T* g, const float* cos, const float* sin, int half) {
  float c[V], s[V];
  load(g, a); load(g + half, b);
  load(cos, c); load(sin, s);
  EACH(j, V) {
    const float o1 = a[j], o2 = b[j];
    a[j] = o1 * c[j] + o2 * s[j];
    b[j] = o2 * c[j] - o1 * s[j];
  }
}
DI void times(float (&a)[V], float (&b)[V], const T* w, int half) {
  float y[V], z[V];
  load(w, y); load(w + half, z);
  EACH(j, V) { a[j] *= y[j]; b[j] *= z[j]; }
}
KERNEL qkv_prepare_grad_input(T* dqkv, const T* dq, const T* dk, const T* dv, const T* qkv, const T* wq, const T* wk,
                              const float* rstd, const float* cos, const float* sin, const int* positions, i64 tokens,
                              int Nq, int Nk, int D, int lanes) {
  const int heads = Nq + 2 * Nk, half = D / 2, lane = threadIdx.x % lanes;
  const i64 group = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / lanes, t = group / heads, at = group * D;
  const int h = group % heads;
  const bool live = t < tokens, turns = h < Nq + Nk;
  const T* g = part(dq, dk, dv, t, h, Nq, Nk, D);
  const T* w = h < Nq ? wq : wk;
  const i64 p = live ? (i64)positions[t] * half : 0;
  float r = 1, m = 0;
  if (wq) {
    float s = 0;
    if (live && turns) {
      r = rstd[t * (Nq + Nk) + h];
      HALF(i) {
        float a[V], b[V], y[V], z[V];
        unrotated(a, b, g + i, cos + p + i, sin + p + i, half);
        times(a, b, w + i, half);
        load(qkv + at + i, y); load(qkv + at + half + i, z);
        EACH(j, V) s += a[j] * y[j] + b[j] * z[j];
      }
    }
    m = group_sum(s, lanes) / D * r * r;
  }
  if (!live) return;
  HALF(i) {
    float a[V], b[V];
    if (!turns) {
      load(g + i, a); load(g + half + i, b);
    } else {
      unrotated(a, b, g + i, cos + p + i, sin + p + i, half);
      if (wq) {
        float y[V], z[V];
        times(a, b, w + i, half);
        load(qkv + at + i, y); load(qkv + at + half + i, z);
        EACH(j, V) { a[j] = r * (a[j] - y[j] * m); b[j] = r * (b[j] - z[j] * m); }
      }
    }
    store(dqkv + at + i, a); store(dqkv + at + half + i, b);
  }
}

// First stage of dwq[D], dwk[D]: partial[chunk, 0..D] for q heads, [chunk, D..2D] for k heads. A block of 256 threads takes the
// tokens of a chunk, a warp one token at a time; the groups of lanes are summed in order. Dynamic shared memory:
// (256 / lanes) * D floats.
KERNEL __launch_bounds__(256, 2) qk_norm_weight_partial(float* partial, const T* __restrict__ dq, const T* __restrict__ dk,
    const T* __restrict__ qkv, const float* __restrict__ rstd, const float* __restrict__ cos, const float* __restrict__ sin,
    const int* __restrict__ positions, i64 tokens, int per_chunk, int Nq, int Nk, int D, int lanes) {
  extern __shared__ float shared[];
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = 256 / lanes, beside = 32 / lanes, half = D / 2;
  const i64 end = min((i64)(blockIdx.x + 1) * per_chunk, tokens);
  for (int side = 0; side < 2; side++) {
    const int heads = side ? Nk : Nq, skip = side ? Nq : 0;
    const T* g = side ? dk : dq;
    Pairs sum;
    EACH(p, PER) EACH(j, V) sum.a[p][j] = sum.b[p][j] = 0;
    for (i64 t = (i64)blockIdx.x * per_chunk + threadIdx.x / 32; t < end; t += 8) {
      Pairs angle;
      const i64 at = (i64)positions[t] * half;
      halves(angle, cos + at, sin + at, half, lane, lanes);
      for (int first = threadIdx.x % 32 / lanes; first < heads; first += WEIGHT_BATCH * beside) {
        Raw grad[WEIGHT_BATCH], in[WEIGHT_BATCH];
        float r[WEIGHT_BATCH];
        EACH(n, WEIGHT_BATCH) if (HEAD(n) < heads) {
          fetch(grad[n], g + (t * heads + HEAD(n)) * D, half, lane, lanes);
          fetch(in[n], qkv + (t * (Nq + 2 * Nk) + skip + HEAD(n)) * D, half, lane, lanes);
          r[n] = rstd[t * (Nq + Nk) + skip + HEAD(n)];
        }
        EACH(n, WEIGHT_BATCH) if (HEAD(n) < heads) {
          Pairs y, x;
          widen(y, grad[n]);
          widen(x, in[n]);
          unrotate(y, angle);
          EACH(p, PER) EACH(j, V) { sum.a[p][j] += y.a[p][j] * x.a[p][j] * r[n]; sum.b[p][j] += y.b[p][j] * x.b[p][j] * r[n]; }
        }
      }
    }
    ACCESSES(p) EACH(j, V) { shared[group * D + COLUMN(p) + j] = sum.a[p][j]; shared[group * D + half + COLUMN(p) + j] = sum.b[p][j]; }
    __syncthreads();
    for (int c = threadIdx.x; c < D; c += 256) {
      float s = 0;
      for (int k = 0; k < groups; k++) s += shared[k * D + c];
      partial[((i64)blockIdx.x * 2 + side) * D + c] = s;
    }
    __syncthreads();
  }
}
