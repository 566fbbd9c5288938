// How one value becomes a code: the rules of compression/src/methods/quantization, and its random numbers.
#ifndef FLEXCOMM_RULES
#define FLEXCOMM_RULES
#include "common.cuh"

// Number i of a stream (compression/src/random).
struct Stream {
  u32 a, b, c;

  static __device__ __forceinline__ u32 mix(u32 x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
  }
  __device__ __forceinline__ u32 word(u32 i) const {
    return mix((mix((i * 0x9e3779b9u) ^ a) + b) ^ (i << 16 | i >> 16)) ^ c;
  }
  // Number i of those that come four from a word: numbers i, i + 16, i + 32 and i + 48 of each 64.
  __device__ __forceinline__ u32 fourth(u32 i) const {
    u32 x = (i >> 6 << 4 | (i & 15u)) * 0x9e3779b9u + a;
    x = (x ^ x >> 16 ^ b) * 0x7feb352du;
    x = (x ^ x >> 15 ^ c) * 0x846ca68bu;
    x ^= x >> 16;
    const u32 factor = 0x349a97cdu, once = i & 16u ? factor : 1u;
    return x * once * (i & 32u ? factor * factor : 1u);
  }
};

// Division by a number as two products.
struct Divide {
  float first, second;

  static __device__ __forceinline__ Divide by(float step) {
    Divide out = {0.0f, 0.0f};
    if (step == 0.0f) return out;
    const float small = 8.077935669463160887416100508073e-28f;  // 2^-90
    const float large = 1.2379400392853802748991242240e27f;     // 2^90
    out.first = step < small ? 1.2676506002282294014967032054e30f : step > large ? 7.8886090522101180541e-31f : 1.0f;
    out.second = (float)(1.0 / ((double)step * (double)out.first));
    return out;
  }
  // So many parts in each of what is divided by.
  __device__ __forceinline__ Divide in_parts(float parts) const { return {first, second * parts}; }
  __device__ __forceinline__ float of(float x) const { return x * first * second; }
};

// What a rule is made of.
struct Scheme {
  u32 levels;  // s or k: above 0
  u32 divide;  // the step is norm / divide
  Stream random;
};

// x in whole steps of 2^24 parts, of which at most -low and high count: cut to parts, a number of parts below a step is
// added, and whole steps are what is left.
#define PARTS 16777216.0f

__device__ __forceinline__ int steps_of(float parts, float low, float high, u32 word) {
  return ((int)fmaxf(fminf(parts, high), low) + (int)(word & 0xffffffu)) >> 24;
}

// Whole multiples of a step: QSGD, TernGrad, linear dithering.
struct Linear {
  Divide divide;
  float most;
  int offset;
  Stream random;

  static __device__ __forceinline__ Linear of(float step, const Scheme& scheme) {
    return {Divide::by(step).in_parts(PARTS), (float)scheme.levels * PARTS, (int)scheme.levels, scheme.random};
  }
  static __device__ __forceinline__ u32 zero(const Scheme& scheme) { return scheme.levels; }
  __device__ __forceinline__ u32 code(float x, u32 i) const {
    return (u32)(offset + steps_of(divide.of(x), -most, most, random.fourth(i))) & 0xffu;
  }
  __device__ __forceinline__ float relative(u32 code) const { return (float)((int)code - offset); }
};

// Whole multiples of a step, 2^(w-1) below 0 and one fewer above: LPC-SVRG. `levels` is 2^(w-1).
struct Grid {
  Divide divide;
  float low, high;
  int half;
  Stream random;

  static __device__ __forceinline__ Grid of(float step, const Scheme& scheme) {
    const u32 half = scheme.levels;
    const Divide divide = Divide::by(step).in_parts(PARTS);
    return {divide, (float)half * -PARTS, (float)(half - 1) * PARTS, (int)half, scheme.random};
  }
  static __device__ __forceinline__ u32 zero(const Scheme& scheme) { return scheme.levels; }
  __device__ __forceinline__ u32 code(float x, u32 i) const {
    return (u32)(half + steps_of(divide.of(x), low, high, random.fourth(i))) & 0xffu;
  }
  __device__ __forceinline__ float relative(u32 code) const { return (float)((int)code - half); }
};

// Powers of two below a norm: natural dithering.
struct Powers {
  Divide divide;
  int k, lowest;
  float twice;  // 2^k: what makes the lowest level 2
  Stream random;

  static __device__ __forceinline__ Powers of(float step, const Scheme& scheme) {
    int k = (int)scheme.levels;
    return {Divide::by(step), k, 128 - k, float_of((u32)(127 + k) << 23), scheme.random};
  }
  static __device__ __forceinline__ u32 zero(const Scheme& scheme) { return scheme.levels; }
  __device__ __forceinline__ u32 code(float x, u32 i) const {
    // Twice what counts lowest levels; below 2, where random bits carry into no exponent, 1 more than what counts them.
    float y = fminf(divide.of(fabsf(x)), 1.0f) * twice;
    int level = (int)((bits_of(fmaxf(y, y * 0.5f + 1.0f)) + (random.fourth(i) & 0x7fffffu)) >> 23) - 127;
    return (u32)(k + (x < 0.0f ? -level : level)) & 0xffu;
  }
  __device__ __forceinline__ float relative(u32 code) const {
    int level = (int)code - k, magnitude = level < 0 ? -level : level;
    u32 bits = level == 0 ? 0 : (u32)(lowest + magnitude - 1) << 23;
    return float_of(bits | ((u32)level & 0x80000000u));
  }
};

// A sign at random: SSDM.
struct Draw {
  Divide divide;
  Stream random;

  static __device__ __forceinline__ Draw of(float step, const Scheme& scheme) {
    return {Divide::by(step).in_parts(2147483648.0f), scheme.random};
  }
  static __device__ __forceinline__ u32 zero(const Scheme&) { return 0; }
  __device__ __forceinline__ u32 code(float x, u32 i) const {
    float drawn = fminf((float)(int)random.fourth(i), 0.9999999f * 2147483648.0f);
    return drawn >= divide.of(x) ? 1u : 0u;
  }
  __device__ __forceinline__ float relative(u32 code) const { return 1.0f - 2.0f * (float)code; }
};

// The 128 magnitudes of 8-bit floats and what lies between them, made by the threads of a block.
struct EightBit {
  float values[128];
  float bounds[128];  // between code i and i + 1; the last between code 127 and 1

  static __device__ double middle(u32 i, u32 parts) { return 0.1 + 0.9 * ((double)i + 0.5) / (double)parts; }
  static __device__ float magnitude(u32 code, u32 fixed) {
    const double tens[8] = {1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    if (code == 0) return 0.0f;
    if (code == 128) return 1.0f;
    if (fixed) return (float)(middle(code & 15, 16) * tens[code >> 4]);
    u32 bits = 31 - __clz(code);
    return (float)(middle(code - (1u << bits), 1u << bits) * tens[bits + 1]);
  }
  __device__ void fill(u32 fixed) {
    if (threadIdx.x < 128) {
      u32 code = threadIdx.x;
      values[code] = magnitude(code, fixed);
      bounds[code] = (magnitude(code, fixed) + magnitude(code + 1, fixed)) / 2.0f;
    }
  }
  // The nearest code of t.
  __device__ __forceinline__ u32 code(float t) const {
    float m = fminf(fabsf(t), 1.0f);
    u32 code = 0;
    for (u32 step = 64; step > 0; step /= 2)
      if (m >= bounds[code + step - 1]) code += step;
    if (m >= bounds[127]) return t < 0.0f ? 0xffu : 0x80u;
    return code == 0 ? 0 : code | (t < 0.0f ? 0x80u : 0);
  }
  __device__ __forceinline__ float value(u32 code) const {
    if (code == 0x80u) return 1.0f;
    float magnitude = values[code & 127u];
    return code & 0x80u ? -magnitude : magnitude;
  }
};

#endif
