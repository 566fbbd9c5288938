// Types and words that NVRTC and the tests' emulator (tests/emulator) share. Nothing here needs CUDA's headers.
#ifndef FLEXCOMM_COMMON
#define FLEXCOMM_COMMON

#ifdef FLEXCOMM_EMULATOR
#include "emulator.hpp"
#else
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
// Memory of a block.
#define SHARED(type, name, count) __shared__ type name[count]
// Between two looks at what another block will write.
#define SPIN()
#endif

#define THREADS 256
#define WARPS (THREADS / 32)
#define FULL 0xffffffffu
// Blocks whose partial sums there is room for.
#define MOST_BLOCKS 4096

// |x| as a number: for finite floats, a larger magnitude is a larger key. Keys from NOT_FINITE on are infinities and NaN.
#define KEY_MASK 0x7fffffffu
#define NOT_FINITE 0x7f800000u

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 key_of(float x) { return bits_of(x) & KEY_MASK; }

__device__ __forceinline__ double square(float x) { return (double)x * (double)x; }

// Half precision, by its bits.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return float_of((u32)x.bits << 16); }
__device__ __forceinline__ float widen(f16 x) {
#ifdef FLEXCOMM_EMULATOR
  return emulator::half_to_float(x.bits);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#endif
}

// To nearest, ties to even. Only for finite values.
__device__ __forceinline__ bf16 to_bf16(float x) {
  u32 bits = bits_of(x);
  bf16 half;
  half.bits = (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  return half;
}
__device__ __forceinline__ f16 to_f16(float x) {
  f16 half;
#ifdef FLEXCOMM_EMULATOR
  half.bits = emulator::float_to_half(x);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
#endif
  return half;
}
__device__ __forceinline__ void narrow(float x, f16* to) { *to = to_f16(x); }
__device__ __forceinline__ void narrow(float x, bf16* to) { *to = to_bf16(x); }

// Four values in one load.
template <typename T> struct alignas(4 * sizeof(T)) Four { T v[4]; };

// A tensor of another's part may begin at any of its values. The same for all threads.
template <typename T> __device__ __forceinline__ bool takes_fours(const T* from) {
  return reinterpret_cast<u64>(from) % sizeof(Four<T>) == 0;
}

// Four from place 4 * group on; beyond n, zeros.
template <typename T> __device__ __forceinline__ Four<float> load_four(const T* from, u32 group, u32 n) {
  Four<float> out;
  if (4 * group + 4 <= n) {
    Four<T> four = reinterpret_cast<const Four<T>*>(from)[group];
    for (int c = 0; c < 4; c++) out.v[c] = widen(four.v[c]);
    return out;
  }
  for (u32 c = 0; c < 4; c++) out.v[c] = 4 * group + c < n ? widen(from[4 * group + c]) : 0.0f;
  return out;
}

// As load_four, of a tensor that may begin at any value.
template <typename T> __device__ __forceinline__ Four<float> load_any_four(const T* from, u32 group, u32 n) {
  if (takes_fours(from)) return load_four(from, group, n);
  Four<float> out;
  for (u32 c = 0; c < 4; c++) out.v[c] = 4 * group + c < n ? widen(from[4 * group + c]) : 0.0f;
  return out;
}

__device__ __forceinline__ void store_four(float* to, u32 group, u32 n, Four<float> four) {
  if (4 * group + 4 <= n) {
    reinterpret_cast<Four<float>*>(to)[group] = four;
    return;
  }
  for (u32 c = 0; c < 4; c++)
    if (4 * group + c < n) to[4 * group + c] = four.v[c];
}

// A word of a message, which may begin at any byte; of one that is aligned in one load. Devices are little endian.
__device__ __forceinline__ u32 word_at(const u8* from) {
  if (reinterpret_cast<u64>(from) % 4 == 0) return *reinterpret_cast<const u32*>(from);
  return (u32)from[0] | (u32)from[1] << 8 | (u32)from[2] << 16 | (u32)from[3] << 24;
}
__device__ __forceinline__ float float_at(const u8* from) { return float_of(word_at(from)); }

// What another block wrote, not what a cache remembers.
template <typename T> __device__ __forceinline__ T fresh(const T* from) { return *(const volatile T*)from; }

#endif
