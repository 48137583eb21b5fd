// The three products of a layer of experts, portable (sm_80 and later); rows offsets[e]..offsets[e+1] belong to expert e.
//   grouped_forward: c[S, N] = a[S, M] b[e]^T, b[E, N, M]      operands k-contiguous
//   grouped_input:   c[S, M] = a[S, N] b[e],   b[E, N, M]      b is column-contiguous
//   grouped_weight:  c[e][N, M] (+)= a[S, N]^T b[S, M]           both are column-contiguous, k runs over the expert's rows
// In terms of one product: rows of the output, cols of the output, depth k.  C[row, col] = sum_k A(row, k) B(col, k).
// bf16 goes through the tensor cores (mma.sync m16n8k16, 128 x 128 x 32 tiles, three stages of cp.async); f32 through FMA.
#include "common.cuh"

// One output tile of an expert.
struct Job {
  int row, rows;     // first output row; end of the valid rows
  int col, cols;     // first output column; end of the valid columns
  int k0, k1;        // depth range
  i64 b;             // first element of the expert's matrix in b (or in c for the weight gradient)
};
// The expert that owns row tile `tile` (tiles do not cross experts), found by one warp: 32 experts at a time.
// Returns the expert or -1 when there are fewer tiles, and the tile's first row.
DI int expert_of_tile(const int* offsets, int E, int tile, int size, int& row) {
  __shared__ int found[2];
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int base = 0, expert = -1, first = 0;
    for (int e0 = 0; e0 < E && expert < 0; e0 += 32) {
      const int e = e0 + lane;
      const int n = e < E ? (offsets[e + 1] - offsets[e] + size - 1) / size : 0;
      int x = n;
      for (int o = 1; o < 32; o *= 2) { int y = __shfl_up_sync(~0u, x, o); if (lane >= o) x += y; }
      const u32 hit = __ballot_sync(~0u, n > 0 && base + x > tile && base + x - n <= tile);
      if (hit) {
        const int l = __ffs(hit) - 1;
        expert = e0 + l;
        first = offsets[expert] + (tile - __shfl_sync(~0u, base + x - n, l)) * size;
      }
      base += __shfl_sync(~0u, x, 31);
    }
    if (lane == 0) { found[0] = expert; found[1] = first; }
  }
  __syncthreads();
  row = found[1];
  return found[0];
}

// KIND 0 forward, 1 input gradient, 2 weight gradient.
template <int KIND> DI bool job_of(Job& j, const int* offsets, int E, int N, int M, int size_r, int size_c, int add) {
  if (KIND == 2) {
    const int e = blockIdx.z;
    j = {(int)blockIdx.y * size_r, N, (int)blockIdx.x * size_c, M, offsets[e], offsets[e + 1], (i64)e * N * M};
    return j.k0 < j.k1 || !add;  // the product of no rows is zero
  }
  int row;
  const int e = expert_of_tile(offsets, E, blockIdx.y, size_r, row);
  if (e < 0) return false;
  j = {row, offsets[e + 1], (int)blockIdx.x * size_c, KIND == 0 ? N : M, 0, KIND == 0 ? M : N, (i64)e * N * M};
  return true;
}

DI u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- bf16 ----
constexpr int BR = 128, BC = 128, BK = 32, STAGES = 3, PAD = 8;
constexpr int K_LD = BK + PAD, R_LD = 128 + PAD;                // k-contiguous tile [128][BK], row-contiguous tile [BK][128]
constexpr int TILE_MAX = 128 * K_LD > BK * R_LD ? 128 * K_LD : BK * R_LD;
struct Stage { bf16 a[TILE_MAX], b[TILE_MAX]; };

DI void copy16(u32 dst, const void* src, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(live ? 16 : 0) : "memory");
}
// Eight elements p[0..8] of which `live` exist; `aligned` when p is a multiple of 16 bytes and eight or none exist.
DI void copy8(bf16* dst, const bf16* p, int live, bool aligned) {
  if (aligned) { copy16(smem_u32(dst), p, live > 0); return; }
#pragma unroll
  for (int i = 0; i < 8; i++) dst[i].bits = i < live ? p[i].bits : (u16)0;
}
DI int clamp8(int n) { return n < 0 ? 0 : n > 8 ? 8 : n; }
// Operand stored [outer][k], k contiguous (ld elements a row): tile rows row.., k..
DI void load_k(bf16* s, const bf16* x, i64 ld, int row, int end, int k, int k1, bool aligned) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int c = threadIdx.x + 256 * i, r = c / 4, kk = c % 4 * 8;
    const bool in = row + r < end;
    copy8(s + r * K_LD + kk, x + (in ? (i64)(row + r) * ld : 0) + (in ? k + kk : 0), in ? clamp8(k1 - k - kk) : 0, aligned);
  }
}
// Operand stored [k][outer], outer contiguous.
DI void load_r(bf16* s, const bf16* x, i64 ld, int row, int end, int k, int k1, bool aligned) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int c = threadIdx.x + 256 * i, kk = c / 16, r = c % 16 * 8;
    const bool in = k + kk < k1 && row + r < end;
    copy8(s + kk * R_LD + r, x + (in ? (i64)(k + kk) * ld + row + r : 0), in ? clamp8(end - row - r) : 0, aligned);
  }
}
DI void ldmatrix(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
DI void ldmatrix_t(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
DI void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two neighbouring elements of c at (row, col), overwritten or added to.
DI void put(void* c, int c_f32, bool add, i64 at, float x, float y, bool both) {
  if (c_f32) {
    float* p = (float*)c + at;
    p[0] = add ? p[0] + x : x;
    if (both) p[1] = add ? p[1] + y : y;
  } else {
    bf16* p = (bf16*)c + at;
    p[0] = from_f32<bf16>(add ? to_f32(p[0]) + x : x);
    if (both) p[1] = from_f32<bf16>(add ? to_f32(p[1]) + y : y);
  }
}

template <int KIND> DI void grouped(void* c, int c_f32, int add, const bf16* a, const bf16* b, const int* offsets, int E, int N, int M, int aligned) {
  constexpr bool A_K = KIND != 2, B_K = KIND == 0;
  extern __shared__ __align__(16) u8 shared[];
  Stage* stages = (Stage*)shared;
  Job j;
  if (!job_of<KIND>(j, offsets, E, N, M, BR, BC, add)) return;
  const i64 lda = KIND == 0 ? M : N, ldb = M, ldc = KIND == 0 ? N : M;
  if (KIND != 2) b += j.b;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wr = warp / 4 * 64, wc = warp % 4 * 32;
  auto fetch = [&](int s, int k) {
    if (k < j.k1) {
      if (A_K) load_k(stages[s].a, a, lda, j.row, j.rows, k, j.k1, aligned); else load_r(stages[s].a, a, lda, j.row, j.rows, k, j.k1, aligned);
      if (B_K) load_k(stages[s].b, b, ldb, j.col, j.cols, k, j.k1, aligned); else load_r(stages[s].b, b, ldb, j.col, j.cols, k, j.k1, aligned);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float acc[4][4][4];
#pragma unroll
  for (int i = 0; i < 64; i++) ((float*)acc)[i] = 0;
  for (int s = 0; s < STAGES - 1; s++) fetch(s, j.k0 + s * BK);
  const int l8 = lane % 8, mat = lane / 8;
  int stage = 0;
  for (int k = j.k0; k < j.k1; k += BK) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    fetch((stage + STAGES - 1) % STAGES, k + (STAGES - 1) * BK);
    const bf16 *sa = stages[stage].a, *sb = stages[stage].b;
#pragma unroll
    for (int kk = 0; kk < BK; kk += 16) {
      u32 fa[4][4], fb[2][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = wr + 16 * i;
        if (A_K) ldmatrix(fa[i], smem_u32(sa + (r + mat % 2 * 8 + l8) * K_LD + kk + mat / 2 * 8));
        else ldmatrix_t(fa[i], smem_u32(sa + (kk + mat / 2 * 8 + l8) * R_LD + r + mat % 2 * 8));
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int n = wc + 16 * i;
        if (B_K) ldmatrix(fb[i], smem_u32(sb + (n + mat / 2 * 8 + l8) * K_LD + kk + mat % 2 * 8));
        else ldmatrix_t(fb[i], smem_u32(sb + (kk + mat % 2 * 8 + l8) * R_LD + n + mat / 2 * 8));
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int n = 0; n < 4; n++) mma(acc[i][n], fa[i], fb[n / 2][n % 2 * 2], fb[n / 2][n % 2 * 2 + 1]);
    }
    stage = (stage + 1) % STAGES;
  }
  const i64 base = KIND == 2 ? j.b : 0;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = j.row + wr + 16 * i + lane / 4 + 8 * half, col = j.col + wc + 8 * n + lane % 4 * 2;
        if (row < j.rows && col < j.cols)
          put(c, c_f32, KIND == 2 && add, base + (i64)row * ldc + col, acc[i][n][2 * half], acc[i][n][2 * half + 1], col + 1 < j.cols);
      }
}

// ---- f32: 64 x 64 x 16 tiles, 4 x 4 results a thread ----
constexpr int FR = 64, FK = 16;
template <int KIND> DI void grouped(void* c, int c_f32, int add, const f32* a, const f32* b, const int* offsets, int E, int N, int M, int aligned) {
  constexpr bool A_K = KIND != 2, B_K = KIND == 0;
  __shared__ float sa[FK][FR + 4], sb[FK][FR + 4];
  Job j;
  if (!job_of<KIND>(j, offsets, E, N, M, FR, FR, add)) return;
  const i64 lda = KIND == 0 ? M : N, ldb = M, ldc = KIND == 0 ? N : M;
  if (KIND != 2) b += j.b;
  auto fetch = [&](float (&s)[FK][FR + 4], const f32* x, i64 ld, bool k_contiguous, int row, int end, int k) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = threadIdx.x + 256 * i;
      const int r = k_contiguous ? at / FK : at % FR, kk = k_contiguous ? at % FK : at / FR;
      const bool in = row + r < end && k + kk < j.k1;
      s[kk][r] = in ? x[k_contiguous ? (i64)(row + r) * ld + k + kk : (i64)(k + kk) * ld + row + r] : 0.f;
    }
  };
  const int ty = threadIdx.x / 16 * 4, tx = threadIdx.x % 16 * 4;
  float acc[4][4] = {};
  for (int k = j.k0; k < j.k1; k += FK) {
    __syncthreads();
    fetch(sa, a, lda, A_K, j.row, j.rows, k);
    fetch(sb, b, ldb, B_K, j.col, j.cols, k);
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < FK; kk++) {
      const float4 x = *(const float4*)&sa[kk][ty], y = *(const float4*)&sb[kk][tx];
      const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int n = 0; n < 4; n++) acc[r][n] += xs[r] * ys[n];
    }
  }
  const i64 base = KIND == 2 ? j.b : 0;
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int row = j.row + ty + r, col = j.col + tx + n;
      if (row < j.rows && col < j.cols) put(c, 1, KIND == 2 && add, base + (i64)row * ldc + col, acc[r][n], 0, false);
    }
}

#define GROUPED(NAME, KIND) \
  KERNEL __launch_bounds__(256) NAME(void* c, int c_f32, int add, const T* a, const T* b, const int* offsets, int E, int N, int M, int aligned) { \
    grouped<KIND>(c, c_f32, add, a, b, offsets, E, N, M, aligned); }
GROUPED(grouped_forward, 0)
GROUPED(grouped_input, 1)
GROUPED(grouped_weight, 2)
