// Shared by every kernel file. No system header: NVRTC compiles without any.
//
// Conventions
//   * T is the element type of activations (f32 or bf16), V the elements of one memory access (16 bytes, or 1 when a
//     row is not a multiple of 16 bytes); both are macros set by the host (src/kernels/mod.rs).
//   * All arithmetic is f32. Sums have a fixed order: warp shuffles, then warps in order, then blocks in order. There
//     are no floating-point atomics, so equal calls give equal bits.
//   * i64 for anything that grows with tokens times width.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;
struct __align__(2) bf16 { u16 bits; };
struct __align__(2) f16 { u16 bits; };
#define DI __device__ __forceinline__
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; i++)
#define KERNEL extern "C" __global__ void
#define INF __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fffffff)

// ---- conversions ----
DI float to_f32(f32 x) { return x; }
DI float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DI float to_f32(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
// A double rounded to odd: rounding it once more, to bf16 or f16, gives what rounding the double directly would.
DI float to_f32(double x) {
  const float y = __double2float_rz(x);
  return (double)y == x || !(fabsf(y) < INF) ? y : __uint_as_float(__float_as_uint(y) | 1u);
}
template <class X> DI X from_f32(float x);
template <> DI f32 from_f32<f32>(float x) { return x; }
template <> DI bf16 from_f32<bf16>(float x) { bf16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
template <> DI f16 from_f32<f16>(float x) { f16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
template <> DI double from_f32<double>(float x) { return x; }
// Rounds as a store to X would.
template <class X> DI float rounded(float x) { return to_f32(from_f32<X>(x)); }
DI u32 pack_bf16(float lo, float hi) {  // round to nearest even; `lo` in the low half
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DI float low_bf16(u32 x) { return __uint_as_float(x << 16); }
DI float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// ---- N consecutive elements as floats ----
template <class X> DI void load(const X* p, float (&r)[1]) { r[0] = to_f32(*p); }
DI void load(const f32* p, float (&r)[4]) { float4 x = *(const float4*)p; r[0] = x.x; r[1] = x.y; r[2] = x.z; r[3] = x.w; }
DI void load(const f32* p, float (&r)[8]) {
  float4 x = *(const float4*)p, y = *(const float4*)(p + 4);
  r[0] = x.x; r[1] = x.y; r[2] = x.z; r[3] = x.w; r[4] = y.x; r[5] = y.y; r[6] = y.z; r[7] = y.w;
}
DI void load(const bf16* p, float (&r)[4]) {
  uint2 x = *(const uint2*)p;
  r[0] = low_bf16(x.x); r[1] = high_bf16(x.x); r[2] = low_bf16(x.y); r[3] = high_bf16(x.y);
}
DI void load(const bf16* p, float (&r)[8]) {
  uint4 x = *(const uint4*)p;
  r[0] = low_bf16(x.x); r[1] = high_bf16(x.x); r[2] = low_bf16(x.y); r[3] = high_bf16(x.y);
  r[4] = low_bf16(x.z); r[5] = high_bf16(x.z); r[6] = low_bf16(x.w); r[7] = high_bf16(x.w);
}
DI void load(const f16* p, float (&r)[4]) {
  const uint2 x = *(const uint2*)p;
  r[0] = to_f32(f16{(u16)x.x}); r[1] = to_f32(f16{(u16)(x.x >> 16)}); r[2] = to_f32(f16{(u16)x.y}); r[3] = to_f32(f16{(u16)(x.y >> 16)});
}
template <class X> DI void store(X* p, const float (&r)[1]) { *p = from_f32<X>(r[0]); }
DI void store(f32* p, const float (&r)[4]) { *(float4*)p = make_float4(r[0], r[1], r[2], r[3]); }
DI void store(f32* p, const float (&r)[8]) {
  *(float4*)p = make_float4(r[0], r[1], r[2], r[3]);
  *(float4*)(p + 4) = make_float4(r[4], r[5], r[6], r[7]);
}
DI void store(f16* p, const float (&r)[4]) {
  u32 b[4];
#pragma unroll
  for (int i = 0; i < 4; i++) b[i] = from_f32<f16>(r[i]).bits;
  *(uint2*)p = make_uint2(b[0] | b[1] << 16, b[2] | b[3] << 16);
}
DI void store(bf16* p, const float (&r)[4]) { *(uint2*)p = make_uint2(pack_bf16(r[0], r[1]), pack_bf16(r[2], r[3])); }
DI void store(bf16* p, const float (&r)[8]) {
  *(uint4*)p = make_uint4(pack_bf16(r[0], r[1]), pack_bf16(r[2], r[3]), pack_bf16(r[4], r[5]), pack_bf16(r[6], r[7]));
}

// ---- reductions ----
DI float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
DI float warp_max(float x) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}
// Sum over the `lanes` (a power of two) neighbouring lanes of a group.
DI float group_sum(float x, int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
// Sum over a block of at most 1024 threads (whole warps); every thread gets it. `buffer` holds 32 floats.
DI float block_sum(float x, float* buffer) {
  x = warp_sum(x);
  const int warps = blockDim.x / 32;
  if (warps == 1) return x;
  __syncthreads();
  if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < warps ? buffer[threadIdx.x % 32] : 0.f);
}
DI float block_max(float x, float* buffer) {
  x = warp_max(x);
  const int warps = blockDim.x / 32;
  if (warps == 1) return x;
  __syncthreads();
  if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(threadIdx.x % 32 < warps ? buffer[threadIdx.x % 32] : -INF);
}
// True in the last of `blocks` blocks to come here with this counter, which is 0 before and after: what the others stored before they came
// is then to be read with `__ldcg`. For all threads of a block.
DI bool last_block(u32* arrived, u32 blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1) == blocks - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}
// out[i] += x in f32 or bf16.
DI void add_to(void* out, int out_f32, i64 i, float x) {
  if (out_f32) ((float*)out)[i] += x;
  else { bf16* o = (bf16*)out + i; *o = from_f32<bf16>(to_f32(*o) + x); }
}
// The sequence that token t belongs to: the last s with cu[s] <= t and cu[s+1] > t.
DI int sequence_of(const int* cu, int sequences, int t) {
  int lo = 0, hi = sequences - 1;
  while (lo < hi) {
    int m = (lo + hi + 1) / 2;
    if (cu[m] <= t) lo = m; else hi = m - 1;
  }
  return lo;
}
