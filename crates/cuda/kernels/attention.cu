// Causal attention of packed sequences, forward and backward, in f32 arithmetic: for f32 tensors, for head sizes cuDNN
// does not take, and wherever cuDNN is absent. Deterministic. D bounds the head size d (a macro); rows are padded to D.
//
// Query t stands at key t + skip of the packed batch and sees the keys start..=t + skip of its own sequence, so a tile of queries may
// cross sequences.
// A block has 128 threads as 16 row groups x 8 lanes. It owns R rows; tiles of the other side have R rows too.
//   scores: a thread computes rows g*RPT + i (i < RPT) against columns lane + 8 j (j < R / 8);
//   results: it owns the same rows and the 4-element columns (8 c + lane) * 4.
// Tiles in shared memory are f32 rows of D + 4, so that 16-byte reads of 8 neighbouring rows meet different banks.
#include "common.cuh"
constexpr int R = D > 128 ? 16 : 32, RPT = R / 16, CPT = R / 8, LD = D + 4, C4 = D / 32, LP = R + 1;
struct Tile { float x[R][LD]; };

// Rows first..first+R of head h of x[tokens, heads, d]; zeros outside.
DI void load_tile(Tile& s, const T* x, int first, int tokens, int heads, int h, int d) {
  for (int i = threadIdx.x; i < R * D; i += 128) {
    const int r = i / D, c = i % D, t = first + r;
    s.x[r][c] = t < tokens && c < d ? to_f32(x[((i64)t * heads + h) * d + c]) : 0.f;
  }
}
// out[i][j] = <a row g*RPT+i, b row lane+8j>
DI void dots(float (&out)[RPT][CPT], const Tile& a, const Tile& b, int g, int lane) {
#pragma unroll
  for (int i = 0; i < RPT; i++)
#pragma unroll
    for (int j = 0; j < CPT; j++) out[i][j] = 0;
#pragma unroll 2
  for (int c = 0; c < D; c += 4) {
    float4 y[CPT];
#pragma unroll
    for (int j = 0; j < CPT; j++) y[j] = *(const float4*)&b.x[lane + 8 * j][c];
#pragma unroll
    for (int i = 0; i < RPT; i++) {
      const float4 x = *(const float4*)&a.x[g * RPT + i][c];
#pragma unroll
      for (int j = 0; j < CPT; j++) out[i][j] += x.x * y[j].x + x.y * y[j].y + x.z * y[j].z + x.w * y[j].w;
    }
  }
}
// acc[i] += sum_j p[row i][j] * b row j
DI void accumulate(float4 (&acc)[RPT][C4], const float (*p)[LP], const Tile& b, int g, int lane) {
#pragma unroll 4
  for (int j = 0; j < R; j++) {
    float w[RPT];
#pragma unroll
    for (int i = 0; i < RPT; i++) w[i] = p[g * RPT + i][j];
#pragma unroll
    for (int c = 0; c < C4; c++) {
      const float4 y = *(const float4*)&b.x[j][(8 * c + lane) * 4];
#pragma unroll
      for (int i = 0; i < RPT; i++) { acc[i][c].x += w[i] * y.x; acc[i][c].y += w[i] * y.y; acc[i][c].z += w[i] * y.z; acc[i][c].w += w[i] * y.w; }
    }
  }
}
DI void store_rows(T* x, const float4 (&acc)[RPT][C4], const float (&factor)[RPT], int first, int tokens, int heads, int h, int d, int g, int lane) {
#pragma unroll
  for (int i = 0; i < RPT; i++) {
    const int t = first + g * RPT + i;
    if (t >= tokens) continue;
    T* row = x + ((i64)t * heads + h) * d;
#pragma unroll
    for (int c = 0; c < C4; c++) {
      const int at = (8 * c + lane) * 4;
      const float v[4] = {acc[i][c].x, acc[i][c].y, acc[i][c].z, acc[i][c].w};
#pragma unroll
      for (int e = 0; e < 4; e++) if (at + e < d) row[at + e] = from_f32<T>(v[e] * factor[i]);
    }
  }
}
DI void clear(float4 (&acc)[RPT][C4]) {
#pragma unroll
  for (int i = 0; i < RPT; i++)
#pragma unroll
    for (int c = 0; c < C4; c++) acc[i][c] = make_float4(0, 0, 0, 0);
}
#define SETUP() \
  extern __shared__ Tile tiles[]; \
  const int g = threadIdx.x / 8, lane = threadIdx.x % 8, h = blockIdx.y; \
  const int first = (gridDim.x - 1 - blockIdx.x) * R  // the longest rows start first

KERNEL attention(T* o, float* lse, const T* q, const T* k, const T* v, const int* cu, int sequences, int tokens, int skip, int Nq, int Nk, int d, float scale) {
  SETUP();
  Tile &Q = tiles[0], &K = tiles[1], &W = tiles[2];
  float (*P)[LP] = (float (*)[LP])&tiles[3];
  const int kv = h / (Nq / Nk), last = min(first + R, tokens);
  int start[RPT];
  float m[RPT], l[RPT], s[RPT][CPT];
  float4 acc[RPT][C4];
  clear(acc);
#pragma unroll
  for (int i = 0; i < RPT; i++) {
    start[i] = cu[sequence_of(cu, sequences, min(first + g * RPT + i, tokens - 1) + skip)];
    m[i] = -INF; l[i] = 0;
  }
  load_tile(Q, q, first, tokens, Nq, h, d);
  for (int kt = cu[sequence_of(cu, sequences, first + skip)]; kt < last + skip; kt += R) {
    __syncthreads();
    load_tile(K, k, kt, tokens + skip, Nk, kv, d);
    load_tile(W, v, kt, tokens + skip, Nk, kv, d);
    __syncthreads();
    dots(s, Q, K, g, lane);
#pragma unroll
    for (int i = 0; i < RPT; i++) {
      const int t = first + g * RPT + i;
      float top = -INF, sum = 0;
#pragma unroll
      for (int j = 0; j < CPT; j++) {
        const int key = kt + lane + 8 * j;
        s[i][j] = key <= t + skip && key >= start[i] && t < tokens ? s[i][j] * scale : -INF;
        top = fmaxf(top, s[i][j]);
      }
      for (int x = 4; x > 0; x /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
      top = fmaxf(top, m[i]);
      const float old = top == -INF ? 1.f : expf(m[i] - top);
#pragma unroll
      for (int j = 0; j < CPT; j++) {
        const float p = top == -INF ? 0.f : expf(s[i][j] - top);
        sum += p;
        P[g * RPT + i][lane + 8 * j] = p;
      }
      l[i] = l[i] * old + group_sum(sum, 8);
      m[i] = top;
#pragma unroll
      for (int c = 0; c < C4; c++) { acc[i][c].x *= old; acc[i][c].y *= old; acc[i][c].z *= old; acc[i][c].w *= old; }
    }
    __syncwarp();  // a row of P is written and read by the same 8 lanes
    accumulate(acc, P, W, g, lane);
  }
  float factor[RPT];
#pragma unroll
  for (int i = 0; i < RPT; i++) {
    const int t = first + g * RPT + i;
    factor[i] = 1.f / l[i];
    if (t < tokens && lane == 0) lse[(i64)t * Nq + h] = m[i] + logf(l[i]);
  }
  store_rows(o, acc, factor, first, tokens, Nq, h, d, g, lane);
}

// delta[t, h] = <dout, o>; one warp a (token, head).
KERNEL attention_delta(float* delta, const T* dout, const T* o, i64 rows, int d) {
  const i64 r = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  if (r >= rows) return;
  float s = 0;
  for (int c = threadIdx.x % 32; c < d; c += 32) s += to_f32(dout[r * d + c]) * to_f32(o[r * d + c]);
  s = warp_sum(s);
  if (threadIdx.x % 32 == 0) delta[r] = s;
}

// dS = P * (dP - delta) * scale with P = exp(scale * Q K^T - lse), dP = dO V^T.  dQ = dS K. The first token of a sequence
// sees only itself: its dS is zero, and is set to that rather than left to rounding.
KERNEL attention_grad_q(T* dq, const T* dout, const float* lse, const float* delta, const T* q, const T* k, const T* v, const int* cu, int sequences,
                        int tokens, int skip, int Nq, int Nk, int d, float scale) {
  SETUP();
  Tile &Q = tiles[0], &G = tiles[1], &K = tiles[2], &W = tiles[3];
  float (*P)[LP] = (float (*)[LP])&tiles[4];
  const int kv = h / (Nq / Nk), last = min(first + R, tokens);
  int start[RPT];
  float top[RPT], del[RPT], s[RPT][CPT], dp[RPT][CPT], factor[RPT];
  float4 acc[RPT][C4];
  clear(acc);
#pragma unroll
  for (int i = 0; i < RPT; i++) {
    const int t = min(first + g * RPT + i, tokens - 1);
    start[i] = cu[sequence_of(cu, sequences, t + skip)];
    top[i] = lse[(i64)t * Nq + h]; del[i] = delta[(i64)t * Nq + h]; factor[i] = 1;
  }
  load_tile(Q, q, first, tokens, Nq, h, d);
  load_tile(G, dout, first, tokens, Nq, h, d);
  for (int kt = cu[sequence_of(cu, sequences, first + skip)]; kt < last + skip; kt += R) {
    __syncthreads();
    load_tile(K, k, kt, tokens + skip, Nk, kv, d);
    load_tile(W, v, kt, tokens + skip, Nk, kv, d);
    __syncthreads();
    dots(s, Q, K, g, lane);
    dots(dp, G, W, g, lane);
#pragma unroll
    for (int i = 0; i < RPT; i++)
#pragma unroll
      for (int j = 0; j < CPT; j++) {
        const int t = first + g * RPT + i, key = kt + lane + 8 * j;
        const bool seen = key <= t + skip && key >= start[i] && t < tokens;
        P[g * RPT + i][lane + 8 * j] = seen && t + skip > start[i] ? expf(s[i][j] * scale - top[i]) * (dp[i][j] - del[i]) * scale : 0.f;
      }
    __syncwarp();
    accumulate(acc, P, K, g, lane);
  }
  store_rows(dq, acc, factor, first, tokens, Nq, h, d, g, lane);
}

// dV = P^T dO and dK = dS^T Q, summed over the query heads of the group in order. The block owns R keys of one key head.
KERNEL attention_grad_kv(T* dk, T* dv, const T* dout, const float* lse, const float* delta, const T* q, const T* k, const T* v, const int* cu, int sequences,
                         int tokens, int skip, int Nq, int Nk, int d, float scale) {
  extern __shared__ Tile tiles[];
  const int g = threadIdx.x / 8, lane = threadIdx.x % 8, kv = blockIdx.y, first = blockIdx.x * R, keys = tokens + skip;
  Tile &K = tiles[0], &W = tiles[1], &Q = tiles[2], &G = tiles[3];
  float (*P)[LP] = (float (*)[LP])&tiles[4];
  float (*S)[LP] = P + R;
  int begin[RPT], end[RPT];
  float s[RPT][CPT], dp[RPT][CPT], factor[RPT];
  float4 ak[RPT][C4], av[RPT][C4];
  clear(ak); clear(av);
#pragma unroll
  for (int i = 0; i < RPT; i++) {
    const int own = sequence_of(cu, sequences, min(first + g * RPT + i, keys - 1));
    begin[i] = cu[own]; end[i] = cu[own + 1];
    factor[i] = 1;
  }
  const int stop = cu[sequence_of(cu, sequences, min(first + R, keys) - 1) + 1] - skip;  // a row of q
  load_tile(K, k, first, keys, Nk, kv, d);
  load_tile(W, v, first, keys, Nk, kv, d);
  for (int h = kv * (Nq / Nk); h < (kv + 1) * (Nq / Nk); h++)
    for (int qt = max(first - skip, 0); qt < stop; qt += R) {
      __syncthreads();
      load_tile(Q, q, qt, tokens, Nq, h, d);
      load_tile(G, dout, qt, tokens, Nq, h, d);
      __syncthreads();
      dots(s, K, Q, g, lane);
      dots(dp, W, G, g, lane);
#pragma unroll
      for (int j = 0; j < CPT; j++) {
        const int t = qt + lane + 8 * j;
        const float top = t < stop ? lse[(i64)t * Nq + h] : 0.f, del = t < stop ? delta[(i64)t * Nq + h] : 0.f;
#pragma unroll
        for (int i = 0; i < RPT; i++) {
          const int key = first + g * RPT + i;
          const bool seen = key <= t + skip && t + skip < end[i] && key < keys;
          const float p = seen ? expf(s[i][j] * scale - top) : 0.f;
          P[g * RPT + i][lane + 8 * j] = p;
          S[g * RPT + i][lane + 8 * j] = seen && t + skip > begin[i] ? p * (dp[i][j] - del) * scale : 0.f;
        }
      }
      __syncwarp();
      accumulate(av, P, G, g, lane);
      accumulate(ak, S, Q, g, lane);
    }
  store_rows(dk, ak, factor, first, keys, Nk, kv, d, g, lane);
  store_rows(dv, av, factor, first, keys, Nk, kv, d, g, lane);
}
