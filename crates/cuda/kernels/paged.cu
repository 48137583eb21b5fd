// Generation: a paged KV cache and attention against it. D (head size) <= 256.
#include "common.cuh"

struct alignas(V * sizeof(T)) Access { T x[V]; };

// Row slots[t] of the caches takes k[t], v[t], `width` accesses each; a negative slot is skipped. One block a token.
KERNEL kv_cache_write(Access* cache_k, Access* cache_v, const Access* k, const Access* v, const int* slots, int width) {
  const i64 t = blockIdx.x, slot = slots[t];
  if (slot < 0) return;
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    cache_k[slot * width + c] = k[t * width + c];
    cache_v[slot * width + c] = v[t * width + c];
  }
}

// One block of 128 threads takes (query row t, up to HEADS query heads of one key head, a part of the keys): keys and values are
// read once for all those heads. A group of `lanes` lanes takes BATCH keys at a time; a lane holds PER accesses of V elements of
// a head. The groups' softmax sums are joined at the end; with several parts, those of the parts by `paged_join`.
//   partial[t, query head, part]: D sums, then the largest score and the sum of exponentials.
#define HEADS 4
#define BATCH 4
#define CHUNK 256  // keys whose rows in the cache are looked up at once
#define PER (V == 1 ? 8 : sizeof(T) == 4 ? 2 : 1)
// A running softmax sum of one head: o = sum of exp(score - m) v, l = sum of exp(score - m).
struct Sum { float m, l, o[PER][V]; };
DI float weight_of(float m, float top) { return m == -INF ? 0.f : __expf(m - top); }
// Joins what the groups of a block have of `heads` heads, from `head` on: joined[group, SLOTS, d + 2].
template <int SLOTS> DI void join_groups(T* out, float* partial, const float* joined, int groups, int heads, i64 head, int d, int parts, int part) {
  const int stride = d + 2;
  __syncthreads();
  for (int i = threadIdx.x; i < heads * d; i += 128) {
    const int h = i / d, c = i % d;
    float top = -INF, l = 0, r = 0;
    for (int g = 0; g < groups; g++) top = fmaxf(top, joined[(g * SLOTS + h) * stride + d]);
    for (int g = 0; g < groups; g++) {
      const float* from = joined + (g * SLOTS + h) * stride;
      const float w = weight_of(from[d], top);
      l += w * from[d + 1]; r += w * from[c];
    }
    if (parts == 1) { out[(head + h) * d + c] = from_f32<T>(r / l); continue; }
    float* to = partial + ((head + h) * parts + part) * stride;
    to[c] = r;
    if (c == 0) { to[d] = top; to[d + 1] = l; }
  }
}

KERNEL __launch_bounds__(128) paged_attention(T* out, float* partial, const T* __restrict__ q, const T* __restrict__ cache_k,
    const T* __restrict__ cache_v, const int* cu_q, const int* context, const int* blocks, int sequences, int max_blocks,
    int block_size, int Nq, int Nk, int d, float scale, int parts, int lanes) {
  extern __shared__ float joined[];  // [groups, HEADS, d + 2]
  __shared__ int rows[CHUNK];
  const int t = blockIdx.x, per_key = Nq / Nk, sets = (per_key + HEADS - 1) / HEADS, kv = blockIdx.y / sets, part = blockIdx.z;
  const int h0 = kv * per_key + blockIdx.y % sets * HEADS, heads = min(HEADS, (kv + 1) * per_key - h0);
  const int b = sequence_of(cu_q, sequences, t);
  const int keys = context[b] - (cu_q[b + 1] - cu_q[b]) + (t - cu_q[b]) + 1;
  const int size = (keys + parts - 1) / parts, first = part * size, end = min(first + size, keys);
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = 128 / lanes;
  auto column = [&](int p) { return (lane + p * lanes) * V; };
  float x[HEADS][PER][V];
  Sum s[HEADS];
  EACH(h, HEADS) {
    s[h].m = -INF; s[h].l = 0;
    EACH(p, PER) {
      EACH(e, V) x[h][p][e] = s[h].o[p][e] = 0;
      if (h < heads && column(p) < d) load(q + ((i64)t * Nq + h0 + h) * d + column(p), x[h][p]);
    }
  }
  for (int base = first; base < end; base += CHUNK) {
    const int n = min(CHUNK, end - base);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 128)
      rows[i] = blocks[(i64)b * max_blocks + (base + i) / block_size] * block_size + (base + i) % block_size;
    __syncthreads();
    for (int j = group * BATCH; j - group * BATCH < n; j += groups * BATCH) {  // all groups go round equally often
      Access k[BATCH][PER], v[BATCH][PER];
      EACH(i, BATCH) {
        const i64 at = ((i64)rows[min(j + i, n - 1)] * Nk + kv) * d;
        EACH(p, PER) if (column(p) < d) { k[i][p] = *(const Access*)(cache_k + at + column(p)); v[i][p] = *(const Access*)(cache_v + at + column(p)); }
      }
      EACH(h, HEADS) {
        float c[BATCH], top = s[h].m;
        EACH(i, BATCH) {
          c[i] = 0;
          EACH(p, PER) if (column(p) < d) EACH(e, V) c[i] += x[h][p][e] * to_f32(k[i][p].x[e]);
          c[i] = group_sum(c[i], lanes) * scale;
          if (j + i >= n) c[i] = -INF;
          top = fmaxf(top, c[i]);
        }
        const float old = weight_of(s[h].m, top);
        s[h].m = top; s[h].l *= old;
        EACH(p, PER) EACH(e, V) s[h].o[p][e] *= old;
        EACH(i, BATCH) {
          const float w = weight_of(c[i], top);
          s[h].l += w;
          EACH(p, PER) if (column(p) < d) EACH(e, V) s[h].o[p][e] += w * to_f32(v[i][p].x[e]);
        }
      }
    }
  }
  EACH(h, HEADS) {
    float* to = joined + (group * HEADS + h) * (d + 2);
    EACH(p, PER) EACH(e, V) if (column(p) < d) to[column(p) + e] = s[h].o[p][e];
    if (lane == 0) { to[d] = s[h].m; to[d + 1] = s[h].l; }
  }
  join_groups<HEADS>(out, partial, joined, groups, heads, (i64)t * Nq + h0, d, parts, part);
}

#if V == 8
// ---- the same in bf16 on the tensor cores (mma.sync m16n8k16), for heads of exactly D ----
// A block takes up to ROWS query heads of a key head; the other eight rows of a product stay empty. A warp takes 16 keys at a time, each
// read once, from memory straight into the operands: lane 4 g + j holds of keys g and g + 8 the columns 32 c + 8 j .. + 8 of every chunk c
// of 32, of which register i has two. The depth of Q K^T may be summed in any order, so these are its operands as they are, Q being held
// likewise. P V wants pairs along the keys: `movmatrix` turns 8 keys x 8 columns (one register of a warp) over.
#define ROWS 8
struct alignas(16) Quad { u32 x[4]; };
// (c0, c1) += rows 0..8 of a product; rows 8..16 of a are zero.
DI void mma(float (&c)[2], u32 a0, u32 a2, u32 b0, u32 b1) {
  float none0 = 0, none1 = 0;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(none0), "+f"(none1) : "r"(a0), "r"(0u), "r"(a2), "r"(b0), "r"(b1));
}
DI u32 turned(u32 x) { u32 y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y; }

template <int D> DI void paged_rows(T* out, float* partial, const T* q, const T* cache_k, const T* cache_v, const int* cu_q, const int* context,
    const int* blocks, int sequences, int max_blocks, int block_size, int Nq, int Nk, float scale, int parts) {
  constexpr int C = D / 32;
  extern __shared__ float sums[];  // [4 warps, ROWS, D + 2]
  const int t = blockIdx.x, per_key = Nq / Nk, sets = (per_key + ROWS - 1) / ROWS, kv = blockIdx.y / sets, part = blockIdx.z;
  const int h0 = kv * per_key + blockIdx.y % sets * ROWS, heads = min(ROWS, (kv + 1) * per_key - h0);
  const int b = sequence_of(cu_q, sequences, t);
  const int keys = context[b] - (cu_q[b + 1] - cu_q[b]) + (t - cu_q[b]) + 1;
  const int size = (keys + parts - 1) / parts, first = part * size, end = min(first + size, keys);
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  const int* own = blocks + (i64)b * max_blocks;
  auto fetch = [&](Quad (&to)[2][C], const T* cache, const i64 (&at)[2]) { EACH(u, 2) EACH(c, C) to[u][c] = *(const Quad*)(cache + at[u] + 32 * c); };
  auto find = [&](i64 (&at)[2], int base) {  // keys past the end: the last one, which then weighs nothing
    EACH(u, 2) {
      const int key = min(base + 8 * u + g, end - 1);
      at[u] = (((i64)own[key / block_size] * block_size + key % block_size) * Nk + kv) * D + 8 * j;
    }
  };
  Quad x[C] = {}, k[2][C], v[2][C];
  if (g < heads) EACH(c, C) x[c] = *(const Quad*)(q + ((i64)t * Nq + h0 + g) * D + 32 * c + 8 * j);
  float m = -INF, l = 0, o[C][4][2] = {};
  int base = first + 16 * warp;
  i64 at[2];
  if (base < end) { find(at, base); fetch(k, cache_k, at); fetch(v, cache_v, at); }
  for (; base < end; base += 64) {
    float s[2][2] = {}, top = m;
    EACH(c, C) EACH(u, 2) {
      mma(s[u], x[c].x[0], x[c].x[1], k[u][c].x[0], k[u][c].x[1]);
      mma(s[u], x[c].x[2], x[c].x[3], k[u][c].x[2], k[u][c].x[3]);
    }
    const bool more = base + 64 < end;  // keys and values of the next round are on their way while this one is computed
    if (more) { find(at, base + 64); fetch(k, cache_k, at); }
    EACH(u, 2) EACH(e, 2) {
      s[u][e] = base + 8 * u + 2 * j + e < end ? s[u][e] * scale : -INF;
      top = fmaxf(top, s[u][e]);
    }
    EACH(i, 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i + 1));
    const float old = weight_of(m, top);
    m = top; l *= old;
    EACH(u, 2) EACH(e, 2) { s[u][e] = weight_of(s[u][e], top); l += s[u][e]; }
    EACH(c, C) EACH(i, 4) EACH(e, 2) o[c][i][e] *= old;
    const u32 p0 = pack_bf16(s[0][0], s[0][1]), p8 = pack_bf16(s[1][0], s[1][1]);
    EACH(c, C) EACH(i, 4) mma(o[c][i], p0, p8, turned(v[0][c].x[i]), turned(v[1][c].x[i]));
    if (more) fetch(v, cache_v, at);
  }
  EACH(i, 2) l += __shfl_xor_sync(~0u, l, i + 1);
  float* to = sums + (warp * ROWS + g) * (D + 2);
  EACH(c, C) EACH(i, 4) EACH(e, 2) to[32 * c + 8 * j + 2 * i + e] = o[c][i][e];
  if (j == 0) { to[D] = m; to[D + 1] = l; }
  join_groups<ROWS>(out, partial, sums, 4, heads, (i64)t * Nq + h0, D, parts, part);
}
#define PAGED_ROWS(D)                                                                                                                \
  KERNEL __launch_bounds__(128, 2) paged_attention_##D(T* out, float* partial, const T* __restrict__ q, const T* __restrict__ cache_k, \
      const T* __restrict__ cache_v, const int* __restrict__ cu_q, const int* __restrict__ context, const int* __restrict__ blocks,   \
      int sequences, int max_blocks, int block_size, int Nq, int Nk, int d, float scale, int parts, int lanes) {                       \
    paged_rows<D>(out, partial, q, cache_k, cache_v, cu_q, context, blocks, sequences, max_blocks, block_size, Nq, Nk, scale, parts);  \
  }
PAGED_ROWS(64) PAGED_ROWS(128)
#endif

// One block a (query row, query head).
KERNEL paged_join(T* out, const float* partial, int d, int parts) {
  const i64 head = blockIdx.x;
  const int stride = d + 2;
  partial += head * parts * stride;
  float top = -INF, l = 0;
  for (int k = 0; k < parts; k++) top = fmaxf(top, partial[k * stride + d]);
  for (int k = 0; k < parts; k++) l += weight_of(partial[k * stride + d], top) * partial[k * stride + d + 1];
  for (int c = threadIdx.x; c < d; c += blockDim.x) {
    float r = 0;
    for (int k = 0; k < parts; k++) r += weight_of(partial[k * stride + d], top) * partial[k * stride + c];
    out[head * d + c] = from_f32<T>(r / l);
  }
}
