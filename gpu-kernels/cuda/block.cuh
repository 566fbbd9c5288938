// What the threads of a block do together.
#ifndef FLEXCOMM_BLOCK
#define FLEXCOMM_BLOCK
#include "state.cuh"

__device__ __forceinline__ u32 lane() { return threadIdx.x & 31u; }
__device__ __forceinline__ u32 warp() { return threadIdx.x >> 5; }

// Sum over this and all lower lanes.
__device__ __forceinline__ u32 warp_scan(u32 value) {
  for (u32 d = 1; d < 32; d *= 2) {
    u32 other = __shfl_up_sync(FULL, value, d);
    if (lane() >= d) value += other;
  }
  return value;
}

// Sum over this and all lower threads of the block.
__device__ __forceinline__ u32 block_scan(u32 value) {
  SHARED(u32, totals, WARPS);
  u32 inclusive = warp_scan(value);
  __syncthreads();
  if (lane() == 31) totals[warp()] = inclusive;
  __syncthreads();
  for (u32 w = 0; w < warp(); w++) inclusive += totals[w];
  return inclusive;
}

// Counts, whole numbers in any type, become sums of all before; answers the sum of all. By the whole block.
template <typename T> __device__ __forceinline__ u32 scan_counts(T* counts, u32 tiles) {
  SHARED(u32, total, 1);
  u32 before = 0;
  for (u32 first = 0; first < tiles; first += THREADS) {
    const u32 i = first + threadIdx.x;
    const u32 own = i < tiles ? (u32)counts[i] : 0, scanned = block_scan(own);
    if (i < tiles) counts[i] = (T)(before + scanned - own);
    if (threadIdx.x == THREADS - 1) total[0] = scanned;
    __syncthreads();
    before += total[0];
    __syncthreads();
  }
  return before;
}

// The sum over the block, in every thread, always added in the same order.
__device__ __forceinline__ double block_sum(double value) {
  SHARED(double, totals, WARPS);
  for (u32 d = 16; d > 0; d /= 2) value += __shfl_xor_sync(FULL, value, d);
  __syncthreads();
  if (lane() == 0) totals[warp()] = value;
  __syncthreads();
  double sum = 0.0;
  for (u32 w = 0; w < WARPS; w++) sum += totals[w];
  return sum;
}

__device__ __forceinline__ u32 block_max(u32 value) {
  SHARED(u32, totals, WARPS);
  for (u32 d = 16; d > 0; d /= 2) {
    u32 other = __shfl_xor_sync(FULL, value, d);
    value = other > value ? other : value;
  }
  __syncthreads();
  if (lane() == 0) totals[warp()] = value;
  __syncthreads();
  u32 most = 0;
  for (u32 w = 0; w < WARPS; w++) most = totals[w] > most ? totals[w] : most;
  return most;
}

// Whether this block is the last of the grid to come here; it then sees what all others wrote before. The counter is
// left at zero, for the next kernel.
__device__ __forceinline__ bool last_block(u32* done) {
  SHARED(u32, last, 1);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last[0] = atomicAdd(done, 1u) == gridDim.x - 1 ? 1u : 0u;
  __syncthreads();
  bool is = last[0] == 1u;
  if (is) {
    __threadfence();
    if (threadIdx.x == 0) *done = 0;
  }
  return is;
}

// Sum of what every block (or tile) left, by the last one.
__device__ __forceinline__ double sum_of(const double* partials, u32 count) {
  double sum = 0.0;
  for (u32 i = threadIdx.x; i < count; i += THREADS) sum += fresh(partials + i);
  return block_sum(sum);
}

// Sums over all blocks, always added in the same order: true, and with the sums, in all threads of the last block; false
// everywhere else.
template <typename... Sum> __device__ __forceinline__ bool last_sums(Partials* p, u32* done, Sum&... sums) {
  u32 at = 0;
  ((sums = block_sum(sums)), ...);
  if (threadIdx.x == 0) ((p->sums[at++][blockIdx.x] = sums), ...);
  if (!last_block(done)) return false;
  at = 0;
  ((sums = sum_of(p->sums[at++], gridDim.x)), ...);
  return true;
}

// Where the rank-th largest lies, ranks from 1: its bin, how many lie in the bins above, how many in it.
struct Bin { u32 bin, above, count; };

// By the whole block; bins a multiple of THREADS. Fewer than rank in all: bin 0.
__device__ __forceinline__ Bin find_bin(const u32* counts, u32 bins, u32 rank) {
  SHARED(u32, found, 3);
  const u32 each = bins / THREADS, top = bins - threadIdx.x * each;
  u32 own = 0;
  for (u32 j = 1; j <= each; j++) own += fresh(counts + top - j);
  u32 above = block_scan(own) - own;
  if (threadIdx.x == 0) found[0] = found[1] = found[2] = 0;
  __syncthreads();
  if (above < rank && rank <= above + own) {
    u32 bin = top - 1;
    while (above + fresh(counts + bin) < rank) above += fresh(counts + bin--);
    found[0] = bin;
    found[1] = above;
    found[2] = fresh(counts + bin);
  }
  __syncthreads();
  Bin out = {found[0], found[1], found[2]};
  __syncthreads();
  return out;
}

#endif
