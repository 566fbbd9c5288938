// Gains of all candidate ratios in one read of gradient and memory: counts and energies of 2048 bins of magnitude (8 bits of
// exponent, 3 of the mantissa). Only within the bin in which a candidate's cut lies is anything estimated.
//
// Energies are sums of whole numbers, the squares of mantissas' upper 16 bits: the same on every device, whatever the
// order, and within 2^-15 of the values'.
#include "feed.cuh"

// Sum over this and all lower threads.
__device__ double block_scan_wide(double value) {
  SHARED(double, sums, THREADS);
  __syncthreads();
  sums[threadIdx.x] = value;
  for (u32 d = 1; d < THREADS; d *= 2) {
    __syncthreads();
    double other = threadIdx.x >= d ? sums[threadIdx.x - d] : 0.0;
    __syncthreads();
    sums[threadIdx.x] += other;
  }
  __syncthreads();
  return sums[threadIdx.x];
}

__device__ __forceinline__ u64 square_of(u32 key) {
  u32 mantissa = key & 0x7fffffu;
  if (key >= 0x800000u) mantissa |= 0x800000u;
  u64 upper = mantissa >> 8;
  return upper * upper;
}

// What a sum of squares of a bin stands for.
__device__ __forceinline__ double energy_of(u64 squares, u32 bin) {
  int exponent = (int)(bin >> 3);
  if (exponent == 0) exponent = 1;
  return ldexp((double)squares, 2 * (exponent - 142));
}

// Of the k largest, where `rest` of the `count` in a bin are in: the energy of these, were the bin filled evenly, and how far
// that may be off.
__device__ void part_of_bin(u32 bin, double rest, double count, double energy, double* part, double* off) {
  double low = (double)float_of(bin << 20), high = bin == 2039 ? ldexp(1.0, 128) : (double)float_of((bin + 1) << 20);
  double share = rest / count, cut = high - share * (high - low);
  double most = rest * high * high < energy ? rest * high * high : energy, least = share * energy;
  double guess = least * ((high * high + high * cut + cut * cut) / (high * high + high * low + low * low));
  guess = guess < least ? least : guess > most ? most : guess;
  *part = guess;
  *off = most - guess > guess - least ? most - guess : guess - least;
}

template <typename T>
__device__ __forceinline__ void gains(const T* gradient, const float* memory, u32 n, float beta, float gamma,
                                      const u32* ks, u32 candidates, double* out, State* s, Outcome* o, Partials* p) {
  SHARED(u32, bins, 2048);
  SHARED(u64, squares, 2048);
  for (u32 i = threadIdx.x; i < 2048; i += THREADS) bins[i] = 0, squares[i] = 0;
  __syncthreads();
  u32 most = 0;
  double energy = 0.0;
  each_fed(gradient, memory, (float*)0, n, beta, gamma, [&](float x) {
    const u32 key = key_of(x);
    most = key > most ? key : most;
    energy += (double)x * (double)x;
    atomicAdd(bins + (key >> 20), 1u);
    atomicAdd(squares + (key >> 20), square_of(key));
  });
  most = block_max(most);
  energy = block_sum(energy);
  if (threadIdx.x == 0) {
    p->energy[blockIdx.x] = energy;
    atomicMax(&s->max_key, most);
  }
  for (u32 i = threadIdx.x; i < 2048; i += THREADS) {
    if (bins[i] == 0) continue;
    atomicAdd(s->first + i, bins[i]);
    atomicAdd(s->squares + i, squares[i]);
  }
  if (!last_block(s->done)) return;
  energy = sum_of(p->energy, gridDim.x);
  if (threadIdx.x == 0) begin_outcome(s, o, energy);

  // By bin, from the top: counts and energies of all bins above, where this block's own were (they are in s by now).
  double* above = reinterpret_cast<double*>(squares);
  const u32 each = 2048 / THREADS, top = 2048 - threadIdx.x * each;
  u32 own = 0;
  double own_energy = 0.0;
  for (u32 j = 1; j <= each; j++) {
    own += fresh(s->first + top - j);
    own_energy += energy_of(fresh(s->squares + top - j), top - j);
  }
  u32 count = block_scan(own) - own;
  double higher = block_scan_wide(own_energy);
  SHARED(double, all, 1);
  if (threadIdx.x == THREADS - 1) all[0] = higher;
  higher -= own_energy;
  __syncthreads();
  for (u32 j = 1; j <= each; j++) {
    bins[top - j] = count;
    above[top - j] = higher;
    count += fresh(s->first + top - j);
    higher += energy_of(fresh(s->squares + top - j), top - j);
  }
  __syncthreads();
  const bool refused = fresh(&s->max_key) >= NOT_FINITE;
  for (u32 j = threadIdx.x; j < candidates; j += THREADS) {
    double gain = 1.0, off = 0.0;
    u32 k = ks[j] < n ? ks[j] : n;
    if (all[0] > 0.0 && k < n) {
      // The lowest bin with fewer than k above it.
      u32 low = 0, high = 2047;
      while (low < high) {
        u32 middle = (low + high) / 2;
        if (bins[middle] < k) high = middle;
        else low = middle + 1;
      }
      double in_bin = (double)fresh(s->first + low), part = 0.0;
      if (in_bin > 0.0)
        part_of_bin(low, (double)(k - bins[low]), in_bin, energy_of(fresh(s->squares + low), low), &part, &off);
      gain = (above[low] + part) / all[0];
      off = off / all[0] + 6.2e-5;  // 2^-14: mantissas are cut off
    }
    out[2 * j] = refused ? 0.0 : gain;
    out[2 * j + 1] = refused ? 1.0 : off;
  }
}

#define GAINS(name, type)                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                \
      name(const type* gradient, const float* memory, u32 n, float beta, float gamma, const u32* ks, u32 candidates,    \
           double* out, State* s, Outcome* o, Partials* p) {                                                           \
    gains(gradient, memory, n, beta, gamma, ks, candidates, out, s, o, p);                                             \
  }
GAINS(gains_f32, float)
GAINS(gains_f16, f16)
GAINS(gains_bf16, bf16)
