// A stable counting sort of int keys by a digit of 8 bits, in three launches: count per tile, scan, scatter. One pass
// sorts rows by expert (up to 256, or 255 and those that are elsewhere); three passes sort tokens by id.
#include "common.cuh"
#define TILE 2048
#define WARPS 8
#define PER_WARP (TILE / WARPS)
#define DIGITS 256
// With `count`, the digit of a key is its distance from `first`, and `count` for keys outside first .. first + count.
DI int digit_of(int key, int shift, int first, int count) {
  if (!count) return (key >> shift) & (DIGITS - 1);
  const u32 d = (u32)key - (u32)first;
  return min(d, (u32)min(count, DIGITS - 1));
}

// counts[digit, tile]
KERNEL sort_count(int* counts, const int* keys, int n, int shift, int first_key, int count, int tiles) {
  __shared__ int c[DIGITS];
  c[threadIdx.x] = 0;
  __syncthreads();
  const int first = blockIdx.x * TILE;
  for (int i = first + threadIdx.x; i < min(first + TILE, n); i += 256) atomicAdd(&c[digit_of(keys[i], shift, first_key, count)], 1);
  __syncthreads();
  counts[threadIdx.x * tiles + blockIdx.x] = c[threadIdx.x];
}
// Exclusive prefix sum of counts[digit, tile] in place, by one block of 1024 threads; `offsets` (may be null) takes the
// first place of each digit up to `last`.
KERNEL sort_scan(int* counts, int* offsets, int last, int n, int tiles) {
  __shared__ int warp[32];
  const int lane = threadIdx.x % 32, w = threadIdx.x / 32;
  int base = 0;
  for (int start = 0; start < DIGITS * tiles; start += 1024) {
    const int i = start + threadIdx.x, v = i < DIGITS * tiles ? counts[i] : 0;
    int x = v;
    for (int o = 1; o < 32; o *= 2) { int y = __shfl_up_sync(~0u, x, o); if (lane >= o) x += y; }
    if (lane == 31) warp[w] = x;
    __syncthreads();
    if (w == 0) {
      int y = warp[lane];
      for (int o = 1; o < 32; o *= 2) { int z = __shfl_up_sync(~0u, y, o); if (lane >= o) y += z; }
      warp[lane] = y;
    }
    __syncthreads();
    const int place = base + x - v + (w ? warp[w - 1] : 0);
    if (i < DIGITS * tiles) {
      counts[i] = place;
      if (offsets && i % tiles == 0 && i / tiles <= last) offsets[i / tiles] = place;
    }
    base += warp[31];
    __syncthreads();
  }
  if (offsets && threadIdx.x == 0 && last == DIGITS) offsets[last] = n;
}
// Writes each item to its place. Items are visited in order by the warp that owns them, so equal digits keep their order.
// `values` null: the value of item i is i. `inverse` (may be null): inverse[value] = place. Other outputs may be null.
KERNEL sort_scatter(int* out_keys, int* out_values, int* inverse, const int* places, const int* keys, const int* values,
                    int n, int shift, int first_key, int count, int tiles) {
  __shared__ int next[WARPS][DIGITS];
  const int lane = threadIdx.x % 32, w = threadIdx.x / 32;
  for (int i = threadIdx.x; i < WARPS * DIGITS; i += 256) ((int*)next)[i] = 0;
  __syncthreads();
  const int first = blockIdx.x * TILE + w * PER_WARP, end = min(first + PER_WARP, n);
  for (int i = first + lane; i < end; i += 32) atomicAdd(&next[w][digit_of(keys[i], shift, first_key, count)], 1);
  __syncthreads();
  int at = places[threadIdx.x * tiles + blockIdx.x];
  for (int k = 0; k < WARPS; k++) { int c = next[k][threadIdx.x]; next[k][threadIdx.x] = at; at += c; }
  __syncthreads();
  for (int base = first; base < end; base += 32) {
    const int i = base + lane;
    const bool live = i < end;
    const u32 active = __ballot_sync(~0u, live);
    if (!live) continue;
    const int key = keys[i], d = digit_of(key, shift, first_key, count);
    const u32 same = __match_any_sync(active, d);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int place = next[w][d] + rank;
    __syncwarp(active);
    if (rank == 0) next[w][d] += __popc(same);
    __syncwarp(active);
    const int value = values ? values[i] : i;
    if (out_keys) out_keys[place] = key;
    if (out_values) out_values[place] = value;
    if (inverse) inverse[value] = place;
  }
}
// Thread (t, r): ranks[t, r] = r where an expert of t lies on rank r, else N; rows[r] counts the routed rows.
KERNEL moe_ranks(int* ranks, int* rows, const int* experts, int tokens, int K, int N, int per_rank, int slices) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= tokens * N) return;
  const int t = i / N, r = i % N;
  int here = 0;
  for (int k = 0; k < K; k++) here += experts[t * K + k] / per_rank == r / slices;
  ranks[i] = here ? r : N;
  if (here) atomicAdd(&rows[r], here);
}
