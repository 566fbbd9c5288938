// Quantizers: one pass adds the memory and takes norms, the second writes codes and takes what they stand for out of the
// compensated gradient, which becomes the memory. Signs of one magnitude need one pass. Payloads are those of compression/FORMAT.md.
//
// A gradient that is refused leaves the memory as it was; its payload means zeros where the method can say so (norm 0),
// else the host must look at the outcome before it uses a message.
#include "codes.cuh"
#include "rules.cuh"

// The norm that is sent, of the whole tensor.
#define NORM_NONE 0u
#define NORM_MAX 1u
#define NORM_L2 2u
#define NORM_CLIPPED 3u  // max |x| or `clip` standard deviations
#define NORM_MEAN 4u     // mean |x|
#define NORM_ONE 5u
#define NORM_HALF_L2 6u  // |x| at most half of the largest float
#define NORM_SHARE 7u    // `clip` times max |x|, at most half of the largest float
// Not one number but two, at the front of the payload.
#define NORM_SIDES 8u  // means of the values below `clip` and of the others
#define NORM_RANGE 9u  // min and max

#define LARGEST_NORM 3.4e38

__device__ __forceinline__ float max_norm(float most) { return fminf(most, (float)LARGEST_NORM); }

__device__ __forceinline__ float l2_norm(double energy, float most) {
  double norm = sqrt(energy);
  return fmaxf((float)(norm < LARGEST_NORM ? norm : LARGEST_NORM), max_norm(most));
}

__device__ float norm_of(u32 kind, double clip, u32 n, double energy, double sum, double magnitude, float most) {
  if (kind == NORM_ONE) return 1.0f;
  if (kind == NORM_MAX || (kind == NORM_CLIPPED && n == 0)) return max_norm(most);
  if (kind == NORM_L2) return l2_norm(energy, most);
  if (kind == NORM_HALF_L2) return fminf(l2_norm(energy, most), 3.40282346638528859812e38f / 2.0f);
  if (kind == NORM_SHARE) {
    const double share = (double)max_norm(most) * clip, half = 3.40282346638528859812e38 / 2.0;
    return (float)(share < half ? share : half);
  }
  if (kind == NORM_MEAN) return (float)(magnitude / (double)(n == 0 ? 1 : n));
  if (kind != NORM_CLIPPED) return 0.0f;
  double mean = sum / (double)n, variance = energy / (double)n - mean * mean;
  // What is left of a constant tensor's is the rounding of two sums, as in compression/.../terngrad.rs.
  if (!(variance > 1e-9 * mean * mean)) return max_norm(most);
  double bound = clip * sqrt(variance);
  return fminf(max_norm(most), (float)(bound < LARGEST_NORM ? bound : LARGEST_NORM));
}

// Floats as numbers of the same order.
__device__ __forceinline__ u32 place_of(float x) { return bits_of(x) ^ (bits_of(x) >> 31 ? FULL : 0x80000000u); }
__device__ __forceinline__ float at_place(u32 place) {
  return float_of(place ^ (place >> 31 ? 0x80000000u : FULL));
}

__device__ __forceinline__ float mean_of(double sum, double count) { return count == 0.0 ? 0.0f : (float)(sum / count); }

// Both numbers of a payload that has two; those of nothing, or of what is refused, are zeros.
__device__ void put_pair(u32 kind, double threshold, u32 n, double below, double others, double count, const State* s,
                         const Outcome* o, float* to) {
  to[0] = to[1] = 0.0f;
  if (o->refused || n == 0) return;
  if (kind == NORM_SIDES) {
    to[0] = mean_of(below, count);
    to[1] = mean_of(others, (double)n - count);
    return;
  }
  // Adding 0 makes -0 to 0.
  to[0] = at_place(~fresh(&s->above)) + 0.0f;
  to[1] = at_place(fresh(&s->band)) + 0.0f;
}

template <typename T>
__device__ __forceinline__ void stats(const T* gradient, const float* memory, float* compensated, u32 n, float beta, float gamma,
                                      u32 kind, double clip, float* norm_to, State* s, Outcome* o, Partials* p) {
  double energy = 0.0, sum = 0.0, magnitude = 0.0, count = 0.0;
  u32 most = 0, highest = 0, not_lowest = 0;
  each_compensated(gradient, memory, compensated, n, beta, gamma, [&](float x) {
    const u32 key = key_of(x);
    const double wide = (double)x;
    most = key > most ? key : most;
    energy += wide * wide;
    if (kind == NORM_CLIPPED) sum += wide;
    if (kind == NORM_MEAN) magnitude += fabs(wide);
    if (kind == NORM_SIDES) {
      const bool below = x < (float)clip;
      sum += below ? wide : 0.0;
      magnitude += below ? 0.0 : wide;
      count += below ? 1.0 : 0.0;
    }
    if (kind == NORM_RANGE) {
      const u32 place = place_of(x);
      highest = place > highest ? place : highest;
      not_lowest = ~place > not_lowest ? ~place : not_lowest;
    }
  });
  most = block_max(most);
  if (kind == NORM_RANGE) {
    highest = block_max(highest);
    not_lowest = block_max(not_lowest);
  }
  if (threadIdx.x == 0) {
    if (kind == NORM_RANGE) {
      atomicMax(&s->band, highest);
      atomicMax(&s->above, not_lowest);
    }
    atomicMax(&s->max_key, most);
  }
  if (!last_sums(p, s->done, energy, sum, magnitude, count) || threadIdx.x != 0) return;
  begin_outcome(s, o, energy);
  if (kind >= NORM_SIDES) return put_pair(kind, clip, n, sum, magnitude, count, s, o, norm_to);
  float norm = o->refused ? 0.0f : norm_of(kind, clip, n, energy, sum, magnitude, o->max);
  o->norm = norm;
  if (norm_to != 0) *norm_to = norm;
}

#define STATS(name, type)                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                \
      name(const type* gradient, const float* memory, float* compensated, u32 n, float beta, float gamma, u32 kind, double clip, \
           float* norm_to, State* s, Outcome* o, Partials* p) {                                                        \
    stats(gradient, memory, compensated, n, beta, gamma, kind, clip, norm_to, s, o, p);                                \
  }
STATS(stats_f32, float)
STATS(stats_f16, f16)
STATS(stats_bf16, bf16)

// A norm per bucket. Eight lanes add up a bucket as eight sums over each 1024 values, in the CPU side's order: the square
// root of the same sum is the same float.
extern "C" __global__ void __launch_bounds__(THREADS) norms(const float* compensated, u32 n, u32 bucket, u32 kind, float* to,
                                                            const Outcome* o) {
  const u32 buckets = n / bucket + (n % bucket != 0), part = lane() & 7u;
  const u32 per_grid = gridDim.x * THREADS / 8;
  for (u32 first = (blockIdx.x * THREADS + threadIdx.x - lane()) / 8; first < buckets; first += per_grid) {
    // All lanes go through all chunks together; those behind the end add nothing.
    const u32 b = first + lane() / 8;
    const u64 begin = (u64)b * bucket, end = begin + bucket < n ? begin + bucket : n;
    double energy = 0.0;
    u32 most = 0;
    for (u32 at = 0; at < bucket; at += 1024) {
      const u64 from = begin + at, to = from + 1024 < end ? from + 1024 : end;
      const u32 length = from < to ? (u32)(to - from) : 0, whole = length / 8 * 8;
      double own = 0.0, rest = 0.0;
      for (u32 i = part; i < whole; i += 8) {
        float x = compensated[from + i];
        own += square(x);
        most = key_of(x) > most ? key_of(x) : most;
      }
      if (whole + part < length) {
        float x = compensated[from + whole + part];
        rest = square(x);
        most = key_of(x) > most ? key_of(x) : most;
      }
      double sum = 0.0;
      for (u32 j = 0; j < 8; j++) sum += __shfl_sync(FULL, own, (lane() & 24u) + j);
      for (u32 j = 0; j < 8; j++) sum += __shfl_sync(FULL, rest, (lane() & 24u) + j);
      energy += sum;
    }
    for (u32 d = 4; d > 0; d /= 2) {
      u32 other = __shfl_xor_sync(FULL, most, d);
      most = other > most ? other : most;
    }
    if (part != 0 || b >= buckets) continue;
    float norm = kind == NORM_L2 ? l2_norm(energy, float_of(most)) : max_norm(float_of(most));
    to[b] = o->refused ? 0.0f : norm;
  }
}

// Codes of `width` bits, eight per thread, packed in the block's memory so that words go out side by side.
template <typename Rule>
__device__ __forceinline__ void quantize(float* compensated, const float* memory, u32 n, u32* payload, u32 bucket, u32 width,
                                         const Scheme& scheme, State* s, Outcome* o, Partials* p) {
  SHARED(u32, stage, 2 * THREADS);
  const bool refused = o->refused != 0;
  const u32 buckets = n == 0 ? 0 : (n - 1) / bucket + 1, bundles = n / 8 + (n % 8 != 0);
  const float* norms = reinterpret_cast<const float*>(payload);
  u32* packed = payload + buckets;
  double sent = 0.0, residual = 0.0;
  for (u32 first = blockIdx.x * THREADS; first < bundles; first += gridDim.x * THREADS) {
    const u32 bundle = first + threadIdx.x;
    u64 word = 0;
    u32 open = 0xffffffffu;
    float step = 0.0f;
    Rule rule = Rule::of(0.0f, scheme);
    for (u32 half = 0; half < 2; half++) {
      const u32 group = 2 * bundle + half;
      if (bundle >= bundles || 4 * group >= n) break;
      Four<float> x = refused ? Four<float>() : load_four(compensated, group, n);
      for (u32 c = 0; c < 4; c++) {
        const u32 i = 4 * group + c;
        if (i >= n) break;
        // Where buckets are whole bundles, all eight lie in one.
        if (open == 0xffffffffu || bucket % 8 != 0) {
          const u32 b = i / bucket;
          if (b != open) {
            open = b;
            step = norms[b] / (float)scheme.divide;
            rule = Rule::of(step, scheme);
          }
        }
        u32 code = refused ? Rule::zero(scheme) : rule.code(x.v[c], i);
        word |= (u64)code << ((4 * half + c) * width);
        float relative = rule.relative(code);
        double value = (double)step * (double)relative;
        sent += value * value;
        leave(x.v + c, refused ? before(memory, i) : x.v[c] + relative * -step, residual);
      }
      store_four(compensated, group, n, x);
    }
    __syncthreads();
    u8* bytes = reinterpret_cast<u8*>(stage);
    for (u32 j = 0; j < width; j++) bytes[threadIdx.x * width + j] = (u8)(word >> (8 * j));
    __syncthreads();
    // This round's values, in bytes.
    const u32 values = n - 8 * first < 8 * THREADS ? n - 8 * first : 8 * THREADS;
    const u32 length = (values * width + 7) / 8, words = length / 4;
    u32* to = packed + (u64)first * width / 4;
    for (u32 i = threadIdx.x; i < words; i += THREADS) to[i] = stage[i];
    const u32 rest = 4 * words + threadIdx.x;
    if (rest < length) reinterpret_cast<u8*>(to)[rest] = bytes[rest];
  }
  finish(sent, residual, 4ull * buckets + ((u64)n * width + 7) / 8, s, o, p);
}

#define QUANTIZE(name, rule)                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                \
      name(float* compensated, const float* memory, u32 n, u32* payload, u32 bucket, u32 width, u32 levels, u32 divide, u32 a, \
           u32 b, u32 c, State* s, Outcome* o, Partials* p) {                                                          \
    quantize<rule>(compensated, memory, n, payload, bucket, width, Scheme{levels, divide, Stream{a, b, c}}, s, o, p);  \
  }
QUANTIZE(quantize_linear, Linear)
QUANTIZE(quantize_powers, Powers)
QUANTIZE(quantize_draw, Draw)
QUANTIZE(quantize_grid, Grid)

// out += scale * what the codes stand for.
template <typename Rule>
__device__ __forceinline__ void dequantize(float* out, u32 n, const u8* payload, u32 bucket, u32 width,
                                           const Scheme& scheme, float scale) {
  const u32 buckets = n == 0 ? 0 : (n - 1) / bucket + 1;
  const u8* packed = payload + 4 * (u64)buckets;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
    const u64 at = (u64)i * width;
    u32 bits = packed[at / 8];
    if (at % 8 + width > 8) bits |= (u32)packed[at / 8 + 1] << 8;
    u32 code = bits >> (at % 8) & ((1u << width) - 1);
    float step = scale * (float_at(payload + 4 * (u64)(i / bucket)) / (float)scheme.divide);
    out[i] += Rule::of(0.0f, scheme).relative(code) * step;
  }
}

#define DEQUANTIZE(name, rule)                                                                                         \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                \
      name(float* out, u32 n, const u8* payload, u32 bucket, u32 width, u32 levels, u32 divide, float scale) {         \
    dequantize<rule>(out, n, payload, bucket, width, Scheme{levels, divide, Stream{0, 0, 0}}, scale);                  \
  }
DEQUANTIZE(dequantize_linear, Linear)
DEQUANTIZE(dequantize_powers, Powers)
DEQUANTIZE(dequantize_draw, Draw)
DEQUANTIZE(dequantize_grid, Grid)

// Error feedback and signs, each of which stands for `norm`, in one pass. Whether the gradient is refused is known behind it:
// then `signs_undo` puts the memory back, which lies where it was.
template <typename T>
__device__ __forceinline__ void signs_at_once(const T* gradient, const float* memory, float* compensated, u32 n, float beta,
                                              float gamma, float norm, u8* payload, State* s, Outcome* o, Partials* p) {
  double energy = 0.0, residual = 0.0;
  u32 most = 0;
  ballots(n, payload, [=, &energy, &residual, &most](u32 i, bool inside) {
    if (!inside) return false;
    const float x = compensated_one(gradient, memory, i, beta, gamma);
    const u32 key = key_of(x);
    most = key > most ? key : most;
    energy += square(x);
    const bool negative = x < 0.0f;
    leave(compensated + i, x + (negative ? norm : -norm), residual);
    return negative;
  });
  most = block_max(most);
  if (threadIdx.x == 0) atomicMax(&s->max_key, most);
  if (!last_sums(p, s->done, energy, residual) || threadIdx.x != 0) return;
  begin_outcome(s, o, energy);
  o->residual = residual;
  o->norm = o->refused ? 0.0f : norm;
  o->sent = (double)n * (double)o->norm * (double)o->norm;
  o->bytes = ((u64)n + 7) / 8;
}

#define SIGNS_AT_ONCE(name, type)                                                                                      \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                \
      name(const type* gradient, const float* memory, float* compensated, u32 n, float beta, float gamma, float norm,  \
           u8* payload, State* s, Outcome* o, Partials* p) {                                                           \
    signs_at_once(gradient, memory, compensated, n, beta, gamma, norm, payload, s, o, p);                              \
  }
SIGNS_AT_ONCE(signs_f32, float)
SIGNS_AT_ONCE(signs_f16, f16)
SIGNS_AT_ONCE(signs_bf16, bf16)

extern "C" __global__ void __launch_bounds__(THREADS) signs_undo(const float* memory, float* compensated, u32 n, u8* payload,
                                                                 const Outcome* o) {
  if (!o->refused) return;
  const u32 first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
  for (u32 i = first; i < n; i += stride) compensated[i] = before(memory, i);
  for (u32 i = first; i < n / 8 + (n % 8 != 0); i += stride) payload[i] = 0;
}

// Signs, times the norm of the outcome; with `scaled`, that follows in four bytes.
extern "C" __global__ void __launch_bounds__(THREADS) signs(float* compensated, const float* memory, u32 n, u8* payload,
                                                            u32 scaled, State* s, Outcome* o, Partials* p) {
  const bool refused = o->refused != 0;
  const float norm = o->norm;
  double residual = 0.0;
  ballots(n, payload, [=, &residual](u32 i, bool inside) {
    if (!inside) return false;
    if (refused) {
      compensated[i] = before(memory, i);
      return false;
    }
    float x = compensated[i];
    bool negative = x < 0.0f;
    leave(compensated + i, x + (negative ? norm : -norm), residual);
    return negative;
  });
  const u64 end = ((u64)n + 7) / 8;
  if (blockIdx.x == 0 && threadIdx.x < 4 && scaled) payload[end + threadIdx.x] = (u8)(bits_of(norm) >> (8 * threadIdx.x));
  // Every sign is sent with the same magnitude.
  double sent = blockIdx.x == 0 && threadIdx.x == 0 ? (double)n * (double)norm * (double)norm : 0.0;
  finish(sent, residual, end + (scaled ? 4 : 0), s, o, p);
}

// out += scale * signs (times the scale behind them).
extern "C" __global__ void __launch_bounds__(THREADS) add_signs(float* out, u32 n, const u8* payload, u32 scaled,
                                                                float scale) {
  const float value = scale * (scaled ? float_at(payload + ((u64)n + 7) / 8) : 1.0f);
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
    out[i] += payload[i / 8] >> (i % 8) & 1 ? -value : value;
}

// The sign that most ranks sent; equal votes mean 0. Rank r's signs begin at r * stride.
extern "C" __global__ void __launch_bounds__(THREADS) majority(float* out, u32 n, const u8* payloads, u64 stride,
                                                               u32 ranks) {
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
    u32 negative = 0;
    for (u32 r = 0; r < ranks; r++) negative += payloads[r * stride + i / 8] >> (i % 8) & 1u;
    const u32 positive = ranks - negative;
    out[i] = negative > positive ? -1.0f : negative < positive ? 1.0f : 0.0f;
  }
}

// Natural compression: signs, then exponents.
extern "C" __global__ void __launch_bounds__(THREADS) natural(float* compensated, const float* memory, u32 n, u8* payload, u32 a,
                                                              u32 b, u32 c, State* s, Outcome* o, Partials* p) {
  const bool refused = o->refused != 0;
  const Stream random = {a, b, c};
  u8* exponents = payload + ((u64)n + 7) / 8;
  double sent = 0.0, residual = 0.0;
  ballots(n, payload, [=, &sent, &residual](u32 i, bool inside) {
    if (!inside) return false;
    float x = refused ? 0.0f : compensated[i];
    u32 key = key_of(x), exponent = (key + (random.fourth(i) & 0x7fffffu)) >> 23;
    exponent = key == 0 ? 0 : exponent < 254 ? exponent : 254;
    bool negative = bits_of(x) >> 31 == 1;
    exponents[i] = (u8)exponent;
    float value = float_of(exponent << 23 | (negative ? 0x80000000u : 0));
    sent += square(value);
    leave(compensated + i, refused ? before(memory, i) : x + value * -1.0f, residual);
    return negative;
  });
  finish(sent, residual, ((u64)n + 7) / 8 + n, s, o, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) add_natural(float* out, u32 n, const u8* payload, float scale) {
  const u8* exponents = payload + ((u64)n + 7) / 8;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
    u32 sign = (u32)(payload[i / 8] >> (i % 8) & 1) << 31;
    out[i] += float_of((u32)exponents[i] << 23 | sign) * scale;
  }
}

// 8-bit floats relative to the norm, which lies in front.
extern "C" __global__ void __launch_bounds__(THREADS) eightbit(float* compensated, const float* memory, u32 n, u8* payload,
                                                               u32 fixed, State* s, Outcome* o, Partials* p) {
  SHARED(EightBit, table, 1);
  table->fill(fixed);
  __syncthreads();
  const bool refused = o->refused != 0;
  const float norm = o->norm, divisor = norm > 0.0f ? norm : 1.0f;
  u8* codes = payload + 4;
  double sent = 0.0, residual = 0.0;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
    float x = refused ? 0.0f : compensated[i];
    u32 code = table->code(x / divisor);
    float value = table->value(code);
    codes[i] = (u8)code;
    sent += square(value);
    leave(compensated + i, refused ? before(memory, i) : x + value * -norm, residual);
  }
  finish(sent * (double)norm * (double)norm, residual, 4 + (u64)n, s, o, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) add_eightbit(float* out, u32 n, const u8* payload, u32 fixed,
                                                                   float scale) {
  SHARED(EightBit, table, 1);
  table->fill(fixed);
  __syncthreads();
  const float step = scale * float_at(payload);
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
    out[i] += table->value(payload[4 + i]) * step;
}

// Half precision, clipped to a bound under which the ranks' sum stays finite.
template <typename T>
__device__ __forceinline__ void cast(float* compensated, const float* memory, u32 n, T* payload, float limit, State* s,
                                     Outcome* o, Partials* p) {
  const bool refused = o->refused != 0;
  double sent = 0.0, residual = 0.0;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
    float x = refused ? 0.0f : compensated[i], clipped = x < -limit ? -limit : x > limit ? limit : x;
    T half;
    narrow(clipped, &half);
    payload[i] = half;
    float value = widen(half);
    sent += square(value);
    leave(compensated + i, refused ? before(memory, i) : x + value * -1.0f, residual);
  }
  finish(sent, residual, 2 * (u64)n, s, o, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) cast_f16(float* compensated, const float* memory, u32 n, f16* payload,
                                                               float limit, State* s, Outcome* o, Partials* p) {
  cast(compensated, memory, n, payload, limit, s, o, p);
}
extern "C" __global__ void __launch_bounds__(THREADS) cast_bf16(float* compensated, const float* memory, u32 n, bf16* payload,
                                                                float limit, State* s, Outcome* o, Partials* p) {
  cast(compensated, memory, n, payload, limit, s, o, p);
}

template <typename T> __device__ __forceinline__ void add_cast(float* out, u32 n, const u8* payload, float scale) {
  const bool whole = reinterpret_cast<u64>(payload) % sizeof(T) == 0;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
    const u8* from = payload + 2 * (u64)i;
    T half;
    if (whole) half = *reinterpret_cast<const T*>(from);
    else half.bits = (u16)(from[0] | from[1] << 8);
    out[i] += widen(half) * scale;
  }
}
extern "C" __global__ void __launch_bounds__(THREADS) add_f16(float* out, u32 n, const u8* payload, float scale) {
  add_cast<f16>(out, n, payload, scale);
}
extern "C" __global__ void __launch_bounds__(THREADS) add_bf16(float* out, u32 n, const u8* payload, float scale) {
  add_cast<bf16>(out, n, payload, scale);
}
