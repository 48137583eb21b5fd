// Between the QKV product and attention: split, per-head RMSNorm, rotary embedding; and back. D (head size) <= 256.
// `lanes` neighbouring lanes (a power of two) own one head of one token. The pair (i, i + D/2) is rotated by the angle of
// (position, i):  o1 = n1 cos - n2 sin,  o2 = n2 cos + n1 sin.
//
// What a warp reads is asked for before anything is computed, so that many requests are on their way: a lane holds BATCH heads
// (in the gradients INPUT_BATCH or WEIGHT_BATCH, with two operands) of its token as they came, PER accesses a half. All heads of a warp are of q, of k or of v, so
// that nothing is decided head by head.
#include "common.cuh"
struct alignas(V * sizeof(T)) Access { T x[V]; };
#define PER (V == 1 ? 4 : 1)
#define BATCH ((V + 1) / 2)       // also in src/ops/qkv.rs
#define INPUT_BATCH ((V + 7) / 8) // also in src/ops/qkv.rs
#define WEIGHT_BATCH ((V + 3) / 4)
#define COLUMN(p) ((lane + (p) * lanes) * V)
// The accesses of a lane: those of its columns that exist.
#define ACCESSES(p) EACH(p, PER) if (COLUMN(p) < half)

// A head as it lies in memory, and as numbers.
struct Raw { Access a[PER], b[PER]; };
struct Pairs { float a[PER][V], b[PER][V]; };
DI void fetch(Raw& r, const T* p, int half, int lane, int lanes) {
  ACCESSES(p_) { r.a[p_] = *(const Access*)(p + COLUMN(p_)); r.b[p_] = *(const Access*)(p + half + COLUMN(p_)); }
}
DI void put(T* to, const Raw& r, int half, int lane, int lanes) {
  ACCESSES(p) { *(Access*)(to + COLUMN(p)) = r.a[p]; *(Access*)(to + half + COLUMN(p)) = r.b[p]; }
}
DI void widen(Pairs& y, const Raw& r) {
  EACH(p, PER) EACH(j, V) { y.a[p][j] = to_f32(r.a[p].x[j]); y.b[p][j] = to_f32(r.b[p].x[j]); }
}
DI void put(T* to, const Pairs& y, int half, int lane, int lanes) {
  ACCESSES(p) { store(to + COLUMN(p), y.a[p]); store(to + half + COLUMN(p), y.b[p]); }
}
DI float inner(const Pairs& x, const Pairs& y, int half, int lane, int lanes) {
  float s = 0;
  ACCESSES(p) EACH(j, V) s += x.a[p][j] * y.a[p][j] + x.b[p][j] * y.b[p][j];
  return s;
}

// cos and sin of a position, times the norm's weight (w1, w2), if there is one.
struct Turn { float c1[PER][V], s1[PER][V], c2[PER][V], s2[PER][V]; };
DI void weighted(Turn& y, const float* cos, const float* sin, const T* w, int half, int lane, int lanes) {
  ACCESSES(p) {
    load(cos + COLUMN(p), y.c1[p]); load(sin + COLUMN(p), y.s1[p]);
    float w1[V], w2[V];
    EACH(j, V) w1[j] = w2[j] = 1;
    if (w) { load(w + COLUMN(p), w1); load(w + half + COLUMN(p), w2); }
    EACH(j, V) {
      const float c = y.c1[p][j], s = y.s1[p][j];
      y.c1[p][j] = w1[j] * c; y.s1[p][j] = w1[j] * s;
      y.c2[p][j] = w2[j] * c; y.s2[p][j] = w2[j] * s;
    }
  }
}
// Norm's weight and rotation.
DI void turn(Pairs& y, const Turn& m, float r) {
  EACH(p, PER) EACH(j, V) {
    const float x1 = y.a[p][j], x2 = y.b[p][j];
    y.a[p][j] = r * (x1 * m.c1[p][j] - x2 * m.s2[p][j]);
    y.b[p][j] = r * (x2 * m.c2[p][j] + x1 * m.s1[p][j]);
  }
}
// Gradient of what was turned from the gradient of the result.
DI void turn_back(Pairs& y, const Turn& m) {
  EACH(p, PER) EACH(j, V) {
    const float o1 = y.a[p][j], o2 = y.b[p][j];
    y.a[p][j] = o1 * m.c1[p][j] + o2 * m.s1[p][j];
    y.b[p][j] = o2 * m.c2[p][j] - o1 * m.s2[p][j];
  }
}

// The heads of a warp: of q (side 0), k (1) or v (2).
struct Heads {
  int side, count, skip;          // heads of this side, and heads before them in a row of qkv
  int first, beside;              // this lane's first head, and how far on its next is
};
DI Heads heads_of(int warp, int batch, int q_warps, int k_warps, int Nq, int Nk, int lanes) {
  const int side = warp < q_warps ? 0 : warp < q_warps + k_warps ? 1 : 2, beside = 32 / lanes;
  const int own = warp - (side ? q_warps + (side - 1) * k_warps : 0);
  return {side, side ? Nk : Nq, side ? Nq + (side - 1) * Nk : 0, own * batch * beside + (int)(threadIdx.x % 32) / lanes, beside};
}
#define HEAD(n) (h.first + (n) * h.beside)

// The usual head size has kernels of its own, with all distances known: `body(D, lanes)`.
#define USUAL 128
#define USUAL_LANES (USUAL / 2 / V < 32 ? USUAL / 2 / V : 32)
#define BY_HEAD_SIZE(body) if (D == USUAL) body(USUAL, USUAL_LANES); else body(D, lanes)

// wq, wk, rstd null without norm. q_warps + 2 k_warps warps share the heads of a token.
KERNEL __launch_bounds__(128) qkv_prepare(T* q, T* k, T* v, float* rstd, const T* __restrict__ qkv, const T* __restrict__ wq,
    const T* __restrict__ wk, float eps, const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions,
    i64 tokens, int Nq, int Nk, int D, int q_warps, int k_warps, int lanes) {
  const u32 warp = (blockIdx.x * 128 + threadIdx.x) / 32, warps = q_warps + 2 * k_warps;
  const i64 t = warp / warps;
  if (t >= tokens) return;
  auto body = [&](int D, int lanes) {
    const Heads h = heads_of(warp % warps, BATCH, q_warps, k_warps, Nq, Nk, lanes);
    const int lane = threadIdx.x % lanes, half = D / 2;
    const T* from = qkv + (t * (Nq + 2 * Nk) + h.skip + h.first) * D;
    T* to = (h.side == 0 ? q : h.side == 1 ? k : v) + (t * h.count + h.first) * D;
    Raw in[BATCH];
    EACH(n, BATCH) if (HEAD(n) < h.count) fetch(in[n], from + n * h.beside * D, half, lane, lanes);
    if (h.side == 2) {
      EACH(n, BATCH) if (HEAD(n) < h.count) put(to + n * h.beside * D, in[n], half, lane, lanes);
      return;
    }
    const i64 at = (i64)positions[t] * half;
    Turn m;
    weighted(m, cos + at, sin + at, h.side ? wk : wq, half, lane, lanes);
    const float share = 1.f / D;
    float* scale = rstd + t * (Nq + Nk) + h.skip + h.first;
    EACH(n, BATCH) {
      const bool live = HEAD(n) < h.count;
      Pairs y;
      widen(y, in[n]);
      float r = 1;
      if (wq) {
        r = rsqrtf(group_sum(inner(y, y, half, lane, lanes), lanes) * share + eps);
        if (live && lane == 0) scale[n * h.beside] = r;
      }
      turn(y, m, r);
      if (live) put(to + n * h.beside * D, y, half, lane, lanes);
    }
  };
  BY_HEAD_SIZE(body);
}

// dx = r (g w - x m) with g the gradient before the rotation and m = r^2 mean(g w x); without norm dx = g.
KERNEL __launch_bounds__(128, 8) qkv_prepare_grad_input(T* dqkv, const T* __restrict__ dq, const T* __restrict__ dk,
    const T* __restrict__ dv, const T* __restrict__ qkv, const T* __restrict__ wq, const T* __restrict__ wk,
    const float* __restrict__ rstd, const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions,
    i64 tokens, int Nq, int Nk, int D, int q_warps, int k_warps, int lanes) {
  const u32 warp = (blockIdx.x * 128 + threadIdx.x) / 32, warps = q_warps + 2 * k_warps;
  const i64 t = warp / warps;
  if (t >= tokens) return;
  auto body = [&](int D, int lanes) {
    const Heads h = heads_of(warp % warps, INPUT_BATCH, q_warps, k_warps, Nq, Nk, lanes);
    const int lane = threadIdx.x % lanes, half = D / 2;
    const T* from = (h.side == 0 ? dq : h.side == 1 ? dk : dv) + (t * h.count + h.first) * D;
    const i64 row = (t * (Nq + 2 * Nk) + h.skip + h.first) * D;
    const float* scale = rstd + t * (Nq + Nk) + h.skip + h.first;
    Raw grad[INPUT_BATCH], in[INPUT_BATCH];
    float r[INPUT_BATCH];
    EACH(n, INPUT_BATCH) if (HEAD(n) < h.count) fetch(grad[n], from + n * h.beside * D, half, lane, lanes);
    if (wq && h.side < 2)
      EACH(n, INPUT_BATCH) if (HEAD(n) < h.count) {
        fetch(in[n], qkv + row + n * h.beside * D, half, lane, lanes);
        r[n] = scale[n * h.beside];
      }
    T* to = dqkv + row;
    if (h.side == 2) {
      EACH(n, INPUT_BATCH) if (HEAD(n) < h.count) put(to + n * h.beside * D, grad[n], half, lane, lanes);
      return;
    }
    const i64 at = (i64)positions[t] * half;
    Turn m;
    weighted(m, cos + at, sin + at, h.side ? wk : wq, half, lane, lanes);
    const float share = 1.f / D;
    EACH(n, INPUT_BATCH) {
      Pairs y, x;
      widen(y, grad[n]);
      turn_back(y, m);
      if (wq) {
        widen(x, in[n]);
        const float mean = group_sum(inner(y, x, half, lane, lanes), lanes) * share * r[n] * r[n];
        EACH(p, PER) EACH(j, V) {
          y.a[p][j] = r[n] * (y.a[p][j] - x.a[p][j] * mean);
          y.b[p][j] = r[n] * (y.b[p][j] - x.b[p][j] * mean);
        }
      }
      if (HEAD(n) < h.count) put(to + n * h.beside * D, y, half, lane, lanes);
    }
  };
  BY_HEAD_SIZE(body);
}

// dwq[D], dwk[D]: first partial[chunk, 0..D] for q heads, [chunk, D..2D] for k heads. A block of 256 threads takes the tokens of a chunk, a
// warp one token at a time; the groups of lanes are summed in order, and so are the chunks. Dynamic shared memory: (256 / lanes) * D floats.
// At most 512 blocks (src/ops/reduce.rs), for which `partial` has room, and for a sum of each team of them.
#define TEAM 16                   // also in src/ops/qkv.rs
__device__ u32 arrived[1 + 512 / TEAM];
DI float column(const float* x, int n, int stride) {
  float s = 0;
#pragma unroll 16
  for (int i = 0; i < n; i++) s += __ldcg(x + (i64)i * stride);
  return s;
}
KERNEL __launch_bounds__(256, 2) qk_norm_weight(void* dwq, void* dwk, int out_f32, float* partial, const T* __restrict__ dq,
    const T* __restrict__ dk, const T* __restrict__ qkv, const float* __restrict__ rstd, const float* __restrict__ cos,
    const float* __restrict__ sin, const int* __restrict__ positions, i64 tokens, int per_chunk, int Nq, int Nk, int D, int lanes) {
  extern __shared__ float shared[];
  const i64 end = min((i64)(blockIdx.x + 1) * per_chunk, tokens);
  auto body = [&](int D, int lanes) {
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = 256 / lanes, half = D / 2;
    for (int side = 0; side < 2; side++) {
      const Heads h = {side, side ? Nk : Nq, side ? Nq : 0, (int)(threadIdx.x % 32) / lanes, 32 / lanes};
      const T* g = side ? dk : dq;
      Pairs sum;
      EACH(p, PER) EACH(j, V) sum.a[p][j] = sum.b[p][j] = 0;
      for (i64 t = (i64)blockIdx.x * per_chunk + threadIdx.x / 32; t < end; t += 8) {
        const i64 at = (i64)positions[t] * half;
        Pairs angle;                // cos, sin
        ACCESSES(p) { load(cos + at + COLUMN(p), angle.a[p]); load(sin + at + COLUMN(p), angle.b[p]); }
        for (int skip = 0; skip < h.count; skip += WEIGHT_BATCH * h.beside) {
          const T* from = g + (t * h.count + skip + h.first) * D;
          const T* x = qkv + (t * (Nq + 2 * Nk) + h.skip + skip + h.first) * D;
          const float* scale = rstd + t * (Nq + Nk) + h.skip + skip + h.first;
          Raw grad[WEIGHT_BATCH], in[WEIGHT_BATCH];
          float r[WEIGHT_BATCH];
          EACH(n, WEIGHT_BATCH) if (skip + HEAD(n) < h.count) {
            fetch(grad[n], from + n * h.beside * D, half, lane, lanes);
            fetch(in[n], x + n * h.beside * D, half, lane, lanes);
            r[n] = scale[n * h.beside];
          }
          EACH(n, WEIGHT_BATCH) if (skip + HEAD(n) < h.count) {
            Pairs o, x;
            widen(o, grad[n]);
            widen(x, in[n]);
            EACH(p, PER) EACH(j, V) {
              const float c = angle.a[p][j], s = angle.b[p][j], o1 = o.a[p][j], o2 = o.b[p][j];
              sum.a[p][j] += (o1 * c + o2 * s) * (x.a[p][j] * r[n]);
              sum.b[p][j] += (o2 * c - o1 * s) * (x.b[p][j] * r[n]);
            }
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
  };
  BY_HEAD_SIZE(body);
  // The last block of a team adds up its chunks, and the last team the teams'.
  float* teams = partial + (i64)gridDim.x * 2 * D;
  const int team = blockIdx.x / TEAM, first = team * TEAM, members = min(TEAM, gridDim.x - first), all = (gridDim.x + TEAM - 1) / TEAM;
  if (!last_block(arrived + 1 + team, members)) return;
  for (int c = threadIdx.x; c < 2 * D; c += 256) teams[team * 2 * D + c] = column(partial + (i64)first * 2 * D + c, members, 2 * D);
  if (!last_block(arrived, all)) return;
  for (int c = threadIdx.x; c < 2 * D; c += 256) add_to(c < D ? dwq : dwk, out_f32, c < D ? c : c - D, column(teams + c, all, 2 * D));
}
