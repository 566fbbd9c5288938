// Error feedback, the exact k-th largest key by digits of 11, 10 and 10 bits (never a full sort), compaction in order of
// position with ties to the lowest index, the memory's update and the energies: four launches, of which one reads gradient
// and memory and writes their sum, the second and the last read that sum, and the third reads the few keys still in play.
#include "feedback.cuh"

// The cut for the k largest after the first digit; by the last block.
__device__ void cut_first(State* s, u32 k) {
  Bin bin = find_bin(s->first, 2048, k);
  if (threadIdx.x != 0) return;
  s->k = k;
  s->prefix = bin.bin;
  s->rest = k - bin.above;
  s->count = bin.count;
}

template <typename T>
__device__ __forceinline__ void compensate(const T* gradient, const float* memory, float* compensated, u32 n, float beta, float gamma,
                                     u32 k, State* s, Outcome* o, Partials* p) {
  // Two histograms: neighbouring warps do not wait for each other's equal digits.
  SHARED(u32, bins, 2 * 2048);
  for (u32 i = threadIdx.x; i < 2 * 2048; i += THREADS) bins[i] = 0;
  __syncthreads();
  u32* own = bins + (warp() & 1u) * 2048;
  double energy = 0.0;
  u32 most = 0;
  each_compensated(gradient, memory, compensated, n, beta, gamma, [&](float x) {
    const u32 key = key_of(x);
    energy += square(x);
    most = key > most ? key : most;
    atomicAdd(own + (key >> 20), 1u);
  });
  most = block_max(most);
  for (u32 i = threadIdx.x; i < 2048; i += THREADS) {
    u32 count = bins[i] + bins[2048 + i];
    if (count != 0) atomicAdd(s->first + i, count);
  }
  if (threadIdx.x == 0) atomicMax(&s->max_key, most);
  if (!last_sums(p, s->done + 0, energy)) return;
  if (threadIdx.x == 0) begin_outcome(s, o, energy);
  cut_first(s, k);
}

#define COMPENSATE(name, type)                                                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS) name(const type* gradient, const float* memory, float* compensated, u32 n, \
                                                             float beta, float gamma, u32 k, State* s, Outcome* o,      \
                                                             Partials* p) {                                            \
    compensate(gradient, memory, compensated, n, beta, gamma, k, s, o, p);                                                   \
  }
COMPENSATE(compensate_f32, float)
COMPENSATE(compensate_f16, f16)
COMPENSATE(compensate_bf16, bf16)

// Keys in play on their way to the list. A warp holds its own back and hands many over at a time: every hand-over is an
// atomic on the one word that all warps of the device count with.
#define HELD 512

// By all lanes of a warp together.
__device__ __forceinline__ void hold(u32* held, u32* count, u32 key, bool in_play) {
  const u32 mask = __ballot_sync(FULL, in_play);
  if (in_play) held[*count + __popc(mask & ((1u << lane()) - 1u))] = key;
  *count += __popc(mask);
}

__device__ __forceinline__ void hand_over(State* s, u32* list, const u32* held, u32 count) {
  u32 at = 0;
  if (lane() == 0) at = atomicAdd(&s->listed, count);
  at = __shfl_sync(FULL, at, 0);
  __syncwarp();
  for (u32 i = lane(); i < count; i += 32) list[at + i] = held[i];
  __syncwarp();
}

// The second digit. The keys in play go to the list when it has room for them all. With partial sums given, mean |x|
// too.
extern "C" __global__ void __launch_bounds__(THREADS) cut_second(const float* compensated, u32 n, State* s, const Outcome* o,
                                                                 u32* list, u32 room, Partials* p) {
  SHARED(u32, bins, 1024);
  SHARED(u32, held_of_all, WARPS * HELD);
  if (o->refused || s->settled) return;
  for (u32 i = threadIdx.x; i < 1024; i += THREADS) bins[i] = 0;
  __syncthreads();
  u32* held = held_of_all + warp() * HELD;
  u32 holds = 0;
  const u32 prefix = s->prefix, groups = n / 4 + (n % 4 != 0);
  const bool fits = s->count <= room;
  double magnitude = 0.0;
  for (u32 first = blockIdx.x * THREADS; first < groups; first += gridDim.x * THREADS) {
    u32 i = first + threadIdx.x;
    Four<float> x = {};
    if (i < groups) x = load_four(compensated, i, n);
    for (u32 c = 0; c < 4; c++) {
      u32 key = key_of(x.v[c]);
      bool in_play = i < groups && 4 * i + c < n && key >> 20 == prefix;
      if (in_play) atomicAdd(bins + (key >> 10 & 1023u), 1u);
      if (p != 0) magnitude += (double)float_of(key);
      if (fits) hold(held, &holds, key, in_play);
    }
    if (holds > HELD - 4 * 32) {
      hand_over(s, list, held, holds);
      holds = 0;
    }
  }
  if (holds > 0) hand_over(s, list, held, holds);
  __syncthreads();
  for (u32 i = threadIdx.x; i < 1024; i += THREADS)
    if (bins[i] != 0) atomicAdd(s->second + i, bins[i]);
  if (p != 0 ? !last_sums(p, s->done + 1, magnitude) : !last_block(s->done + 1)) return;
  const u32 rank = s->rest;
  Bin bin = find_bin(s->second, 1024, rank);
  if (threadIdx.x != 0) return;
  s->prefix = prefix << 10 | bin.bin;
  s->rest = rank - bin.above;
  s->mean = magnitude / (double)n;
}

// The third digit, of the list or of all; then the cut is known.
extern "C" __global__ void __launch_bounds__(THREADS) cut_third(const float* compensated, u32 n, State* s, const Outcome* o,
                                                                const u32* list, u32 room) {
  SHARED(u32, bins, 1024);
  if (o->refused || s->settled) return;
  for (u32 i = threadIdx.x; i < 1024; i += THREADS) bins[i] = 0;
  __syncthreads();
  const u32 prefix = s->prefix, k = s->k;
  const bool fits = s->count <= room;
  const u32 count = fits ? s->listed : n;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
    u32 key = fits ? list[i] : key_of(compensated[i]);
    if (key >> 10 == prefix) atomicAdd(bins + (key & 1023u), 1u);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < 1024; i += THREADS)
    if (bins[i] != 0) atomicAdd(s->third + i, bins[i]);
  if (!last_block(s->done + 2)) return;
  const u32 rank = s->rest;
  Bin bin = find_bin(s->third, 1024, rank);
  if (threadIdx.x != 0) return;
  u32 key = prefix << 10 | bin.bin;
  s->hi = k == 0 ? 0xffffffffu : key + 1;
  s->lo = k == 0 ? 0xffffffffu : key;
  s->start = 0;
  s->length = rank - bin.above;
}

// A tile is what a block compacts at a time: ROWS times four values per thread.
#define ROWS 4
#define TILE (ROWS * 4 * THREADS)

// Words of the tiles: how far it is, then two counts of 31 bits.
#define AGGREGATE (1ull << 62)
#define PREFIX (2ull << 62)
#define COUNTS (AGGREGATE - 1)

// Counts of all tiles before (Merrill and Garland 2016, "Single-pass parallel prefix scan with decoupled look-back").
// By one warp.
__device__ u64 look_back(u64* tiles, u32 tile, u64 own) {
  volatile u64* words = tiles;
  u64 before = 0;
  if (tile > 0) {
    if (lane() == 0) words[tile] = AGGREGATE | own;
    for (i64 last = (i64)tile - 1;; last -= 32) {
      i64 at = last - lane();
      u64 word = at < 0 ? PREFIX : words[at];
      while (__ballot_sync(FULL, (word >> 62) != 0) != FULL) {
        SPIN();
        if (at >= 0) word = words[at];
      }
      u32 whole = __ballot_sync(FULL, (word >> 62) == 2);
      u32 nearest = whole == 0 ? 32 : __ffs(whole) - 1;
      u64 sum = lane() <= nearest ? word & COUNTS : 0;
      for (u32 d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
      before += sum;
      if (whole != 0) break;
    }
  }
  if (lane() == 0) words[tile] = PREFIX | (before + own);
  return before;
}

// How many of the first b in the band are taken.
__device__ __forceinline__ u32 from_band(u32 b, u32 start, u32 length) {
  u32 past = b > start ? b - start : 0;
  return past < length ? past : length;
}

// A gradient that was refused leaves the memory as it was, and a message that means zeros.
__device__ void give_up(float* compensated, const float* memory, u32 n, const State* s, Outcome* o, u32* indices, float* values,
                        u32 room) {
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) compensated[i] = before(memory, i);
  u32 k = s->k < room ? s->k : room;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < k; i += gridDim.x * THREADS) {
    indices[i] = i;
    values[i] = 0.0f;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) o->kept = k;
}

// Takes what is selected out of compensated, in order of position.
extern "C" __global__ void __launch_bounds__(THREADS) take(float* compensated, const float* memory, u32 n, State* s, Outcome* o,
                                                           u64* tiles, double* sums, u32* indices, float* values,
                                                           u32 room) {
  SHARED(u32, begun, 1);
  SHARED(u32, counts, ROWS * WARPS);
  SHARED(u64, earlier, 1);
  if (o->refused) return give_up(compensated, memory, n, s, o, indices, values, room);
  const u32 hi = s->hi, lo = s->lo, start = s->start, length = s->length;
  const u32 tile_count = n / TILE + (n % TILE != 0), groups = n / 4 + (n % 4 != 0);
  // In order of tickets: whoever waits for a tile knows that it was begun before, or will be by a block that waits for
  // earlier tiles alone. The next ticket is asked for while a tile is worked on.
  u32 ticket = 0;
  if (threadIdx.x == 0) ticket = atomicAdd(&s->ticket, 1u);
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      begun[0] = ticket;
      if (ticket < tile_count) ticket = atomicAdd(&s->ticket, 1u);
    }
    __syncthreads();
    const u32 tile = begun[0];
    if (tile >= tile_count) break;
    Four<float> x[ROWS];
    u32 own[ROWS], inclusive[ROWS];
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
      u32 i = (tile * ROWS + row) * THREADS + threadIdx.x;
      own[row] = 0;
      x[row] = Four<float>();
      if (i < groups) x[row] = load_four(compensated, i, n);
      for (u32 c = 0; c < 4; c++) {
        u32 key = key_of(x[row].v[c]);
        if (i >= groups || 4 * i + c >= n) continue;
        // Two counts of 16 bits: a tile has 4096 values.
        own[row] += key >= hi ? 1u << 16 : key >= lo ? 1u : 0u;
      }
      inclusive[row] = warp_scan(own[row]);
      if (lane() == 31) counts[row * WARPS + warp()] = inclusive[row];
    }
    __syncthreads();
    if (warp() == 0) {
      u32 mine = counts[lane()], scanned = warp_scan(mine);
      u32 total = __shfl_sync(FULL, scanned, 31);
      counts[lane()] = scanned - mine;
      u64 before = look_back(tiles, tile, (u64)(total >> 16) << 31 | (total & 0xffffu));
      if (lane() == 0) earlier[0] = before;
    }
    __syncthreads();
    const u32 above = (u32)(earlier[0] >> 31), band = (u32)(earlier[0] & KEY_MASK);
    double energy = 0.0;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
      if (own[row] == 0) continue;
      u32 earlier_here = counts[row * WARPS + warp()] + inclusive[row] - own[row];
      u32 a = above + (earlier_here >> 16), b = band + (earlier_here & 0xffffu);
      u32 i = (tile * ROWS + row) * THREADS + threadIdx.x;
      for (u32 c = 0; c < 4; c++) {
        u32 key = key_of(x[row].v[c]);
        if (4 * i + c >= n || key < lo) continue;
        bool in_band = key < hi;
        u32 at = a + from_band(b, start, length);
        bool in = !in_band || (b >= start && b - start < length);
        a += in_band ? 0 : 1;
        b += in_band ? 1 : 0;
        if (!in || at >= room) continue;
        float value = x[row].v[c];
        indices[at] = 4 * i + c;
        values[at] = value;
        compensated[4 * i + c] = 0.0f;
        energy += square(value);
      }
    }
    energy = block_sum(energy);
    if (threadIdx.x == 0) sums[tile] = energy;
  }
  if (!last_block(s->done + 3)) return;
  double sent = sum_of(sums, tile_count);
  if (threadIdx.x != 0) return;
  u64 all = tile_count == 0 ? 0 : fresh(tiles + tile_count - 1) & COUNTS;
  u32 kept = (u32)(all >> 31) + from_band((u32)(all & KEY_MASK), start, length);
  o->sent = sent;
  o->residual = o->compensated - sent;
  o->kept = kept < room ? kept : room;
  o->over = kept > room ? 1u : 0u;
}

// Instead of whether k is counted: indices that everybody knows, and only what follows them.
#define NO_SET 2u

// The coding of k indices below n (compression/FORMAT.md, "Sets of indices"), and where its parts begin in the payload.
struct Layout {
  u32 k, code, low, width;
  u64 lows, uppers, values, end;
};

__device__ __forceinline__ u32 bits_for(u32 value) { return value == 0 ? 0 : 32 - __clz(value); }

// Behind the indices: `led` by the outcome's norm, `bits` for each value.
__device__ Layout layout_of(const State* s, const Outcome* o, u32 n, u32 counted, u32 gaps, u32 led, u32 bits) {
  Layout at = {};
  const u64 k = o->kept;
  at.k = o->kept;
  if (counted == NO_SET) {
    at.end = (led ? 4 : 0) + (k * bits + 7) / 8;
    return at;
  }
  at.low = k == 0 ? 0 : bits_for((u32)(n / k)) - 1;
  const u64 lows = (k * at.low + 7) / 8, uppers = k == 0 ? 0 : (k + (n >> at.low) + 1 + 7) / 8;
  u64 size = 4 * k;
  at.code = 1;
  if (lows + uppers < size) size = lows + uppers, at.code = 2;
  if (((u64)n + 7) / 8 < size) size = ((u64)n + 7) / 8, at.code = 4;
  at.width = bits_for(s->gap);
  if (gaps && 1 + (k * at.width + 7) / 8 < size) size = 1 + (k * at.width + 7) / 8, at.code = 3;
  at.lows = (counted ? 4 : 0) + 1;
  at.uppers = at.lows + lows;
  at.values = at.lows + size;
  at.end = at.values + (led ? 4 : 0) + (k * bits + 7) / 8;
  return at;
}

// The largest distance between indices, less 1: for codings that depend on it.
extern "C" __global__ void __launch_bounds__(THREADS) gaps(const u32* indices, State* s, const Outcome* o) {
  u32 most = 0;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < o->kept; i += gridDim.x * THREADS) {
    u32 gap = i == 0 ? indices[0] : indices[i] - indices[i - 1] - 1;
    most = gap > most ? gap : most;
  }
  most = block_max(most);
  if (threadIdx.x == 0 && most > 0) atomicMax(&s->gap, most);
}

// Zeros where the payload will be: parts that share a word are merged into it.
extern "C" __global__ void __launch_bounds__(THREADS) clear(u32* payload, u32 n, const State* s, Outcome* o, u32 counted,
                                                            u32 with_gaps, u32 led, u32 bits) {
  Layout at = layout_of(s, o, n, counted, with_gaps, led, bits);
  const u64 words = (at.end + 3) / 4;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < words; i += (u64)gridDim.x * THREADS) payload[i] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) o->bytes = at.end;
}

// Writes bytes begin to end of the payload from words that `word(i)` answers.
template <typename F> __device__ __forceinline__ void put_words(u32* payload, u64 begin, u64 end, F word) {
  const u64 count = (end - begin + 3) / 4, base = begin / 4;
  const u32 shift = 8 * (u32)(begin % 4);
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count + (shift ? 1 : 0); i += (u64)gridDim.x * THREADS) {
    u32 value = i < count ? word(i) << shift : 0;
    if (shift && i > 0) value |= word(i - 1) >> (32 - shift);
    // A word that another part shares is merged.
    if (4 * (base + i) >= begin && 4 * (base + i) + 4 <= end) payload[base + i] = value;
    else if (value != 0) atomicOr(payload + base + i, value);
  }
}

__device__ __forceinline__ void put_bit(u32* payload, u64 begin, u64 bit) {
  u64 at = 8 * begin + bit;
  atomicOr(payload + at / 32, 1u << (at % 32));
}

// Word i of k numbers of `width` bits each, which `number(j)` answers.
template <typename F> __device__ __forceinline__ u32 levels_word(u64 i, u32 k, u32 width, F number) {
  const u64 begin = 32 * i;
  u32 word = 0;
  for (u64 j = begin / width; j < k && j * width < begin + 32; j++) {
    u64 bits = number((u32)j) & ((1ull << width) - 1);
    word |= j * width >= begin ? (u32)(bits << (j * width - begin)) : (u32)(bits >> (begin - j * width));
  }
  return word;
}

// The payload of a selection: k (if counted), the set of indices in its coding, values.
extern "C" __global__ void __launch_bounds__(THREADS) pack(const u32* indices, const float* values, u32 n, u32* payload,
                                                           const State* s, const Outcome* o, u32 counted, u32 with_gaps,
                                                           u32 led, u32 bits) {
  const Layout at = layout_of(s, o, n, counted, with_gaps, led, bits);
  const u32 k = at.k, first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
  if (first == 0 && counted != NO_SET) {
    u64 begin = at.lows - 1;
    atomicOr(payload + begin / 4, at.code << (8 * (begin % 4)));
    if (counted) atomicOr(payload, k);
  }
  if (led) put_words(payload, at.values, at.values + 4, [=](u64) { return bits_of(o->norm); });
  const u64 values_at = at.values + (led ? 4 : 0);
  if (bits == 32) put_words(payload, values_at, at.end, [=](u64 i) { return bits_of(values[i]); });
  else
    put_words(payload, values_at, at.end,
              [=](u64 i) { return levels_word(i, k, bits, [=](u32 j) { return (u64)bits_of(values[j]); }); });
  if (at.code == 1) put_words(payload, at.lows, at.values, [=](u64 i) { return indices[i]; });
  if (at.code == 2) {
    const u32 low = at.low;
    if (low > 0)
      put_words(payload, at.lows, at.uppers,
                [=](u64 i) { return levels_word(i, k, low, [=](u32 j) { return (u64)indices[j]; }); });
    for (u32 i = first; i < k; i += stride) put_bit(payload, at.uppers, (u64)(indices[i] >> low) + i);
  }
  if (at.code == 3) {
    const u32 width = at.width;
    if (first == 0) atomicOr(payload + at.lows / 4, width << (8 * (at.lows % 4)));
    if (width > 0)
      put_words(payload, at.lows + 1, at.values, [=](u64 i) {
        return levels_word(i, k, width,
                           [=](u32 j) { return (u64)(j == 0 ? indices[0] : indices[j] - indices[j - 1] - 1); });
      });
  }
  if (at.code == 4)
    for (u32 i = first; i < k; i += stride) put_bit(payload, at.lows, indices[i]);
}
