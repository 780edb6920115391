// Tensor-core instructions and the arithmetic around them, one wrapper each.
//
// Fragments (PTX ISA, "Matrix fragments"), with g = lane / 4 and t = lane % 4: of the 16-row
// operand a thread holds rows g and g + 8, of the 8-column operand column g, of the result rows g,
// g + 8 and columns 2t, 2t + 1. Which element of the summed dimension stands where is free as long
// as both operands agree; that freedom is what lets every operand come from memory in 16-byte
// loads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace wavekv::gpu {

inline constexpr uint32_t kFullWarp = 0xffffffffu;
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
// Stands for -inf where a difference of two must not be NaN.
inline constexpr float kLogFloor = -1e30f;

struct AFragment {
  uint32_t top_low, bottom_low, top_high, bottom_high;  // Rows g, g + 8; two halves of the sum.
};

// d += a b, 16 x 8 x 32 signed bytes.
__device__ inline void MmaS8(const AFragment& a, uint32_t b0, uint32_t b1, int (&d)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a.top_low), "r"(a.bottom_low), "r"(a.top_high), "r"(a.bottom_high), "r"(b0), "r"(b1));
}

// d += a b, 16 x 8 x 16 of T.
template <typename T>
__device__ void Mma(const AFragment& a, uint32_t b0, uint32_t b1, float (&d)[4]);

template <>
__device__ inline void Mma<__nv_bfloat16>(const AFragment& a, uint32_t b0, uint32_t b1,
                                          float (&d)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.top_low), "r"(a.bottom_low), "r"(a.top_high), "r"(a.bottom_high), "r"(b0), "r"(b1));
}

template <>
__device__ inline void Mma<__half>(const AFragment& a, uint32_t b0, uint32_t b1, float (&d)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.top_low), "r"(a.bottom_low), "r"(a.top_high), "r"(a.bottom_high), "r"(b0), "r"(b1));
}

// Two floats as a pair of T, `low` in the lower half.
template <typename T>
__device__ uint32_t PackPair(float low, float high);

template <>
__device__ inline uint32_t PackPair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ inline uint32_t PackPair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ T FromFloat(float x);
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

// Transposes an 8 x 8 matrix of 16-bit elements that the warp holds as row g, columns 2t, 2t + 1.
__device__ inline uint32_t Transpose8x8(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Four signed bytes of each of two clusters become pairs (first, second) of exact float16: pairs[d]
// holds dim d of both.
__device__ inline void PairBytesAsHalf(uint32_t first, uint32_t second, uint32_t (&pairs)[4]) {
  // Byte b + 128 behind 0x64 is the float16 number 1152 + b.
  first ^= 0x80808080u;
  second ^= 0x80808080u;
  const uint32_t low = __byte_perm(first, second, 0x5140);
  const uint32_t high = __byte_perm(first, second, 0x7362);
  const uint32_t raw[4] = {
      __byte_perm(low, 0x64646464u, 0x4140), __byte_perm(low, 0x64646464u, 0x4342),
      __byte_perm(high, 0x64646464u, 0x4140), __byte_perm(high, 0x64646464u, 0x4342)};
  const __half2 offset = __float2half2_rn(1152.0f);
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const __half2 exact = __hsub2(reinterpret_cast<const __half2&>(raw[d]), offset);
    pairs[d] = reinterpret_cast<const uint32_t&>(exact);
  }
}

// 2^x, to about 2 units in the last place.
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To about 1 unit in the last place.
__device__ inline float SquareRoot(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes that no kernel writes while this one runs, and that nobody reads again soon.
__device__ inline uint4 LoadOnce(const void* address) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}

__device__ inline float WarpMax(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}

__device__ inline float WarpSum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

// Sums of eight values over the warp: lane l gets that of x[l / 4].
__device__ inline float WarpSumOfEight(const float (&x)[8]) {
  const uint32_t lane = threadIdx.x % 32;
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x[i];
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = lane & (4 * half);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = upper ? y[i] : y[half + i];
      y[i] = (upper ? y[half + i] : y[i]) + __shfl_xor_sync(kFullWarp, given, 4 * half);
    }
  }
  y[0] += __shfl_xor_sync(kFullWarp, y[0], 2);
  return y[0] + __shfl_xor_sync(kFullWarp, y[0], 1);
}

// Over the eight lanes that share lane % 4: the rows of a result fragment.
__device__ inline float RowsMax(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}

__device__ inline float RowsSum(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

}  // namespace wavekv::gpu
