// Error feedback: what every call begins with.
#ifndef FLEXCOMM_FEEDBACK
#define FLEXCOMM_FEEDBACK
#include "block.cuh"

// beta * memory + gamma * gradient, rounded like the CPU side; without a memory, gamma * gradient.
template <typename T>
__device__ __forceinline__ Four<float> compensated_four(const T* gradient, const float* memory, u32 i, u32 n, float beta,
                                                float gamma) {
  Four<float> g = load_any_four(gradient, i, n);
  if (memory == 0) {
    for (int c = 0; c < 4; c++) g.v[c] = gamma * g.v[c];
    return g;
  }
  Four<float> m = load_four(memory, i, n);
  for (int c = 0; c < 4; c++) g.v[c] = beta * m.v[c] + gamma * g.v[c];
  return g;
}

// One value of it.
template <typename T>
__device__ __forceinline__ float compensated_one(const T* gradient, const float* memory, u32 i, float beta, float gamma) {
  const float g = gamma * widen(gradient[i]);
  return memory == 0 ? g : beta * memory[i] + g;
}

// Every value of a tensor once, by all blocks: `load` answers the four of a group, `each` takes one.
template <typename Load, typename Each>
__device__ __forceinline__ void each_value(u32 n, Load load, Each each) {
  const u32 groups = n / 4 + (n % 4 != 0);
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < groups; i += gridDim.x * THREADS) {
    const Four<float> x = load(i);
    for (u32 c = 0; c < 4; c++) {
      if (4 * i + c >= n) break;
      each(x.v[c]);
    }
  }
}

// Every value of a compensated gradient, which goes to `compensated` where that is given.
template <typename T, typename Each>
__device__ __forceinline__ void each_compensated(const T* gradient, const float* memory, float* compensated, u32 n, float beta, float gamma,
                                         Each each) {
  each_value(
      n,
      [=](u32 i) {
        Four<float> x = compensated_four(gradient, memory, i, n, beta, gamma);
        if (compensated != 0) store_four(compensated, i, n, x);
        return x;
      },
      each);
}

// Every value of one that was compensated before.
template <typename Each> __device__ __forceinline__ void each_of(const float* compensated, u32 n, Each each) {
  each_value(n, [=](u32 i) { return load_four(compensated, i, n); }, each);
}

// By one thread of the last block.
__device__ __forceinline__ void begin_outcome(const State* s, Outcome* o, double compensated) {
  u32 most = fresh(&s->max_key);
  o->compensated = compensated;
  o->sent = 0.0;
  o->residual = compensated;
  o->bytes = 0;
  o->kept = 0;
  o->over = 0;
  o->norm = 0.0f;
  o->refused = most >= NOT_FINITE ? 1u : 0u;
  o->max = float_of(most);
}

// What a memory was, where a gradient is refused.
__device__ __forceinline__ float before(const float* memory, u32 i) { return memory == 0 ? 0.0f : memory[i]; }

#endif
