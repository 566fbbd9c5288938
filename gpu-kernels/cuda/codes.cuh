// How codes get into a payload.
#ifndef FLEXCOMM_CODES
#define FLEXCOMM_CODES
#include "feedback.cuh"

// The last block adds up what was sent and what stays.
__device__ __forceinline__ void finish(double sent, double residual, u64 bytes, State* s, Outcome* o, Partials* p) {
  if (!last_sums(p, s->done + 1, sent, residual) || threadIdx.x != 0) return;
  o->sent = sent;
  o->residual = residual;
  o->bytes = bytes;
}

// What a value leaves for the next step, and its energy.
__device__ __forceinline__ void leave(float* to, float rest, double& residual) {
  *to = rest;
  residual += square(rest);
}

// A warp works on 1024 values at a time, 32 in a row: `each(i, inside)` answers a row's bit of every lane, and the words of
// the 32 ballots go out side by side.
template <typename F> __device__ __forceinline__ void ballots(u32 n, u8* bits, F each) {
  const u32 stretches = n / 1024 + (n % 1024 != 0), warps = gridDim.x * WARPS;
  for (u32 stretch = blockIdx.x * WARPS + warp(); stretch < stretches; stretch += warps) {
    u32 own = 0;
#pragma unroll 8
    for (u32 row = 0; row < 32; row++) {
      const u32 i = 1024 * stretch + 32 * row + lane();
      bool bit = each(i, i < n);
      u32 word = __ballot_sync(FULL, bit && i < n);
      if (lane() == row) own = word;
    }
    const u64 at = 128 * (u64)stretch + 4 * lane(), end = ((u64)n + 7) / 8;
    if (at + 4 <= end) *reinterpret_cast<u32*>(bits + at) = own;
    else
      for (u32 j = 0; j < 4; j++)
        if (at + j < end) bits[at + j] = (u8)(own >> (8 * j));
  }
}

#endif
