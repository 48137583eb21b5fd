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
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; i++)
// A running softmax sum of one head: o = sum of exp(score - m) v, l = sum of exp(score - m).
struct Sum { float m, l, o[PER][V]; };
DI float weight_of(float m, float top) { return m == -INF ? 0.f : __expf(m - top); }

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
  const int stride = d + 2;
  EACH(h, HEADS) {
    float* to = joined + (group * HEADS + h) * stride;
    EACH(p, PER) EACH(e, V) if (column(p) < d) to[column(p) + e] = s[h].o[p][e];
    if (lane == 0) { to[d] = s[h].m; to[d + 1] = s[h].l; }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * d; i += 128) {
    const int h = i / d, c = i % d;
    float top = -INF, l = 0, r = 0;
    for (int g = 0; g < groups; g++) top = fmaxf(top, joined[(g * HEADS + h) * stride + d]);
    for (int g = 0; g < groups; g++) {
      const float* from = joined + (g * HEADS + h) * stride;
      const float w = weight_of(from[d], top);
      l += w * from[d + 1]; r += w * from[c];
    }
    const i64 head = (i64)t * Nq + h0 + h;
    if (parts == 1) { out[head * d + c] = from_f32<T>(r / l); continue; }
    float* to = partial + (head * parts + part) * stride;
    to[c] = r;
    if (c == 0) { to[d] = top; to[d + 1] = l; }
  }
}
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
