// PowerSGD between its two products (compression/src/methods/low_rank): the factors' scales, orthogonal columns, and the
// outer product, which is what the memory loses and what decoding adds: always the same float for the same factors.
#include "feedback.cuh"
#include "rules.cuh"

// P travels times this.
#define SHRINK (1.0 / 16777216.0)
#define MOST_DOUBLE 1.7976931348623157e308
#define MOST_FLOAT 3.40282346638528859812e38f

// a . b by the whole block, in every thread.
__device__ __forceinline__ double block_dot(const float* a, const float* b, u32 len) {
  double sum = 0.0;
  for (u32 i = threadIdx.x; i < len; i += THREADS) sum += (double)a[i] * (double)b[i];
  return block_sum(sum);
}

// Brings a vector to this norm unless it is zero; answers the norm that it had. A thread writes what it alone reads.
__device__ __forceinline__ double rescale(const float* from, float* to, u32 len, double norm) {
  const double had = sqrt(block_dot(from, from, len));
  if (!(had > 0.0)) return had;
  const double ratio = norm / had;
  for (u32 i = threadIdx.x; i < len; i += THREADS) to[i] = (float)((double)from[i] * ratio);
  return had;
}

// Twelve uniform values make a normal one.
__device__ __forceinline__ float normal(const Stream& random, u32 i) {
  float sum = 0.0f;
  for (u32 j = 0; j < 12; j++) sum += (float)(random.word(12 * i + j) >> 8) * (1.0f / 16777216.0f);
  return sum - 6.0f;
}

// The right factor of the step before, each vector of norm SHRINK. One that is zero, or not finite, starts again.
extern "C" __global__ void __launch_bounds__(THREADS) power_right(const float* warm, float* factor, u32 len, u32 rank,
                                                                  u32 a, u32 b, u32 c) {
  const Stream random = {a, b, c};
  for (u32 k = blockIdx.x; k < rank; k += gridDim.x) {
    const float* from = warm + (u64)k * len;
    float* to = factor + (u64)k * len;
    const double energy = block_dot(from, from, len);
    if (!(energy > 0.0 && energy <= MOST_DOUBLE)) {
      for (u32 i = threadIdx.x; i < len; i += THREADS) to[i] = normal(random, k * len + i);
      from = to;
    }
    rescale(from, to, len, SHRINK);
  }
}

// What is sent: finite values, or zeros of a gradient that was refused. `per_square` is what a square of these is worth in
// the energy that is sent; 0 in the round that is not the last.
extern "C" __global__ void __launch_bounds__(THREADS) power_send(float* values, u32 count, double per_square, State* s,
                                                                 Outcome* o, Partials* p) {
  const bool refused = o->refused != 0;
  double sent = 0.0;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
    float x = values[i], value = refused ? 0.0f : x > MOST_FLOAT ? MOST_FLOAT : x < -MOST_FLOAT ? -MOST_FLOAT : x;
    values[i] = value;
    sent += square(value);
  }
  if (!last_sums(p, s->done + 1, sent) || threadIdx.x != 0 || per_square == 0.0) return;
  // Beside what the layers before have sent. What stays is orthogonal to it.
  o->sent += sent * per_square;
  o->residual -= sent * per_square;
  o->bytes += 4 * (u64)count;
}

// The mean P of all ranks, with orthogonal columns of norm sqrt(len) (Gram-Schmidt, every column twice, in their order);
// what depends on those before becomes zeros. And the same over len, for the second product. By one block.
extern "C" __global__ void __launch_bounds__(THREADS) power_left(const float* sum, float scale, float* left, float* over,
                                                                 u32 len, u32 rank) {
  const double norm = sqrt((double)len);
  for (u32 k = 0; k < rank; k++) {
    float* vector = left + (u64)k * len;
    for (u32 i = threadIdx.x; i < len; i += THREADS) vector[i] = sum[(u64)k * len + i] * scale;
    const double whole = rescale(vector, vector, len, 1.0);
    for (u32 pass = 0; pass < 2; pass++) {
      for (u32 other = 0; other < k; other++) {
        const float* before = left + (u64)other * len;
        const float share = (float)(block_dot(before, vector, len) / (norm * norm));
        for (u32 i = threadIdx.x; i < len; i += THREADS) vector[i] += -share * before[i];
      }
    }
    // Below this nothing but rounding is left.
    const bool stays = whole > 0.0 && sqrt(block_dot(vector, vector, len)) > 1e-5;
    if (stays) rescale(vector, vector, len, norm);
    for (u32 i = threadIdx.x; i < len; i += THREADS) {
      if (!stays) vector[i] = 0.0f;
      over[(u64)k * len + i] = vector[i] / (float)len;
    }
  }
}

// out += scale * left right^T, the product summed up in the vectors' order before it is scaled and added.
extern "C" __global__ void __launch_bounds__(THREADS) power_add(float* out, u32 rows, u32 cols, const float* left,
                                                                const float* right, u32 rank, float scale) {
  const u32 n = rows * cols;
  for (u32 at = blockIdx.x * THREADS + threadIdx.x; at < n; at += gridDim.x * THREADS) {
    const u32 i = at / cols, j = at % cols;
    float sum = 0.0f;
    for (u32 k = 0; k < rank; k++) sum += left[(u64)k * rows + i] * right[(u64)k * cols + j];
    if (key_of(sum) >= NOT_FINITE) {
      double wide = 0.0;
      for (u32 k = 0; k < rank; k++) wide += (double)left[(u64)k * rows + i] * (double)right[(u64)k * cols + j];
      sum = wide > (double)MOST_FLOAT ? MOST_FLOAT : wide < -(double)MOST_FLOAT ? -MOST_FLOAT : (float)wide;
    }
    out[at] += scale * sum;
  }
}

// Whether anything came: a gradient of zeros says nothing of the next one.
extern "C" __global__ void __launch_bounds__(THREADS) power_any(const float* sum, u32 count, float scale, State* s) {
  u32 any = 0;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) any |= sum[i] * scale != 0.0f;
  any = block_max(any);
  if (threadIdx.x == 0 && any != 0) atomicMax(&s->gap, any);
}

extern "C" __global__ void __launch_bounds__(THREADS) power_warm(const float* sum, u32 count, float scale, float* warm,
                                                                 const State* s) {
  if (s->gap == 0) return;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) warm[i] = sum[i] * scale;
}
