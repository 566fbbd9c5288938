// Gains of all candidates in one read: a histogram of magnitudes in fine bins. What the values of a bin may be bounds the
// energy of those above a cut and of those below, and so the gain; between the bounds it is estimated as if bins were
// filled evenly.
//
// Bins are counted and nothing else: in a block's memory the hardware adds ones of lanes that meet in a bin at once, where
// a sum of 64 bits is a loop of compare and swap. Whole numbers are the same on every device, whatever the order.
#include "feedback.cuh"

// Where gradients lie, from 2^-60 to 2^68, a bin is 2^-6 of its octave wide, elsewhere 2^-3.
#define MID_KEY (67u << 23)
#define MID_KEYS (128u << 23)
#define MID_BIN (67u << 3)
#define HIGH_BIN (MID_BIN + (128u << 6))
#define COARSE_AT_HIGH (195u << 3)

__device__ __forceinline__ u32 bin_of(u32 key) {
  if (key - MID_KEY < MID_KEYS) return MID_BIN + ((key - MID_KEY) >> 17);
  return (key >> 20) + (key < MID_KEY ? 0 : HIGH_BIN - COARSE_AT_HIGH);
}

// The least magnitude of a bin; of the one behind the last that finite values reach, 2^128.
__device__ __forceinline__ double edge_of(u32 bin) {
  const u32 key = bin < MID_BIN    ? bin << 20
                  : bin < HIGH_BIN ? MID_KEY + ((bin - MID_BIN) << 17)
                                   : (bin - (HIGH_BIN - COARSE_AT_HIGH)) << 20;
  return key >= NOT_FINITE ? ldexp(1.0, 128) : (double)float_of(key);
}

// What the energy of some values is: at least, at most, and likely.
struct Energies {
  double least, most, likely;

  // Of `count` values spread evenly from low to high.
  static __device__ __forceinline__ Energies of(double count, double low, double high) {
    return {count * low * low, count * high * high, count * (low * low + low * high + high * high) / 3.0};
  }
  static __device__ __forceinline__ Energies of_bin(u32 count, u32 bin) {
    return of((double)count, edge_of(bin), edge_of(bin + 1));
  }
  __device__ __forceinline__ Energies plus(const Energies& other) const {
    return {least + other.least, most + other.most, likely + other.likely};
  }
};

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

// Of the k largest, where `above` lie in bins above theirs and `rest` of the `count` in `bin` are in; `all` is everybody's.
__device__ void gain_of(const Energies& above, const Energies& all, u32 bin, double rest, double count, double* to) {
  const double low = edge_of(bin), high = edge_of(bin + 1), cut = high - rest / count * (high - low);
  const Energies whole = Energies::of(count, low, high), in = Energies::of(rest, low, high);
  // Those that are in are the bin's largest.
  const double likely = above.likely + Energies::of(rest, cut, high).likely;
  const double sent_least = above.least + in.least, sent_most = above.most + in.most;
  // Of those that stay. Differences of long sums: off by some 1e-13 of all, which the bound below has room for.
  const double left_least = fmax(all.least - above.least - whole.least, 0.0) + (count - rest) * low * low;
  const double left_most = fmax(all.most - above.most - whole.most, 0.0) + (count - rest) * high * high;
  const double least = sent_least > 0.0 ? sent_least / (sent_least + left_most) : 0.0;
  const double most = sent_most / (sent_most + left_least);
  const double gain = fmin(fmax(likely / all.likely, least), most);
  to[0] = gain;
  to[1] = fmax(most - gain, gain - least) + 1e-9;
}

template <typename T>
__device__ __forceinline__ void gains(const T* gradient, const float* memory, u32 n, float beta, float gamma,
                                      const u32* ks, u32 candidates, double* out, State* s, Outcome* o, Partials* p) {
  SHARED(u32, bins, FINE_BINS);
  for (u32 i = threadIdx.x; i < FINE_BINS; i += THREADS) bins[i] = 0;
  __syncthreads();
  u32 most = 0;
  double energy = 0.0;
  each_compensated(gradient, memory, (float*)0, n, beta, gamma, [&](float x) {
    const u32 key = key_of(x);
    most = key > most ? key : most;
    energy += square(x);
    atomicAdd(bins + bin_of(key), 1u);
  });
  most = block_max(most);
  if (threadIdx.x == 0) atomicMax(&s->max_key, most);
  for (u32 i = threadIdx.x; i < FINE_BINS; i += THREADS)
    if (bins[i] != 0) atomicAdd(s->fine + i, bins[i]);
  if (!last_sums(p, s->done, energy)) return;
  if (threadIdx.x == 0) begin_outcome(s, o, energy);

  // From the top, a stretch of bins per thread: counts above every bin, energies above every stretch.
  const u32 each = FINE_BINS / THREADS, top = FINE_BINS - threadIdx.x * each;
  u32 own = 0;
  Energies here = {0.0, 0.0, 0.0};
  for (u32 j = 1; j <= each; j++) {
    const u32 count = fresh(s->fine + top - j);
    own += count;
    if (count != 0) here = here.plus(Energies::of_bin(count, top - j));
  }
  u32 count = block_scan(own) - own;
  const Energies upto = {block_scan_wide(here.least), block_scan_wide(here.most), block_scan_wide(here.likely)};
  SHARED(Energies, stretches, THREADS);
  SHARED(Energies, totals, 1);
  stretches[threadIdx.x] = {upto.least - here.least, upto.most - here.most, upto.likely - here.likely};
  if (threadIdx.x == THREADS - 1) totals[0] = upto;
  for (u32 j = 1; j <= each; j++) {
    bins[top - j] = count;
    count += fresh(s->fine + top - j);
  }
  __syncthreads();
  const u32 max_key = fresh(&s->max_key);
  for (u32 j = threadIdx.x; j < candidates; j += THREADS) {
    double* to = out + 2 * j;
    const u32 k = ks[j];
    to[0] = max_key == 0 || k >= n ? 1.0 : 0.0;
    to[1] = 0.0;
    if (max_key >= NOT_FINITE) {
      to[0] = 0.0;
      to[1] = 1.0;
    }
    if (max_key == 0 || max_key >= NOT_FINITE || k == 0 || k >= n) continue;
    // The lowest bin with fewer than k above it.
    u32 low = 0, high = FINE_BINS - 1;
    while (low < high) {
      u32 middle = (low + high) / 2;
      if (bins[middle] < k) high = middle;
      else low = middle + 1;
    }
    const u32 stretch = (FINE_BINS - 1 - low) / each;
    Energies above = stretches[stretch];
    for (u32 bin = FINE_BINS - stretch * each - 1; bin > low; bin--)
      above = above.plus(Energies::of_bin(fresh(s->fine + bin), bin));
    gain_of(above, totals[0], low, (double)(k - bins[low]), (double)fresh(s->fine + low), to);
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

// What reading gradient and memory takes, and nothing else: the largest magnitude's bits.
extern "C" __global__ void __launch_bounds__(THREADS)
    largest_f32(const float* gradient, const float* memory, u32 n, float beta, float gamma, u32* to) {
  u32 most = 0;
  each_compensated(gradient, memory, (float*)0, n, beta, gamma, [&](float x) {
    const u32 key = key_of(x);
    most = key > most ? key : most;
  });
  most = block_max(most);
  if (threadIdx.x == 0) atomicMax(to, most);
}
