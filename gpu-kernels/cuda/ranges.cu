// Quantizers with numbers of their own at the front: 1-bit SGD (a mean per side, of the tensor or of each column) and min-max
// 8-bit; and INCEPTIONN, whose values take 32, 16, 8 or 0 bits.
#include "codes.cuh"

// 1-bit SGD per column: sums in the order of rows, as on the CPU side; neighbouring threads have neighbouring columns.
extern "C" __global__ void __launch_bounds__(THREADS) side_columns(const float* compensated, u32 rows, u32 cols, float threshold,
                                                                   float* to, const Outcome* o) {
  for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < cols; j += gridDim.x * THREADS) {
    double below = 0.0, others = 0.0;
    u32 count = 0;
    for (u32 i = 0; i < rows; i++) {
      const float x = compensated[(u64)i * cols + j];
      const bool is_below = x < threshold;
      below += is_below ? (double)x : 0.0;
      others += is_below ? 0.0 : (double)x;
      count += is_below ? 1 : 0;
    }
    const bool refused = o->refused != 0;
    to[2 * j] = refused || count == 0 ? 0.0f : (float)(below / (double)count);
    to[2 * j + 1] = refused || count == rows ? 0.0f : (float)(others / (double)(rows - count));
  }
}

// Bits behind the means of `columns` columns; what they stand for leaves the memory.
extern "C" __global__ void __launch_bounds__(THREADS) sides(float* compensated, const float* memory, u32 n, u8* payload, u32 columns,
                                                            float threshold, State* s, Outcome* o, Partials* p) {
  const bool refused = o->refused != 0;
  const float* means = reinterpret_cast<const float*>(payload);
  double sent = 0.0, residual = 0.0;
  ballots(n, payload + 8 * (u64)columns, [=, &sent, &residual](u32 i, bool inside) {
    if (!inside) return false;
    if (refused) {
      compensated[i] = before(memory, i);
      return false;
    }
    float x = compensated[i];
    const bool below = x < threshold;
    float value = means[2 * (i % columns) + (below ? 0 : 1)];
    sent += square(value);
    leave(compensated + i, x + value * -1.0f, residual);
    return below;
  });
  finish(sent, residual, 8 * (u64)columns + ((u64)n + 7) / 8, s, o, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) add_sides(float* out, u32 n, const u8* payload, u32 columns,
                                                                float scale) {
  const u8* bits = payload + 8 * (u64)columns;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
    out[i] += float_at(payload + 8 * (u64)(i % columns) + (bits[i / 8] >> (i % 8) & 1 ? 0 : 4)) * scale;
}

// 256 grid points between min and max, of which zero is one (compression/src/methods/quantization/minmax8.rs).
struct MinMax {
  double min, max, step, inverse, lowest;

  static __device__ __forceinline__ MinMax of(const u8* pair) {
    MinMax grid;
    grid.min = (double)float_at(pair);
    grid.max = (double)float_at(pair + 4);
    grid.step = (grid.max - grid.min) / 255.0;
    grid.inverse = grid.step > 0.0 ? 1.0 / grid.step : 0.0;
    grid.lowest = rint(grid.max * grid.inverse) - 255.0;
    return grid;
  }
  __device__ __forceinline__ u32 code(float x) const {
    const double place = rint((double)x * inverse) - lowest;
    return place <= 0.0 ? 0u : place >= 255.0 ? 255u : (u32)place;
  }
  __device__ __forceinline__ float value(u32 code) const {
    const double value = ((double)code + lowest) * step;
    return (float)(value < min ? min : value > max ? max : value);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) minmax(float* compensated, const float* memory, u32 n, u8* payload, State* s,
                                                             Outcome* o, Partials* p) {
  const bool refused = o->refused != 0;
  const MinMax grid = MinMax::of(payload);
  u8* codes = payload + 8;
  double sent = 0.0, residual = 0.0;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
    float x = refused ? 0.0f : compensated[i];
    u32 code = grid.code(x);
    float value = grid.value(code);
    codes[i] = (u8)code;
    sent += square(value);
    leave(compensated + i, refused ? before(memory, i) : x + value * -1.0f, residual);
  }
  finish(sent, residual, 8 + (u64)n, s, o, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) add_minmax(float* out, u32 n, const u8* payload, float scale) {
  const MinMax grid = MinMax::of(payload);
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
    out[i] += grid.value(payload[8 + i]) * scale;
}

// INCEPTIONN. A block works on tiles of 4096 values, a thread on 16 neighbours, whose tags of 2 bits are a word.
#define EACH 16u

struct Sizes {
  u32 bound, skipped;

  // 0, 8, 16 or 32 bits, as 0 to 3.
  __device__ __forceinline__ u32 tag(float x) const {
    const u32 exponent = bits_of(x) << 1 >> 24;
    return (exponent >= 127 - bound ? 1 : 0) + (exponent >= 127 - skipped ? 1 : 0) + (exponent >= 127 ? 1 : 0);
  }
  __device__ __forceinline__ float scale(u32 tag) const {
    return tag == 1 ? (float)(1u << (7 + skipped)) : tag == 2 ? 32768.0f : 1.0f;
  }
};

// How many of each tag are in a word of 16.
struct Counts { u32 eights, sixteens, wholes; };
__device__ __forceinline__ Counts count_tags(u32 word) {
  const u32 low = word & 0x55555555u, high = word >> 1 & 0x55555555u;
  const u32 both = (u32)__popc(low & high);
  return {(u32)__popc(low) - both, (u32)__popc(high) - both, both};
}

// Tags of a word; those beyond the end are zeros.
__device__ __forceinline__ u32 load_tags(const u8* payload, u32 n, u32 word) {
  const u64 end = ((u64)n + 3) / 4;
  u32 tags = 0;
  for (u32 j = 0; j < 4; j++)
    if (4 * (u64)word + j < end) tags |= (u32)payload[4 * (u64)word + j] << (8 * j);
  return tags;
}

// With values given, the tags of these; else of the payload. And how many of each are in every tile.
extern "C" __global__ void __launch_bounds__(THREADS) count_sizes(const float* compensated, u32 n, u8* payload, u32 bound,
                                                                  u32 skipped, u64* tiles, double* wholes,
                                                                  const Outcome* o) {
  const Sizes sizes = {bound, skipped};
  const u32 words = n / EACH + (n % EACH != 0), tile_count = words / THREADS + (words % THREADS != 0);
  const u64 end = ((u64)n + 3) / 4;
  const bool refused = compensated != 0 && o->refused != 0;
  for (u32 tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
    const u32 word = tile * THREADS + threadIdx.x;
    u32 tags = 0;
    if (compensated == 0 && word < words) tags = load_tags(payload, n, word);
    if (compensated != 0 && word < words) {
      for (u32 c = 0; c < EACH; c++)
        if (EACH * word + c < n && !refused) tags |= sizes.tag(compensated[EACH * word + c]) << (2 * c);
      for (u32 j = 0; j < 4; j++)
        if (4 * (u64)word + j < end) payload[4 * (u64)word + j] = (u8)(tags >> (8 * j));
    }
    const Counts own = count_tags(tags);
    // A tile has 4096 values: two counts in a word.
    const u32 narrow = block_scan(own.eights | own.sixteens << 16), wide = block_scan(own.wholes);
    if (threadIdx.x != THREADS - 1) continue;
    tiles[tile] = (u64)(narrow & 0xffffu) | (u64)(narrow >> 16) << 32;
    wholes[tile] = (double)wide;
  }
}

// Counts become numbers of all tiles before, and the totals go into the state. By one block.
extern "C" __global__ void __launch_bounds__(THREADS) scan_sizes(u64* tiles, double* wholes, u32 tile_count, State* s) {
  SHARED(u32, totals, 3);
  u32 before[3] = {0, 0, 0};
  for (u32 first = 0; first < tile_count; first += THREADS) {
    const u32 tile = first + threadIdx.x;
    const u64 two = tile < tile_count ? tiles[tile] : 0;
    const u32 own[3] = {(u32)two, (u32)(two >> 32), tile < tile_count ? (u32)wholes[tile] : 0};
    u32 sums[3];
    for (u32 j = 0; j < 3; j++) sums[j] = block_scan(own[j]);
    if (tile < tile_count) {
      tiles[tile] = (u64)(before[0] + sums[0] - own[0]) | (u64)(before[1] + sums[1] - own[1]) << 32;
      wholes[tile] = (double)(before[2] + sums[2] - own[2]);
    }
    if (threadIdx.x == THREADS - 1)
      for (u32 j = 0; j < 3; j++) totals[j] = sums[j];
    __syncthreads();
    for (u32 j = 0; j < 3; j++) before[j] += totals[j];
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  s->above = before[0];
  s->band = before[1];
  s->listed = before[2];
}

// Where a thread's values lie behind the tags.
struct Places { u64 eights, sixteens, wholes; };
__device__ __forceinline__ Places places_of(u32 n, u32 tags, u64 two, u32 wholes_before, const State* s) {
  const Counts own = count_tags(tags);
  const u32 narrow = block_scan(own.eights | own.sixteens << 16), wide = block_scan(own.wholes);
  const u64 eights = ((u64)n + 3) / 4, sixteens = eights + s->above, wholes = sixteens + 2 * (u64)s->band;
  return {eights + (u32)two + (narrow & 0xffffu) - own.eights,
          sixteens + 2 * ((u64)(u32)(two >> 32) + (narrow >> 16) - own.sixteens),
          wholes + 4 * ((u64)wholes_before + wide - own.wholes)};
}

// Every value with its tag, and where the next of its kind lies.
template <typename Each>
__device__ __forceinline__ void each_tagged(u32 n, const u8* payload, const u64* tiles, const double* wholes, const State* s,
                                            Each each) {
  const u32 words = n / EACH + (n % EACH != 0), tile_count = words / THREADS + (words % THREADS != 0);
  for (u32 tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
    const u32 word = tile * THREADS + threadIdx.x;
    const u32 tags = word < words ? load_tags(payload, n, word) : 0;
    Places at = places_of(n, tags, tiles[tile], (u32)wholes[tile], s);
    for (u32 c = 0; c < EACH; c++) {
      const u32 i = EACH * word + c;
      if (word >= words || i >= n) break;
      each(i, tags >> (2 * c) & 3u, at);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) put_sizes(float* compensated, const float* memory, u32 n, u8* payload,
                                                                u32 bound, u32 skipped, const u64* tiles,
                                                                const double* wholes, State* s, Outcome* o, Partials* p) {
  const Sizes sizes = {bound, skipped};
  const bool refused = o->refused != 0;
  double sent = 0.0, residual = 0.0;
  each_tagged(n, payload, tiles, wholes, s, [=, &sent, &residual](u32 i, u32 tag, Places& at) {
    if (refused) compensated[i] = before(memory, i);
    const float x = compensated[i];
    if (tag == 0) return void(residual += square(x));
    const float scale = sizes.scale(tag);
    const u32 sign = bits_of(x) >> 31, whole = tag == 3 ? 0 : (u32)(fabsf(x) * scale);
    float value = tag == 3 ? x : (float)whole / scale;
    if (tag != 3 && sign) value = -value;
    if (tag == 1) payload[at.eights++] = (u8)(whole | sign << 7);
    if (tag == 2) {
      const u32 half = whole | sign << 15;
      for (u32 j = 0; j < 2; j++) payload[at.sixteens++] = (u8)(half >> (8 * j));
    }
    if (tag == 3)
      for (u32 j = 0; j < 4; j++) payload[at.wholes++] = (u8)(bits_of(x) >> (8 * j));
    sent += square(value);
    leave(compensated + i, x + value * -1.0f, residual);
  });
  finish(sent, residual, ((u64)n + 3) / 4 + s->above + 2 * (u64)s->band + 4 * (u64)s->listed, s, o, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) add_sizes(float* out, u32 n, const u8* payload, u32 bound, u32 skipped,
                                                                const u64* tiles, const double* wholes, const State* s,
                                                                u64 room, float by) {
  const Sizes sizes = {bound, skipped};
  // A payload that says more than it holds means zeros.
  if (((u64)n + 3) / 4 + s->above + 2 * (u64)s->band + 4 * (u64)s->listed > room) return;
  each_tagged(n, payload, tiles, wholes, s, [=](u32 i, u32 tag, Places& at) {
    if (tag == 0) return;
    u64& from = tag == 1 ? at.eights : tag == 2 ? at.sixteens : at.wholes;
    const u32 bytes = tag == 3 ? 4 : tag;
    u32 bits = 0;
    for (u32 j = 0; j < bytes; j++) bits |= (u32)payload[from++] << (8 * j);
    const u32 sign = tag == 3 ? 0 : bits >> (8 * bytes - 1);
    float value = tag == 3 ? float_of(bits) : (float)(bits & ((1u << (8 * bytes - 1)) - 1)) / sizes.scale(tag);
    out[i] += (sign ? -value : value) * by;
  });
}
