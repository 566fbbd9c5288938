// Methods with a threshold: each leaves in the state which keys are selected, and `take` (select.cu) selects them.
#include "feedback.cuh"
#include "rules.cuh"

// Keys from `key` on.
__device__ __forceinline__ void select_from(State* s, u32 key) {
  s->hi = key;
  s->lo = key;
  s->start = 0;
  s->length = 0;
  s->settled = 1;
}

extern "C" __global__ void __launch_bounds__(THREADS) settle_at(State* s, u32 key) {
  if (blockIdx.x == 0 && threadIdx.x == 0) select_from(s, key);
}

// MSTopk's 25 rounds (compression/src/select/mstopk.rs): more than k values reach a threshold exactly when its key is at
// most that of the (k+1)-th largest, which is in s->lo.
extern "C" __global__ void __launch_bounds__(THREADS) bisect(State* s, const Outcome* o) {
  if (blockIdx.x != 0 || threadIdx.x != 0 || o->refused) return;
  const double mean = s->mean, most = (double)o->max;
  double left = 0.0, right = 1.0;
  float upper = float_of(NOT_FINITE), lower = 0.0f;
  for (u32 round = 0; round < 25; round++) {
    double ratio = left + (right - left) / 2.0;
    float threshold = (float)(mean + ratio * (most - mean));
    if (key_of(threshold) <= s->lo) {
      left = ratio;
      lower = threshold;
    } else {
      right = ratio;
      upper = threshold;
    }
  }
  s->hi = key_of(upper);
  s->lo = key_of(lower);
}

// Where a run of `length` out of `band` places starts.
__device__ __forceinline__ u32 random_start(u64 seed, u32 band, u32 length) {
  u64 z = seed + 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return (u32)__umul64hi(z, (u64)(band - length) + 1);
}

// Keys from hi on, and from lo on below that; by the last block, in s->above and s->band.
__device__ __forceinline__ bool count_keys(const float* compensated, u32 n, u32 hi, u32 lo, State* s) {
  u32 here = 0, in_band = 0;
  each_of(compensated, n, [&](float x) {
    const u32 key = key_of(x);
    here += key >= hi ? 1 : 0;
    in_band += key < hi && key >= lo ? 1 : 0;
  });
  // Whole numbers: no order matters.
  const double above = block_sum((double)here), band = block_sum((double)in_band);
  if (threadIdx.x == 0) {
    atomicAdd(&s->above, (u32)above);
    atomicAdd(&s->band, (u32)band);
  }
  return last_block(s->done + 4);
}

// What MSTopk takes of the band: a run of neighbours at a random place, so that k are taken in all.
extern "C" __global__ void __launch_bounds__(THREADS) count_band(const float* compensated, u32 n, u32 k, u64 seed, State* s,
                                                                 const Outcome* o) {
  if (o->refused) return;
  if (!count_keys(compensated, n, s->hi, s->lo, s) || threadIdx.x != 0) return;
  const u32 above = fresh(&s->above), band = fresh(&s->band);
  s->length = k - above;
  s->start = random_start(seed, band, k - above);
}

// DGC: keys of a sample drawn by the counter (or of all, when that is no more), as floats, and their first digit.
extern "C" __global__ void __launch_bounds__(THREADS) sample(const float* compensated, u32 n, u32 samples, u32 rank, u32 a, u32 b,
                                                             u32 c, float* to, State* s, const Outcome* o) {
  if (o->refused) return;
  const Stream random = {a, b, c};
  // Most gradients have few first digits: blocks count by themselves, so that they do not wait for each other.
  SHARED(u32, bins, 2048);
  for (u32 i = threadIdx.x; i < 2048; i += THREADS) bins[i] = 0;
  __syncthreads();
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < samples; i += gridDim.x * THREADS) {
    u32 at = samples < n ? (u32)((u64)random.word(i) * n >> 32) : i;
    u32 key = key_of(compensated[at]);
    to[i] = float_of(key);
    atomicAdd(bins + (key >> 20), 1u);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < 2048; i += THREADS) {
    if (bins[i] != 0) atomicAdd(s->first + i, bins[i]);
  }
  if (!last_block(s->done + 0)) return;
  Bin bin = find_bin(s->first, 2048, rank);
  if (threadIdx.x != 0) return;
  s->k = rank;
  s->prefix = bin.bin;
  s->rest = rank - bin.above;
  s->count = bin.count;
}

// DGC: what reaches the sample's threshold is selected, unless that is more than `most`: then top-k goes on.
extern "C" __global__ void __launch_bounds__(THREADS) reach(const float* compensated, u32 n, u32 most, const State* sampled,
                                                            State* s, const Outcome* o) {
  if (o->refused) return;
  const u32 threshold = sampled->lo;
  if (!count_keys(compensated, n, threshold, threshold, s) || threadIdx.x != 0) return;
  if (fresh(&s->above) <= most) select_from(s, threshold);
}

// SIDCo (compression/src/methods/sparsification/sidco.rs).
#define FIT_EXPONENTIAL 0u
#define FIT_GAMMA 1u
#define FIT_PARETO 2u

// The largest double.
#define MOST 1.7976931348623157e308

// Of |x| less a shift.
struct Moments { double count, sum, squares, nonzero, logs; };

// ln of Gamma: Stirling's series from 8 on, the recurrence below.
__device__ double ln_gamma(double x) {
  double below = 0.0;
  while (x < 8.0) {
    below += log(x);
    x += 1.0;
  }
  const double inverse = 1.0 / x, square = inverse * inverse;
  double series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0)));
  return (x - 0.5) * log(x) - x + 0.9189385332046728 + series - below;
}

__device__ double fit_gamma(const Moments& m, double share) {
  double mean = m.sum / m.nonzero, of_these = share * m.count / m.nonzero;
  double s = log(mean) - m.logs / m.nonzero;
  double shape = (3.0 - s + sqrt((s - 3.0) * (s - 3.0) + 24.0 * s)) / (12.0 * s);
  if (!(shape > 0.0 && shape <= MOST)) return -1.0;
  return -(mean / shape) * (log(of_these) + ln_gamma(shape));
}

__device__ double fit_pareto(const Moments& m, double share) {
  double mean = m.sum / m.count, variance = m.squares / m.count - mean * mean, ratio = mean * mean / variance;
  double shape = 0.5 * (1.0 - ratio), scale = 0.5 * mean * (ratio + 1.0);
  return fabs(shape) < 1e-9 ? -scale * log(share) : scale / shape * (exp(-shape * log(share)) - 1.0);
}

// The value that a share of |x| exceeds; where a fit has no answer, the exponential's.
__device__ float fitted(const Moments& m, u32 fit, double share) {
  const double most = 3.4028234663852886e38;
  double exponential = -(m.count == 0.0 ? 0.0 : m.sum / m.count) * log(share);
  double threshold = fit == FIT_GAMMA ? fit_gamma(m, share) : fit == FIT_PARETO ? fit_pareto(m, share) : exponential;
  if (!(threshold > 0.0 && threshold <= MOST)) threshold = exponential;
  return (float)(threshold < most ? threshold : most);
}

// One stage: moments of all values, or of those above the threshold so far, and the next threshold.
extern "C" __global__ void __launch_bounds__(THREADS) fit_stage(const float* compensated, u32 n, u32 fit, double share, u32 later,
                                                                State* s, const Outcome* o, Partials* p) {
  if (o->refused) return;
  const double shift = later ? (double)s->threshold : 0.0;
  const u32 from = later ? s->hi : 0;
  Moments m = {0.0, 0.0, 0.0, 0.0, 0.0};
  // Logarithms are added up as exponents and products of mantissas, each below 2.
  double product = 1.0;
  int exponents = 0;
  u32 factors = 0;
  each_of(compensated, n, [&](float x) {
    const u32 key = key_of(x);
    if (key < from) return;
    const double wide = (double)float_of(key) - shift;
    m.count += 1.0;
    m.sum += wide;
    m.squares += wide * wide;
    if (fit != FIT_GAMMA || key < 0x800000u) return;
    m.nonzero += 1.0;
    exponents += (int)(key >> 23) - 127;
    product *= (double)float_of((key & 0x7fffffu) | 0x3f800000u);
    if (++factors % 512 != 0) return;
    m.logs += log(product) + (double)exponents * 0.6931471805599453;
    product = 1.0;
    exponents = 0;
  });
  m.logs += log(product) + (double)exponents * 0.6931471805599453;
  if (!last_sums(p, s->done + 5, m.count, m.sum, m.squares, m.nonzero, m.logs)) return;
  if (threadIdx.x != 0 || (later && m.count == 0.0)) return;
  float threshold = fitted(m, fit, share);
  s->threshold = later ? s->threshold + threshold : threshold;
  select_from(s, key_of(s->threshold) + 1);
}
