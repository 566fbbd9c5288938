// Error feedback: what every call begins with.
#ifndef FLEXCOMM_FEED
#define FLEXCOMM_FEED
#include "block.cuh"
#include "state.cuh"

// beta * memory + gamma * gradient, rounded like the CPU side; without a memory, gamma * gradient.
template <typename T>
__device__ __forceinline__ Four<float> fed_four(const T* gradient, const float* memory, u32 i, u32 n, float beta,
                                                float gamma) {
  Four<float> g = load_four(gradient, i, n);
  if (memory == 0) {
    for (int c = 0; c < 4; c++) g.v[c] = gamma * g.v[c];
    return g;
  }
  Four<float> m = load_four(memory, i, n);
  for (int c = 0; c < 4; c++) g.v[c] = beta * m.v[c] + gamma * g.v[c];
  return g;
}

// By one thread of the last block.
__device__ __forceinline__ void begin_outcome(const State* s, Outcome* o, double fed) {
  u32 most = fresh(&s->max_key);
  o->fed = fed;
  o->sent = 0.0;
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
