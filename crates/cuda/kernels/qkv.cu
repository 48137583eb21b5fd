// Between the QKV product and attention: split, per-head RMSNorm, rotary embedding; and back. D (head size) <= 256.
// `lanes` neighbouring lanes (a power of two) own one head of one token. The pair (i, i + D/2) is rotated by the angle of
// (position, i):  o1 = n1 cos - n2 sin,  o2 = n2 cos + n1 sin.
//
// What a warp reads is asked for before anything is computed, so that many requests are on their way: a lane holds BATCH heads
// (GRAD_BATCH, where each has two operands) of its token as they came, PER accesses a half. All heads of a warp are of q, of k or of v, so
// that nothing is decided head by head.
#include "common.cuh"
struct alignas(V * sizeof(T)) Access { T x[V]; };
#define PER (V == 1 ? 4 : 1)
#define BATCH ((V + 1) / 2)       // also in src/ops/qkv.rs
#define GRAD_BATCH ((V + 3) / 4)  // also in src/ops/qkv.rs
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
KERNEL __launch_bounds__(128) qkv_prepare_grad_input(T* dqkv, const T* __restrict__ dq, const T* __restrict__ dk,
    const T* __restrict__ dv, const T* __restrict__ qkv, const T* __restrict__ wq, const T* __restrict__ wk,
    const float* __restrict__ rstd, const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions,
    i64 tokens, int Nq, int Nk, int D, int q_warps, int k_warps, int lanes) {
  const u32 warp = (blockIdx.x * 128 + threadIdx.x) / 32, warps = q_warps + 2 * k_warps;
  const i64 t = warp / warps;
  if (t >= tokens) return;
  auto body = [&](int D, int lanes) {
    const Heads h = heads_of(warp % warps, GRAD_BATCH, q_warps, k_warps, Nq, Nk, lanes);
    const int lane = threadIdx.x % lanes, half = D / 2;
    const T* from = (h.side == 0 ? dq : h.side == 1 ? dk : dv) + (t * h.count + h.first) * D;
    const i64 row = (t * (Nq + 2 * Nk) + h.skip + h.first) * D;
    const float* scale = rstd + t * (Nq + Nk) + h.skip + h.first;
    Raw grad[GRAD_BATCH], in[GRAD_BATCH];
    float r[GRAD_BATCH];
    EACH(n, GRAD_BATCH) if (HEAD(n) < h.count) fetch(grad[n], from + n * h.beside * D, half, lane, lanes);
    if (wq && h.side < 2)
      EACH(n, GRAD_BATCH) if (HEAD(n) < h.count) {
        fetch(in[n], qkv + row + n * h.beside * D, half, lane, lanes);
        r[n] = scale[n * h.beside];
      }
    T* to = dqkv + row;
    if (h.side == 2) {
      EACH(n, GRAD_BATCH) if (HEAD(n) < h.count) put(to + n * h.beside * D, grad[n], half, lane, lanes);
      return;
    }
    const i64 at = (i64)positions[t] * half;
    Turn m;
    weighted(m, cos + at, sin + at, h.side ? wk : wq, half, lane, lanes);
    const float share = 1.f / D;
    EACH(n, GRAD_BATCH) {
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

// What a warp of `qk_norm_weight` has asked for: STAGES items on their way into shared memory, of a head each of 32 / lanes groups of lanes. A
// lane reads only what it asked for itself. Without accesses of 16 bytes an item is read when it is needed.
#define STAGES 4
struct Slot { uint4 grad[2][32], in[2][32]; float scale[32]; };
DI void copy16(void* to, const T* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DI void copy4(void* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DI void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DI void wait_for_first() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory"); }

// dwq[D], dwk[D]: first partial[chunk, 0..D] for q heads, [chunk, D..2D] for k heads. A block of 256 threads takes the tokens of a chunk, a
// warp one token at a time; the groups of lanes are summed in order, and so are the chunks. The rotation is of sums over the heads of a token:
//   dw1 = sum over tokens of cos sum_h(o1 x1 r) + sin sum_h(o2 x1 r),  dw2 = cos sum_h(o2 x2 r) - sin sum_h(o1 x2 r).
// Dynamic shared memory: 8 x STAGES slots or (256 / lanes) * D floats, whichever is more. At most 512 blocks (src/ops/reduce.rs), for which
// `partial` has room, and for a sum of each team of them.
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
  extern __shared__ __align__(16) float shared[];
  Slot* slots = (Slot*)shared + threadIdx.x / 32 * STAGES;
  const i64 end = min((i64)(blockIdx.x + 1) * per_chunk, tokens);
  const int me = threadIdx.x % 32;
  auto body = [&](int D, int lanes) {
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = 256 / lanes, beside = 32 / lanes, half = D / 2;
#pragma unroll 1
    for (int side = 0; side < 2; side++) {
      const int heads = side ? Nk : Nq, skip = side ? Nq : 0, own = me / lanes;
      const T* g = side ? dk : dq;
      // The item of token t whose first head is h: this lane's head there, if it has one.
      struct Item { i64 t; int h; };
      auto next = [&](Item& i) {
        i.h += beside;
        if (i.h >= heads) { i.h = 0; i.t += 8; }
      };
      auto gradient = [&](Item i) { return g + (i.t * heads + i.h + own) * D; };
      auto input = [&](Item i) { return qkv + (i.t * (Nq + 2 * Nk) + skip + i.h + own) * D; };
      auto scale = [&](Item i) { return rstd + i.t * (Nq + Nk) + skip + i.h + own; };
      auto mine = [&](Item i) { return i.h + own < heads && lane * V < half; };
      auto ask = [&](Slot& s, Item i) {
        if (i.t < end && mine(i)) {
          const T *grad = gradient(i) + lane * V, *in = input(i) + lane * V;
          copy16(&s.grad[0][me], grad); copy16(&s.grad[1][me], grad + half);
          copy16(&s.in[0][me], in); copy16(&s.in[1][me], in + half);
          copy4(&s.scale[me], scale(i));
        }
        asked();
      };
      Pairs sum;
      Turn of;                      // here the four sums over the heads of a token
      EACH(p, PER) EACH(j, V) sum.a[p][j] = sum.b[p][j] = of.c1[p][j] = of.s1[p][j] = of.c2[p][j] = of.s2[p][j] = 0;
      Item now = {(i64)blockIdx.x * per_chunk + threadIdx.x / 32, 0}, ahead = now;
      if (V > 1) EACH(i, STAGES - 1) { ask(slots[i], ahead); next(ahead); }
      for (int at = 0; now.t < end; at = (at + 1) % STAGES) {
        Pairs o, x;
        float r = 0;
        if (V > 1) {
          wait_for_first();
          ask(slots[(at + STAGES - 1) % STAGES], ahead);
          next(ahead);
        }
        if (mine(now)) {
          Raw grad, in;
          if (V > 1) {
            const Slot& s = slots[at];
            grad.a[0] = *(const Access*)&s.grad[0][me]; grad.b[0] = *(const Access*)&s.grad[1][me];
            in.a[0] = *(const Access*)&s.in[0][me]; in.b[0] = *(const Access*)&s.in[1][me];
            r = s.scale[me];
          } else {
            fetch(grad, gradient(now), half, lane, lanes);
            fetch(in, input(now), half, lane, lanes);
            r = *scale(now);
          }
          widen(o, grad);
          widen(x, in);
          EACH(p, PER) EACH(j, V) {
            const float x1 = x.a[p][j] * r, x2 = x.b[p][j] * r;
            of.c1[p][j] += o.a[p][j] * x1; of.s1[p][j] += o.b[p][j] * x1;
            of.c2[p][j] += o.b[p][j] * x2; of.s2[p][j] += o.a[p][j] * x2;
          }
        }
        const i64 angle = (i64)positions[now.t] * half;
        next(now);
        if (now.h > 0) continue;
        ACCESSES(p) {
          float c[V], s[V];
          load(cos + angle + COLUMN(p), c); load(sin + angle + COLUMN(p), s);
          EACH(j, V) {
            sum.a[p][j] += c[j] * of.c1[p][j] + s[j] * of.s1[p][j];
            sum.b[p][j] += c[j] * of.c2[p][j] - s[j] * of.s2[p][j];
            of.c1[p][j] = of.s1[p][j] = of.c2[p][j] = of.s2[p][j] = 0;
          }
        }
      }
      __syncthreads();
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
