// Values at indices that are known already: AR-Topk's gather and scatter, and random-k, whose indices come from the counter.
// And payloads of k of n values as they arrive, which are added up where they lie.
#include "feedback.cuh"

// Takes the values at k indices, times a factor, out of compensated. An index beyond n takes nothing and is reported.
extern "C" __global__ void __launch_bounds__(THREADS) gather(float* compensated, u32 n, const u32* indices, u32 k, float factor,
                                                             float* values, State* s, Outcome* o, Partials* p) {
  const float most = 3.40282346638528859812e38f;
  double sent = 0.0, taken = 0.0;
  for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < k; j += gridDim.x * THREADS) {
    u32 i = indices[j];
    float value = 0.0f;
    if (i < n) {
      float x = o->refused ? 0.0f : compensated[i], scaled = x * factor;
      value = scaled > most ? most : scaled < -most ? -most : scaled;
      if (!o->refused) compensated[i] = x - value;
      taken += square(x) - square(x - value);
    } else {
      o->over = 1;
    }
    values[j] = value;
    sent += square(value);
  }
  if (!last_sums(p, s->done + 6, sent, taken) || threadIdx.x != 0) return;
  o->sent = sent;
  o->residual = o->compensated - taken;
  o->kept = k;
  o->bytes = 4 * (u64)k;
}

// Puts the memory back where a gradient was refused.
extern "C" __global__ void __launch_bounds__(THREADS) keep(float* compensated, const float* memory, u32 n, const Outcome* o) {
  if (!o->refused) return;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) compensated[i] = before(memory, i);
}

// Puts values back where a selection has taken them. One that was refused has taken nothing.
extern "C" __global__ void __launch_bounds__(THREADS) put(float* compensated, u32 n, const u32* indices, const float* values, u32 k,
                                                          const Outcome* o) {
  if (o->refused) return;
  for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < k; j += gridDim.x * THREADS)
    if (indices[j] < n) compensated[indices[j]] = values[j];
}

// out += scale * values at indices, which are all different. An index beyond n is left out.
extern "C" __global__ void __launch_bounds__(THREADS) scatter(float* out, u32 n, const u32* indices, const float* values,
                                                              u32 k, float scale) {
  for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < k; j += gridDim.x * THREADS)
    if (indices[j] < n) out[indices[j]] += scale * values[j];
}

// out += values / world at indices, which are all different: divided as on the CPU side, so that ranks which add up here and
// there have the same bits. An index beyond n is left out.
extern "C" __global__ void __launch_bounds__(THREADS) add_mean(float* out, u32 n, const u32* indices, const float* values,
                                                               u32 k, float world) {
  for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < k; j += gridDim.x * THREADS)
    if (indices[j] < n) out[indices[j]] += values[j] / world;
}

// Says in a byte of a message that the gradient was refused.
extern "C" __global__ void __launch_bounds__(THREADS) mark(u8* at, u32 bits, const Outcome* o) {
  if (threadIdx.x == 0 && o->refused) *at = (u8)(*at | bits);
}

// Floyd's algorithm (Bentley and Floyd 1987) in parallel. Draw d of `few` picks a place up to last(d) = n - few + d; if that
// is taken, last(d) itself. A place is taken by the first draw that picks it, and last(g) also by draw g when its own
// pick was taken. So all that must be known is which draw picked a place first.
struct Draws {
  u32 n, few;
  u32 key[4];

  __device__ __forceinline__ u32 last(u32 draw) const { return n - few + draw; }

  // Number `draw` of the stream below last + 1, by Philox 4x32 with 10 rounds.
  __device__ __forceinline__ u32 pick(u32 draw) const {
    u32 c0 = draw, c1 = 0, c2 = key[2], c3 = key[3], k0 = key[0], k1 = key[1];
    for (u32 round = 0; round < 10; round++) {
      u64 a = (u64)c0 * 0xd2511f53u, b = (u64)c2 * 0xcd9e8d57u;
      c0 = (u32)(b >> 32) ^ c1 ^ k0;
      c1 = (u32)b;
      c2 = (u32)(a >> 32) ^ c3 ^ k1;
      c3 = (u32)a;
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
    return (u32)__umul64hi((u64)c0 << 32 | c1, (u64)last(draw) + 1);
  }
};

// Which draw picked a place first: few - draw, so that zero means none.
extern "C" __global__ void __launch_bounds__(THREADS) draw_first(u32* first, u32 n, u32 few, u32 a, u32 b, u32 c, u32 d) {
  const Draws draws = {n, few, {a, b, c, d}};
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < few; i += gridDim.x * THREADS)
    atomicMax(first + draws.pick(i), few - i);
}

extern "C" __global__ void __launch_bounds__(THREADS) draw_set(const u32* first, u32* set, u32 n, u32 few, u32 a, u32 b,
                                                               u32 c, u32 d) {
  const Draws draws = {n, few, {a, b, c, d}};
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < few; i += gridDim.x * THREADS) {
    bool taken = false;
    u32 at = draws.pick(i);
    for (u32 draw = i, place = at;;) {
      taken = few - first[place] < draw;
      // Picked first by this draw; a place at the end may be another draw's last.
      if (taken || place < n - few || place - (n - few) == draw) break;
      draw = place - (n - few);
      place = draws.pick(draw);
    }
    if (taken) at = draws.last(i);
    atomicOr(set + at / 32, 1u << (at % 32));
  }
}

// Members per block of 8192, then their places: the set in order. With `flip`, what is not in it.
__device__ __forceinline__ u32 members(const u32* set, u32 n, u32 flip, u32 word) {
  if ((u64)word * 32 >= n) return 0;
  u32 inside = n - word * 32 < 32 ? (1u << (n - word * 32)) - 1 : FULL;
  return (set[word] ^ (flip ? FULL : 0)) & inside;
}

extern "C" __global__ void __launch_bounds__(THREADS) count_set(const u32* set, u32 n, u32 flip, u32* counts) {
  const u32 words = n / 32 + (n % 32 != 0), tiles = words / THREADS + (words % THREADS != 0);
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    u32 own = (u32)__popc(members(set, n, flip, tile * THREADS + threadIdx.x)), scanned = block_scan(own);
    if (threadIdx.x == THREADS - 1) counts[tile] = scanned;
  }
}

// By one block: sums of all tiles before.
extern "C" __global__ void __launch_bounds__(THREADS) scan_set(u32* counts, u32 tiles) { scan_counts(counts, tiles); }

extern "C" __global__ void __launch_bounds__(THREADS) list_set(const u32* set, u32 n, u32 flip, const u32* counts,
                                                               u32* indices, u32 room) {
  const u32 words = n / 32 + (n % 32 != 0), tiles = words / THREADS + (words % THREADS != 0);
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u32 word = tile * THREADS + threadIdx.x;
    u32 bits = members(set, n, flip, word), own = (u32)__popc(bits), at = counts[tile] + block_scan(own) - own;
    for (; bits != 0; bits &= bits - 1, at++)
      if (at < room) indices[at] = word * 32 + __ffs(bits) - 1;
  }
}

// A payload of k of n values (compression/FORMAT.md, "Sets of indices"): k, the coding's byte, the set, the values. Where its
// parts lie follows from n and k, and its bytes come from another machine. So whatever they are, nothing beyond the payload
// is read and nothing beyond n is written; what is not as it must be is left out, and `refused` becomes the number of its
// rank, from 1 (of several the largest).
#define CODED_U32 1u
#define CODED_ELIAS_FANO 2u

// Of k and the coding's byte.
#define LIST_FRONT 5u

__device__ __forceinline__ void refuse(u32* refused, u32 rank) { atomicMax(refused, rank); }

// Whether the payload is of so many values in this coding. Where not, one thread of the grid says so. The same for all threads.
__device__ __forceinline__ bool begins_as(const u8* payload, u32 k, u32 code, u32* refused, u32 rank) {
  const bool is = word_at(payload) == k && payload[LIST_FRONT - 1] == code;
  if (!is && blockIdx.x == 0 && threadIdx.x == 0) refuse(refused, rank);
  return is;
}

// out += scale * value at an index that lies below n and behind the one before it.
__device__ __forceinline__ void add_one(float* out, u32 n, u64 index, bool ascends, float value, float scale, u32* refused,
                                        u32 rank) {
  if (index < n && ascends && key_of(value) < NOT_FINITE) out[index] += scale * value;
  else refuse(refused, rank);
}

// Of indices that are u32.
extern "C" __global__ void __launch_bounds__(THREADS) add_listed(float* out, u32 n, const u8* payload, u32 k, float scale,
                                                                 u32* refused, u32 rank) {
  if (!begins_as(payload, k, CODED_U32, refused, rank)) return;
  const u8 *indices = payload + LIST_FRONT, *values = indices + 4 * (u64)k;
  for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < k; j += gridDim.x * THREADS) {
    const u32 index = word_at(indices + 4 * (u64)j);
    const bool ascends = j == 0 || word_at(indices + 4 * (u64)j - 4) < index;
    add_one(out, n, index, ascends, float_at(values + 4 * (u64)j), scale, refused, rank);
  }
}

// Bits that are a one per index: of Elias-Fano's unary part, or of a bitmap. A block works on a byte per thread at a time.
#define MARKS (8 * THREADS)

// Ones of every tile of all ranks' sets, which are `bytes` long each and begin at `at` in their payloads.
extern "C" __global__ void __launch_bounds__(THREADS) count_marks(const u8* payloads, u64 stride, u32 ranks, u64 at,
                                                                  u32 bytes, u32* counts) {
  const u32 tiles = bytes / THREADS + (bytes % THREADS != 0);
  for (u64 job = blockIdx.x; job < (u64)ranks * tiles; job += gridDim.x) {
    const u8* marks = payloads + job / tiles * stride + at;
    const u32 byte = (u32)(job % tiles) * THREADS + threadIdx.x;
    const u32 scanned = block_scan(byte < bytes ? (u32)__popc(marks[byte]) : 0);
    if (threadIdx.x == THREADS - 1) counts[job] = scanned;
  }
}

// By a block per rank: sums of all its tiles before. Other than k ones are refused.
extern "C" __global__ void __launch_bounds__(THREADS) scan_marks(u32* counts, u32 tiles, u32 k, u32* refused) {
  const u32 ones = scan_counts(counts + (u64)blockIdx.x * tiles, tiles);
  if (threadIdx.x == 0 && ones != k) refuse(refused, blockIdx.x + 1);
}

// `width` bits from bit `at` on, the first one lowest; at most 31.
__device__ __forceinline__ u32 bits_at(const u8* from, u64 at, u32 width) {
  u64 word = 0;
  for (u32 j = 0; 8 * j < at % 8 + width; j++) word |= (u64)from[at / 8 + j] << (8 * j);
  return (u32)(word >> (at % 8)) & ((1u << width) - 1);
}

// Of indices that are ones of a set; `at` and `values` say where the set and the values begin. Of Elias-Fano, the j-th one at
// place p is an index whose upper part is p - j, and whose `low` lower bits stand in front of the set.
extern "C" __global__ void __launch_bounds__(THREADS) add_marked(float* out, u32 n, const u8* payload, u32 k, u32 code,
                                                                 u32 low, u64 at, u64 values, float scale,
                                                                 const u32* counts, u32* refused, u32 rank) {
  SHARED(u16, places, MARKS);
  SHARED(u32, total, 1);
  if (!begins_as(payload, k, code, refused, rank)) return;
  const u8 *lows = payload + LIST_FRONT, *marks = payload + at;
  const u32 bytes = (u32)(values - at), tiles = bytes / THREADS + (bytes % THREADS != 0), padding = (u64)k * low % 8;
  if (blockIdx.x == 0 && threadIdx.x == 0 && padding != 0 && marks[-1] >> padding != 0) refuse(refused, rank);
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    // Where ones are is listed first: neighbouring threads then read neighbouring values. Whoever comes back here waits in the
    // scan until all have read the list before.
    const u32 byte = tile * THREADS + threadIdx.x;
    u32 ones = byte < bytes ? marks[byte] : 0, own = (u32)__popc(ones), scanned = block_scan(own), to = scanned - own;
    for (; ones != 0; ones &= ones - 1) places[to++] = (u16)(8 * threadIdx.x + __ffs(ones) - 1);
    if (threadIdx.x == THREADS - 1) total[0] = scanned;
    __syncthreads();
    const u32 before = counts[tile];
    for (u32 i = threadIdx.x; i < total[0]; i += THREADS) {
      // More ones than values are refused already.
      const u32 j = before + i;
      if (j >= k) break;
      const u64 place = (u64)tile * MARKS + places[i];
      u64 index = place;
      bool ascends = true;
      if (code == CODED_ELIAS_FANO) {
        const u32 lower = bits_at(lows, (u64)j * low, low);
        index = (place - j) << low | lower;
        // Right behind another one the upper part is the same, and the lower bits must ascend.
        const bool same = place > 0 && (marks[(place - 1) / 8] >> ((place - 1) % 8) & 1) != 0;
        ascends = !same || (j > 0 && bits_at(lows, (u64)(j - 1) * low, low) < lower);
      }
      add_one(out, n, index, ascends, float_at(payload + values + 4 * (u64)j), scale, refused, rank);
    }
  }
}
