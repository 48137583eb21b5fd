// Embedding: rows of a table by token id, and the sum of gradients by id.
#include "common.cuh"

// out[t] = table[ids[t]]; an id outside the table gives NaN, so that it cannot pass unseen. One block a token.
KERNEL embedding(T* out, const T* table, const int* ids, int vocabulary, int H) {
  const i64 t = blockIdx.x;
  const int id = ids[t];
  const bool ok = id >= 0 && id < vocabulary;
  for (int c = threadIdx.x * V; c < H; c += blockDim.x * V) {
    float r[V];
    if (ok) load(table + (i64)id * H + c, r);
    else
#pragma unroll
      for (int j = 0; j < V; j++) r[j] = NAN_F;
    store(out + t * H + c, r);
  }
}

// ---- gradient: table[id] += the rows dy[t] of that id, summed in the order of t ----
// `order` lists the tokens sorted by id (stably) and `keys` their ids. A block takes CHUNK places of that list. A run of
// equal ids inside the chunk is added to the table at once; a run that crosses a chunk border leaves a partial sum, in
// slot 2*chunk for the run that began earlier and 2*chunk+1 for the run that goes on, which `embedding_grad_borders`
// adds up in order.
#define CHUNK 32
DI void add_row(void* table, int table_f32, i64 at, const float (&acc)[V]) {
  float r[V];
  if (table_f32) {
    load((float*)table + at, r);
#pragma unroll
    for (int j = 0; j < V; j++) r[j] += acc[j];
    store((float*)table + at, r);
  } else {
    load((bf16*)table + at, r);
#pragma unroll
    for (int j = 0; j < V; j++) r[j] += acc[j];
    store((bf16*)table + at, r);
  }
}
KERNEL embedding_grad(void* table, int table_f32, float* __restrict__ partial, const T* __restrict__ dy,
                      const int* __restrict__ keys, const int* __restrict__ order, int tokens,
                      int vocabulary, int H) {
  const int first = blockIdx.x * CHUNK, end = min(first + CHUNK, tokens);
  const bool open_left = first > 0 && keys[first - 1] == keys[first];
  const bool open_right = end < tokens && keys[end - 1] == keys[end];
  for (int c = (blockIdx.y * blockDim.x + threadIdx.x) * V; c < H; c += gridDim.y * blockDim.x * V) {
    float acc[V];
#pragma unroll
    for (int j = 0; j < V; j++) acc[j] = 0;
    int start = first;
    for (int i = first; i < end; i++) {
      float r[V];
      load(dy + (i64)order[i] * H + c, r);
#pragma unroll
      for (int j = 0; j < V; j++) acc[j] += r[j];
      const int id = keys[i];
      if (i + 1 < end && keys[i + 1] == id) continue;
      const bool left = start == first && open_left, right = i + 1 == end && open_right;
      if (left) store(partial + (i64)(2 * blockIdx.x) * H + c, acc);           // also when it goes on to the right
      else if (right) store(partial + (i64)(2 * blockIdx.x + 1) * H + c, acc);
      else if (id >= 0 && id < vocabulary) add_row(table, table_f32, (i64)id * H + c, acc);
      start = i + 1;
#pragma unroll
      for (int j = 0; j < V; j++) acc[j] = 0;
    }
  }
}
// The block of the chunk in which a crossing run begins adds up its pieces.
KERNEL embedding_grad_borders(void* table, int table_f32, const float* partial, const int* keys, int tokens, int vocabulary,
                              int H) {
  const int first = blockIdx.x * CHUNK, end = min(first + CHUNK, tokens);
  if (end >= tokens || keys[end - 1] != keys[end]) return;         // nothing goes on
  const int id = keys[end - 1];
  if (first > 0 && keys[first - 1] == id && keys[first] == id) return;  // it began in an earlier chunk
  if (id < 0 || id >= vocabulary) return;
  int lo = end, hi = tokens - 1;  // the last place of the run
  while (lo < hi) {
    const int m = (lo + hi + 1) / 2;
    if (keys[m] == id) lo = m; else hi = m - 1;
  }
  for (int c = (blockIdx.y * blockDim.x + threadIdx.x) * V; c < H; c += gridDim.y * blockDim.x * V) {
    float acc[V];
    load(partial + (i64)(2 * blockIdx.x + 1) * H + c, acc);
#pragma unroll 8
    for (int b = blockIdx.x + 1; b <= lo / CHUNK; b++) {
      float r[V];
      load(partial + (i64)(2 * b) * H + c, r);
#pragma unroll
      for (int j = 0; j < V; j++) acc[j] += r[j];
    }
    add_row(table, table_f32, (i64)id * H + c, acc);
  }
}
