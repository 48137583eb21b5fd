// Causal attention of packed sequences in bf16 on the tensor cores (mma.sync, sm_80 and later), forward and backward:
// FlashAttention-2 (Dao 2023) for head sizes d <= D, d a multiple of 8. Deterministic: dQ has its own kernel, and the query
// heads of a group are summed in order. Serves where cuDNN does not; attention.cu serves every other case.
//
// Query t stands at key t + skip and sees the keys start..=t + skip of its own sequence. A block of 4 warps owns 64 rows, 16 a warp; tiles have 64 rows of
// D + 8 elements (so that the 8 rows of an ldmatrix meet different banks), zero outside the batch and past d.
// Fragments: results c[n][0..4] of a warp are row lane/4 (0, 1) and row lane/4 + 8 (2, 3), columns 8 n + lane%4 * 2 + {0, 1}.
#include "common.cuh"
constexpr int B = 64, LD = D + 8;
constexpr int QT = D > 64 ? 32 : 64;  // queries a step of attention_grad_kv, which holds two results a row in registers
struct alignas(16) Tile { bf16 x[B][LD]; };

DI u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DI void ldmatrix(u32 (&r)[4], const bf16* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem_u32(at)));
}
DI void ldmatrix_t(u32 (&r)[4], const bf16* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem_u32(at)));
}
DI void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Starts loading rows first..first+ROWS of head h of x[tokens, heads, d].
template <int ROWS = B> DI void fetch(Tile& s, const bf16* x, int first, int tokens, int heads, int h, int d) {
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * D / 8; i += 128) {
    const int r = i / (D / 8), c = i % (D / 8) * 8, t = first + r;
    const bool live = t < tokens && c < d;
    const bf16* from = live ? x + ((i64)t * heads + h) * d + c : x;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_u32(&s.x[r][c])), "l"(from), "r"(live ? 16 : 0) : "memory");
  }
}
DI void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); __syncthreads(); }
// out = rows row..row+16 of a times the 8 N first rows of b, over D.
template <int N> DI void rows_by_rows(float (&out)[N][4], const Tile& a, int row, const Tile& b) {
  const int lane = threadIdx.x % 32, l8 = lane % 8, m = lane / 8;
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) out[n][e] = 0;
#pragma unroll 2  // all at once would take registers that attention_grad_kv does not have
  for (int k = 0; k < D; k += 16) {
    u32 fa[4], fb[4];
    ldmatrix(fa, &a.x[row + lane % 16][k + lane / 16 * 8]);
#pragma unroll
    for (int n = 0; n < 8 * N; n += 16) {
      ldmatrix(fb, &b.x[n + m / 2 * 8 + l8][k + m % 2 * 8]);
      mma(out[n / 8], fa, fb[0], fb[1]);
      mma(out[n / 8 + 1], fa, fb[2], fb[3]);
    }
  }
}
// acc += p (16 x 8 N, the results of `rows_by_rows`, rounded to bf16) times the 8 N first rows of b.
template <int N> DI void accumulate(float (&acc)[D / 8][4], const float (&p)[N][4], const Tile& b) {
  const int lane = threadIdx.x % 32, l8 = lane % 8, m = lane / 8;
#pragma unroll
  for (int k = 0; k < 8 * N; k += 16) {
    const int j = k / 8;
    const u32 fa[4] = {pack_bf16(p[j][0], p[j][1]), pack_bf16(p[j][2], p[j][3]), pack_bf16(p[j + 1][0], p[j + 1][1]), pack_bf16(p[j + 1][2], p[j + 1][3])};
#pragma unroll
    for (int n = 0; n < D; n += 16) {
      u32 fb[4];
      ldmatrix_t(fb, &b.x[k + m % 2 * 8 + l8][n + m / 2 * 8]);
      mma(acc[n / 8], fa, fb[0], fb[1]);
      mma(acc[n / 8 + 1], fa, fb[2], fb[3]);
    }
  }
}
DI void clear(float (&acc)[D / 8][4]) {
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) acc[n][e] = 0;
}
// Writes the warp's 16 rows, each times its factor.
DI void store_rows(bf16* x, const float (&acc)[D / 8][4], float f0, float f1, int row, int tokens, int heads, int h, int d) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int t = row + lane / 4 + 8 * half;
    if (t >= tokens) continue;
    u32* out = (u32*)(x + ((i64)t * heads + h) * d);
    const float f = half ? f1 : f0;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      if (8 * n < d) out[4 * n + lane % 4] = pack_bf16(acc[n][2 * half] * f, acc[n][2 * half + 1] * f);
  }
}
DI float quad_sum(float x) { x += __shfl_xor_sync(~0u, x, 1); return x + __shfl_xor_sync(~0u, x, 2); }
DI float quad_max(float x) { x = fmaxf(x, __shfl_xor_sync(~0u, x, 1)); return fmaxf(x, __shfl_xor_sync(~0u, x, 2)); }
#define SETUP() \
  extern __shared__ Tile tiles[]; \
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp * 16, h = blockIdx.y; \
  const int first = (gridDim.x - 1 - blockIdx.x) * B  /* the longest rows start first */

KERNEL __launch_bounds__(128) attention(bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v, const int* cu, int sequences, int tokens,
                                        int skip, int Nq, int Nk, int d, float scale) {
  SETUP();
  const int kv = h / (Nq / Nk), last = min(first + B, tokens);
  int start[2];
  float m[2] = {-INF, -INF}, l[2] = {0, 0}, s[B / 8][4], acc[D / 8][4];
  clear(acc);
#pragma unroll
  for (int i = 0; i < 2; i++) start[i] = cu[sequence_of(cu, sequences, min(first + own + lane / 4 + 8 * i, tokens - 1) + skip)];
  fetch(tiles[0], q, first, tokens, Nq, h, d);
  for (int kt = cu[sequence_of(cu, sequences, first + skip)]; kt < last + skip; kt += B) {
    __syncthreads();
    fetch(tiles[1], k, kt, tokens + skip, Nk, kv, d);
    fetch(tiles[2], v, kt, tokens + skip, Nk, kv, d);
    arrived();
    rows_by_rows(s, tiles[0], own, tiles[1]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = first + own + lane / 4 + 8 * i;
      float top = m[i], sum = 0;
#pragma unroll
      for (int n = 0; n < B / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int key = kt + 8 * n + lane % 4 * 2 + e;
          float& x = s[n][2 * i + e];
          x = key <= t + skip && key >= start[i] && t < tokens ? x * scale : -INF;
          top = fmaxf(top, x);
        }
      top = quad_max(top);
      const float old = top == -INF ? 1.f : __expf(m[i] - top);
#pragma unroll
      for (int n = 0; n < B / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[n][2 * i + e];
          x = top == -INF ? 0.f : __expf(x - top);
          sum += x;
        }
      l[i] = l[i] * old + quad_sum(sum);
      m[i] = top;
#pragma unroll
      for (int n = 0; n < D / 8; n++) { acc[n][2 * i] *= old; acc[n][2 * i + 1] *= old; }
    }
    accumulate(acc, s, tiles[2]);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = first + own + lane / 4 + 8 * i;
    if (t < tokens && lane % 4 == 0) lse[(i64)t * Nq + h] = m[i] + logf(l[i]);
  }
  store_rows(o, acc, 1.f / l[0], 1.f / l[1], first + own, tokens, Nq, h, d);
}

// dS = P * (dP - delta) * scale with P = exp(scale * Q K^T - lse), dP = dO V^T; zero for the first token of a sequence, which
// sees only itself.  dQ = dS K.
KERNEL __launch_bounds__(128) attention_grad_q(bf16* dq, const bf16* dout, const float* lse, const float* delta, const bf16* q, const bf16* k, const bf16* v,
                                               const int* cu, int sequences, int tokens, int skip, int Nq, int Nk, int d, float scale) {
  SETUP();
  const int kv = h / (Nq / Nk), last = min(first + B, tokens);
  int start[2];
  float top[2], del[2], s[B / 8][4], dp[B / 8][4], acc[D / 8][4];
  clear(acc);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = min(first + own + lane / 4 + 8 * i, tokens - 1);
    start[i] = cu[sequence_of(cu, sequences, t + skip)];
    top[i] = lse[(i64)t * Nq + h]; del[i] = delta[(i64)t * Nq + h];
  }
  fetch(tiles[0], q, first, tokens, Nq, h, d);
  fetch(tiles[1], dout, first, tokens, Nq, h, d);
  for (int kt = cu[sequence_of(cu, sequences, first + skip)]; kt < last + skip; kt += B) {
    __syncthreads();
    fetch(tiles[2], k, kt, tokens + skip, Nk, kv, d);
    fetch(tiles[3], v, kt, tokens + skip, Nk, kv, d);
    arrived();
    rows_by_rows(s, tiles[0], own, tiles[2]);
    rows_by_rows(dp, tiles[1], own, tiles[3]);
#pragma unroll
    for (int n = 0; n < B / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int i = e / 2, t = first + own + lane / 4 + 8 * i, key = kt + 8 * n + lane % 4 * 2 + e % 2;
        const bool seen = key <= t + skip && key >= start[i] && t + skip > start[i] && t < tokens;
        s[n][e] = seen ? __expf(s[n][e] * scale - top[i]) * (dp[n][e] - del[i]) * scale : 0.f;
      }
    accumulate(acc, s, tiles[2]);
  }
  store_rows(dq, acc, 1.f, 1.f, first + own, tokens, Nq, h, d);
}

// dV = P^T dO and dK = dS^T Q. The block owns 64 keys of one key head; scores are computed transposed, keys x queries.
KERNEL __launch_bounds__(128) attention_grad_kv(bf16* dk, bf16* dv, const bf16* dout, const float* lse, const float* delta, const bf16* q, const bf16* k,
                                                const bf16* v, const int* cu, int sequences, int tokens, int skip, int Nq, int Nk, int d, float scale) {
  extern __shared__ Tile tiles[];
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16, kv = blockIdx.y, first = blockIdx.x * B, keys = tokens + skip;
  int begin[2], end[2];
  float s[QT / 8][4], dp[QT / 8][4], ak[D / 8][4], av[D / 8][4];
  clear(ak); clear(av);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int x = sequence_of(cu, sequences, min(first + own + lane / 4 + 8 * i, keys - 1));
    begin[i] = cu[x]; end[i] = cu[x + 1];
  }
  const int stop = cu[sequence_of(cu, sequences, min(first + B, keys) - 1) + 1] - skip;  // a row of q
  fetch(tiles[0], k, first, keys, Nk, kv, d);
  fetch(tiles[1], v, first, keys, Nk, kv, d);
  for (int h = kv * (Nq / Nk); h < (kv + 1) * (Nq / Nk); h++)
    for (int qt = max(first - skip, 0); qt < stop; qt += QT) {
      __syncthreads();
      fetch<QT>(tiles[2], q, qt, tokens, Nq, h, d);
      fetch<QT>(tiles[3], dout, qt, tokens, Nq, h, d);
      arrived();
      rows_by_rows(s, tiles[0], own, tiles[2]);
#pragma unroll
      for (int n = 0; n < QT / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int i = e / 2, key = first + own + lane / 4 + 8 * i, t = qt + 8 * n + lane % 4 * 2 + e % 2;
          const bool seen = key <= t + skip && t + skip < end[i] && key < keys;
          s[n][e] = seen ? __expf(s[n][e] * scale - lse[(i64)t * Nq + h]) : 0.f;
        }
      accumulate(av, s, tiles[3]);
      rows_by_rows(dp, tiles[1], own, tiles[3]);
#pragma unroll
      for (int n = 0; n < QT / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int t = qt + 8 * n + lane % 4 * 2 + e % 2;
          s[n][e] = s[n][e] != 0.f && t + skip > begin[e / 2] ? s[n][e] * (dp[n][e] - delta[(i64)t * Nq + h]) * scale : 0.f;
        }
      accumulate(ak, s, tiles[2]);
    }
  store_rows(dk, ak, 1.f, 1.f, first + own, keys, Nk, kv, d);
  store_rows(dv, av, 1.f, 1.f, first + own, keys, Nk, kv, d);
}
