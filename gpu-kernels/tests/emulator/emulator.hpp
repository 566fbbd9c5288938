// A GPU that is slow and strict: runs the kernels' own source on a CPU. Every thread is a fiber; which one goes on after
// a barrier, a collective or (now and then) an atomic is drawn from a seed, with several blocks under way at once and
// begun in any order. What depends on an order that CUDA does not promise gives other results for other seeds. Memory
// of a block starts as garbage. Barriers and collectives that not all threads reach end the run.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define SHARED(type, name, count)                                                                                      \
  static char name##_key;                                                                                              \
  type* name = static_cast<type*>(emulator::shared(&name##_key, sizeof(type) * (count)))
#define SPIN() emulator::yield()

struct Dim { u32 x; };
inline Dim threadIdx, blockIdx, gridDim, blockDim;

extern "C" void emulator_switch(void** from, void* to);

namespace emulator {

struct Shared { const void* key; std::unique_ptr<u64[]> memory; size_t bytes; };
struct Fiber;
struct Warp { u64 values[32], results[32]; std::vector<Fiber*> waiting; int kind = 0; };
struct Block {
  u32 index = 0, alive = 0;
  std::vector<Shared> shared;
  std::vector<Fiber*> fibers, waiting;
  Warp warps[32];
};
struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<u64[]> stack;
  Block* block = nullptr;
  u32 thread = 0;
  bool done = false;
};
struct Run {
  void (*call)(void*) = nullptr;
  void* context = nullptr;
  std::vector<Fiber*> ready;
  Fiber* current = nullptr;
  void* scheduler = nullptr;
  u64 random = 1;
  // Atomics by word of the device's memory: those on one word wait for each other.
  std::unordered_map<const void*, u32> atomics;
};
inline Run run;

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulator: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, why);
  std::abort();
}

inline u32 draw(u32 below) {
  run.random ^= run.random << 13;
  run.random ^= run.random >> 7;
  run.random ^= run.random << 17;
  return (u32)((run.random >> 32) * below >> 32);
}

// Back to the scheduler; goes on when something puts this fiber among the ready.
inline void suspend() { emulator_switch(&run.current->stack_pointer, run.scheduler); }

inline void yield() {
  run.ready.push_back(run.current);
  suspend();
}

inline void now_and_then() {
  if (draw(64) == 0) yield();
}

inline void* shared(const void* key, size_t bytes) {
  Block* block = run.current->block;
  for (Shared& s : block->shared)
    if (s.key == key) return s.memory.get();
  size_t words = (bytes + 7) / 8;
  block->shared.push_back({key, std::unique_ptr<u64[]>(new u64[words]), 8 * words});
  std::memset(block->shared.back().memory.get(), 0xa5, 8 * words);
  return block->shared.back().memory.get();
}

inline void count_atomic(const void* at) {
  for (const Shared& s : run.current->block->shared) {
    const char* begin = reinterpret_cast<const char*>(s.memory.get());
    if (at >= begin && at < begin + s.bytes) return;
  }
  run.atomics[at]++;
}

inline void release(std::vector<Fiber*>& waiting) {
  run.ready.insert(run.ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

inline void barrier() {
  Block* block = run.current->block;
  if (block->alive != block->fibers.size()) fail("a barrier after some threads have returned");
  block->waiting.push_back(run.current);
  if (block->waiting.size() == block->alive) release(block->waiting);
  suspend();
}

// Every lane gives a value and gets those of all.
inline const u64* collective(u32 mask, int kind, u64 value) {
  if (mask != 0xffffffffu) fail("a collective of fewer than 32 lanes");
  Warp& warp = run.current->block->warps[run.current->thread / 32];
  if (!warp.waiting.empty() && warp.kind != kind) fail("lanes of a warp in different collectives");
  warp.kind = kind;
  warp.values[run.current->thread % 32] = value;
  warp.waiting.push_back(run.current);
  if (warp.waiting.size() == 32) {
    std::memcpy(warp.results, warp.values, sizeof warp.values);
    release(warp.waiting);
  }
  suspend();
  return warp.results;
}

template <typename T> u64 pack(T value) {
  u64 word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <typename T> T unpack(u64 word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

float half_to_float(u16 bits);
u16 float_to_half(float value);

}  // namespace emulator

inline void __syncthreads() { emulator::barrier(); }
inline void __threadfence() {}
inline void __syncwarp() { emulator::collective(0xffffffffu, 5, 0); }

inline u32 __ballot_sync(u32 mask, bool predicate) {
  const u64* all = emulator::collective(mask, 1, predicate);
  u32 ballot = 0;
  for (int i = 0; i < 32; i++) ballot |= (u32)all[i] << i;
  return ballot;
}
template <typename T> T __shfl_sync(u32 mask, T value, u32 from) {
  return emulator::unpack<T>(emulator::collective(mask, 2, emulator::pack(value))[from % 32]);
}
template <typename T> T __shfl_up_sync(u32 mask, T value, u32 distance) {
  const u64* all = emulator::collective(mask, 3, emulator::pack(value));
  u32 lane = threadIdx.x % 32;
  return lane < distance ? value : emulator::unpack<T>(all[lane - distance]);
}
template <typename T> T __shfl_xor_sync(u32 mask, T value, u32 with) {
  return emulator::unpack<T>(emulator::collective(mask, 4, emulator::pack(value))[threadIdx.x % 32 ^ with]);
}

template <typename T, typename F> T atomically(T* at, F change) {
  emulator::now_and_then();
  emulator::count_atomic(at);
  T before = *at;
  *at = change(before);
  return before;
}
template <typename T> T atomicAdd(T* at, T value) { return atomically(at, [=](T old) { return old + value; }); }
template <typename T> T atomicMax(T* at, T value) { return atomically(at, [=](T old) { return old > value ? old : value; }); }
template <typename T> T atomicMin(T* at, T value) { return atomically(at, [=](T old) { return old < value ? old : value; }); }
template <typename T> T atomicOr(T* at, T value) { return atomically(at, [=](T old) { return old | value; }); }

inline u32 __float_as_uint(float value) { return emulator::unpack<u32>(emulator::pack(value)); }
inline float __uint_as_float(u32 bits) { return emulator::unpack<float>(bits); }
inline int __popc(u32 word) { return __builtin_popcount(word); }
inline int __ffs(u32 word) { return __builtin_ffs((int)word); }
inline int __clz(u32 word) { return word == 0 ? 32 : __builtin_clz(word); }
inline u64 __umul64hi(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
