// Between the QKV product and attention: split, per-head RMSNorm, rotary embedding; and back. D (head size) <= 256.
// `lanes` neighbouring lanes (a power of two) own one head of one token. The pair (i, i + D/2) is rotated by the angle of
// (position, i):  o1 = n1 cos - n2 sin,  o2 = n2 cos + n1 sin.
//
// Everything a warp reads is asked for before anything is computed: memory answers late, and many requests must be on their
// way. So a lane holds BATCH heads (GRAD_BATCH, where each has two operands) of its token as they came, PER accesses a half.
#include "common.cuh"
struct alignas(V * sizeof(T)) Access { T x[V]; };
#define PER (V == 1 ? 4 : 1)
#define BATCH ((V + 1) / 2)       // also in src/ops/qkv.rs
#define GRAD_BATCH ((V + 3) / 4)  // likewise
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
// Sums over the lanes of a head, of N heads at once: one after the other would wait N times.
template <int N> DI void group_sums(float (&x)[N], int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) EACH(n, N) x[n] += __shfl_xor_sync(~0u, x[n], o);
}
// Where head h of token t lies in the separate tensors.
template <class P> DI P* part(P* q, P* k, P* v, i64 t, int h, int Nq, int Nk, int D) {
  if (h < Nq) return q + (t * Nq + h) * D;
  if (h < Nq + Nk) return k + (t * Nk + h - Nq) * D;
  return v + (t * Nk + h - Nq - Nk) * D;
}
// `warps` warps share the heads of a token. HEAD(n) is the n-th head of this lane; those of a warp are neighbours.
#define WHERE(batch)                                                                                                      \
  const i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32, t = warp / warps;                                   \
  if (t >= tokens) return;                                                                                                \
  const int lane = threadIdx.x % lanes, beside = 32 / lanes, half = D / 2, heads = Nq + 2 * Nk;                           \
  const int first = (int)(warp % warps) * (batch) * beside + threadIdx.x % 32 / lanes;
#define HEAD(n) (first + (n) * beside)

// wq, wk, rstd null without norm.
KERNEL __launch_bounds__(128) qkv_prepare(T* q, T* k, T* v, float* rstd, const T* __restrict__ qkv,
    const T* __restrict__ wq, const T* __restrict__ wk, float eps, const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions, i64 tokens,
    int Nq, int Nk, int D, int warps, int lanes) {
  WHERE(BATCH)
  const i64 at = (i64)positions[t] * half;
  Raw in[BATCH];
  EACH(n, BATCH) if (HEAD(n) < heads) fetch(in[n], qkv + (t * heads + HEAD(n)) * D, half, lane, lanes);
  Pairs angle;
  halves(angle, cos + at, sin + at, half, lane, lanes);
  float r[BATCH];
  if (wq) {
    EACH(n, BATCH) {
      Pairs y;
      widen(y, in[n]);
      r[n] = inner(y, y, half, lane, lanes);
    }
    group_sums(r, lanes);
    EACH(n, BATCH) r[n] = rsqrtf(r[n] / D + eps);
  }
  EACH(n, BATCH) {
    const int h = HEAD(n);
    const bool turns = h < Nq + Nk;
    if (h >= heads) break;
    Pairs y;
    widen(y, in[n]);
    if (wq && turns) {
      Pairs w;
      const T* weight = h < Nq ? wq : wk;
      halves(w, weight, weight + half, half, lane, lanes);
      scale_by(y, w, r[n]);
      if (lane == 0) rstd[t * (Nq + Nk) + h] = r[n];
    }
    if (turns) rotate(y, angle);
    put(part(q, k, v, t, h, Nq, Nk, D), y, half, lane, lanes);
  }
}

// dx = r (g w - x m) with g the gradient before the rotation and m = r^2 mean(g w x); without norm dx = g.
KERNEL __launch_bounds__(128) qkv_prepare_grad_input(T* dqkv, const T* __restrict__ dq, const T* __restrict__ dk,
    const T* __restrict__ dv, const T* __restrict__ qkv, const T* __restrict__ wq, const T* __restrict__ wk, const float* __restrict__ rstd,
    const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions, i64 tokens, int Nq, int Nk,
    int D, int warps, int lanes) {
  WHERE(GRAD_BATCH)
  const i64 at = (i64)positions[t] * half;
  Raw grad[GRAD_BATCH], in[GRAD_BATCH];
  float r[GRAD_BATCH];
  EACH(n, GRAD_BATCH) if (HEAD(n) < heads) {
    const int h = HEAD(n);
    fetch(grad[n], part(dq, dk, dv, t, h, Nq, Nk, D), half, lane, lanes);
    if (wq && h < Nq + Nk) {
      fetch(in[n], qkv + (t * heads + h) * D, half, lane, lanes);
      r[n] = rstd[t * (Nq + Nk) + h];
    }
  }
  Pairs angle;
  halves(angle, cos + at, sin + at, half, lane, lanes);
  // With norm: g w, and m.
  float m[GRAD_BATCH];
  auto before_norm = [&](Pairs& g, int n, bool turns) {
    widen(g, grad[n]);
    if (!turns) return;
    unrotate(g, angle);
    if (!wq) return;
    Pairs w;
    const T* weight = HEAD(n) < Nq ? wq : wk;
    halves(w, weight, weight + half, half, lane, lanes);
    scale_by(g, w, 1.f);
  };
  if (wq) {
    EACH(n, GRAD_BATCH) {
      Pairs g, x;
      before_norm(g, n, HEAD(n) < Nq + Nk);
      widen(x, in[n]);
      m[n] = inner(g, x, half, lane, lanes);
    }
    group_sums(m, lanes);
    EACH(n, GRAD_BATCH) m[n] = m[n] / D * r[n] * r[n];
  }
  EACH(n, GRAD_BATCH) {
    const int h = HEAD(n);
    if (h >= heads) break;
    Pairs g, x;
    before_norm(g, n, h < Nq + Nk);
    if (wq && h < Nq + Nk) {
      widen(x, in[n]);
      EACH(p, PER) EACH(j, V) {
        g.a[p][j] = r[n] * (g.a[p][j] - x.a[p][j] * m[n]);
        g.b[p][j] = r[n] * (g.b[p][j] - x.b[p][j] * m[n]);
      }
    }
    put(dqkv + (t * heads + h) * D, g, half, lane, lanes);
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
      for (int first = threadIdx.x % 32 / lanes; first < heads; first += GRAD_BATCH * beside) {
        Raw grad[GRAD_BATCH], in[GRAD_BATCH];
        float r[GRAD_BATCH];
        EACH(n, GRAD_BATCH) if (HEAD(n) < heads) {
          fetch(grad[n], g + (t * heads + HEAD(n)) * D, half, lane, lanes);
          fetch(in[n], qkv + (t * (Nq + 2 * Nk) + skip + HEAD(n)) * D, half, lane, lanes);
          r[n] = rstd[t * (Nq + Nk) + skip + HEAD(n)];
        }
        EACH(n, GRAD_BATCH) if (HEAD(n) < heads) {
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
