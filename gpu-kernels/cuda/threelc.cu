// 3LC (compression/src/methods/hybrid/threelc.rs): three values, five to a byte, and runs of bytes that say five zeros in one
// byte each. What a run's byte becomes depends on how far the run began before it: the last other byte of all tiles
// before is found first.
#include "codes.cuh"

#define ZEROS 121u
#define FIRST_RUN 243u
#define LONGEST_RUN 14u

// Bytes that a block works on at a time, in rows of THREADS: never more tiles than tensors of n values have elsewhere.
#define RUN_ROWS 4u
#define RUN_TILE (RUN_ROWS * THREADS)

__device__ __forceinline__ float most_of(double s, const Outcome* o) {
  const double m = s * (double)o->max, most = 3.40282346638528859812e38;
  return o->refused ? 0.0f : (float)(m < most ? m : most);
}

// Five values to a byte, and per tile the place of its last byte that is no ZEROS (from 1; 0 if there is none).
extern "C" __global__ void __launch_bounds__(THREADS) quartic(float* compensated, const float* memory, u32 n, double s_factor, u8* bytes,
                                                              u64* tiles, State* s, Outcome* o, Partials* p) {
  const bool refused = o->refused != 0;
  const float m = most_of(s_factor, o), halved = 0.5f * m;
  // Zeros are below half of any M, also where that half is no f32.
  const u32 half = key_of(halved) > 1 ? key_of(halved) : 1u;
  const u32 count = n / 5 + (n % 5 != 0), tile_count = count / RUN_TILE + (count % RUN_TILE != 0);
  double sent = 0.0, residual = 0.0;
  for (u32 tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
    u32 last = 0;
    for (u32 row = 0; row < RUN_ROWS; row++) {
      const u32 at = tile * RUN_TILE + row * THREADS + threadIdx.x;
      u32 byte = 0;
      for (u32 digit = 0; digit < 5; digit++) {
        const u64 i = (u64)digit * count + at;
        u32 value = 1;
        if (at < count && i < n) {
          const float x = refused ? 0.0f : compensated[i];
          if (key_of(x) >= half) {
            value = x < 0.0f ? 0 : 2;
            sent += 1.0;
          }
          leave(compensated + i, refused ? before(memory, (u32)i) : x + -m * (float)((int)value - 1), residual);
        }
        byte = 3 * byte + value;
      }
      if (at >= count) continue;
      bytes[at] = (u8)byte;
      if (byte != ZEROS) last = at + 1;
    }
    last = block_max(last);
    if (threadIdx.x == 0) tiles[tile] = last;
  }
  finish(sent * (double)m * (double)m, residual, 0, s, o, p);
}

// The largest of this and all lower threads'.
__device__ __forceinline__ u32 scan_max(u32 own) {
  SHARED(u32, warps, WARPS);
  for (u32 d = 1; d < 32; d *= 2) {
    u32 other = __shfl_up_sync(FULL, own, d);
    if (lane() >= d && other > own) own = other;
  }
  __syncthreads();
  if (lane() == 31) warps[warp()] = own;
  __syncthreads();
  for (u32 w = 0; w < warp(); w++) own = warps[w] > own ? warps[w] : own;
  return own;
}

// Maxima of all tiles before. By one block.
extern "C" __global__ void __launch_bounds__(THREADS) scan_last(u64* tiles, u32 tile_count) {
  SHARED(u32, values, THREADS);
  u32 before_all = 0;
  for (u32 first = 0; first < tile_count; first += THREADS) {
    const u32 tile = first + threadIdx.x;
    const u32 scanned = scan_max(tile < tile_count ? (u32)tiles[tile] : 0);
    values[threadIdx.x] = scanned;
    __syncthreads();
    const u32 lower = threadIdx.x == 0 ? 0 : values[threadIdx.x - 1], all = values[THREADS - 1];
    if (tile < tile_count) tiles[tile] = lower > before_all ? lower : before_all;
    before_all = all > before_all ? all : before_all;
    __syncthreads();
  }
}

// What a byte becomes, and 1: itself, a run that ends here; or nothing (0). By the whole block, for a row of bytes;
// `earlier` is the last place before that is no ZEROS, and goes on to the next row.
__device__ __forceinline__ u32 code_at(const u8* bytes, u32 count, u32 at, u32* earlier) {
  const bool inside = at < count;
  const u32 byte = inside ? bytes[at] : 0;
  const u32 own = inside && byte != ZEROS ? at + 1 : 0, scanned = scan_max(own);
  const u32 last = *earlier > scanned ? *earlier : scanned, most = block_max(own);
  *earlier = most > *earlier ? most : *earlier;
  // `last` is the place of a byte that is no zeros, from 1: the run begins right behind it.
  if (!inside) return 0;
  if (byte != ZEROS) return byte + 1;
  const u32 length = (at - last) % LONGEST_RUN + 1;
  const bool ends = length == LONGEST_RUN || at + 1 == count || bytes[at + 1] != ZEROS;
  if (!ends) return 0;
  return (length == 1 ? ZEROS : 241 + length) + 1;
}

// Codes per tile, to `counts`.
extern "C" __global__ void __launch_bounds__(THREADS) count_runs(const u8* bytes, u32 n, const u64* tiles, double* counts) {
  const u32 count = n / 5 + (n % 5 != 0), tile_count = count / RUN_TILE + (count % RUN_TILE != 0);
  for (u32 tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
    u32 earlier = (u32)tiles[tile], codes = 0;
    for (u32 row = 0; row < RUN_ROWS; row++)
      codes += code_at(bytes, count, tile * RUN_TILE + row * THREADS + threadIdx.x, &earlier) == 0 ? 0 : 1;
    const u32 scanned = block_scan(codes);
    if (threadIdx.x == THREADS - 1) counts[tile] = (double)scanned;
  }
}

// Sums of all tiles before, and the length of the payload. By one block.
extern "C" __global__ void __launch_bounds__(THREADS) scan_runs(double* counts, u32 tile_count, Outcome* o) {
  const u32 all = scan_counts(counts, tile_count);
  if (threadIdx.x == 0) o->bytes = 4 + (u64)all;
}

extern "C" __global__ void __launch_bounds__(THREADS) put_runs(const u8* bytes, u32 n, const u64* tiles, const double* counts,
                                                               double s_factor, u8* payload, const Outcome* o) {
  SHARED(u32, row_total, 1);
  const u32 count = n / 5 + (n % 5 != 0), tile_count = count / RUN_TILE + (count % RUN_TILE != 0);
  if (blockIdx.x == 0 && threadIdx.x < 4) payload[threadIdx.x] = (u8)(bits_of(most_of(s_factor, o)) >> (8 * threadIdx.x));
  for (u32 tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
    u32 earlier = (u32)tiles[tile], to = 4 + (u32)counts[tile];
    for (u32 row = 0; row < RUN_ROWS; row++) {
      const u32 code = code_at(bytes, count, tile * RUN_TILE + row * THREADS + threadIdx.x, &earlier);
      const u32 scanned = block_scan(code == 0 ? 0 : 1);
      if (code != 0) payload[to + scanned - 1] = (u8)(code - 1);
      if (threadIdx.x == THREADS - 1) row_total[0] = scanned;
      __syncthreads();
      to += row_total[0];
      __syncthreads();
    }
  }
}

// The other way: how many bytes each tile of codes becomes, to `counts`; `scan_runs` adds them up.
__device__ __forceinline__ u32 length_of(u32 code) { return code >= FIRST_RUN ? code - 241 : 1; }

extern "C" __global__ void __launch_bounds__(THREADS) count_codes(const u8* payload, u32 codes, double* counts) {
  const u32 tile_count = codes / RUN_TILE + (codes % RUN_TILE != 0);
  for (u32 tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
    u32 length = 0;
    for (u32 row = 0; row < RUN_ROWS; row++) {
      const u32 at = tile * RUN_TILE + row * THREADS + threadIdx.x;
      length += at < codes ? length_of(payload[4 + at]) : 0;
    }
    const u32 scanned = block_scan(length);
    if (threadIdx.x == THREADS - 1) counts[tile] = (double)scanned;
  }
}

// out += scale * C(x). Codes that are not as many bytes as n values have add nothing.
extern "C" __global__ void __launch_bounds__(THREADS) add_runs(float* out, u32 n, const u8* payload, u32 codes,
                                                               const double* counts, const Outcome* o, float scale) {
  SHARED(u32, row_total, 1);
  const u32 count = n / 5 + (n % 5 != 0), tile_count = codes / RUN_TILE + (codes % RUN_TILE != 0);
  if (o->bytes != 4 + (u64)count) return;
  u32 bits = 0;
  for (u32 j = 0; j < 4; j++) bits |= (u32)payload[j] << (8 * j);
  const float value = scale * float_of(bits);
  for (u32 tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
    u32 to = (u32)counts[tile];
    for (u32 row = 0; row < RUN_ROWS; row++) {
      const u32 at = tile * RUN_TILE + row * THREADS + threadIdx.x, code = at < codes ? payload[4 + at] : ZEROS;
      const u32 scanned = block_scan(at < codes ? length_of(code) : 0), place = to + scanned - 1;
      u32 rest = code;
      for (u32 digit = 5; digit-- > 0 && at < codes && code < FIRST_RUN && code != ZEROS; rest /= 3) {
        const u64 i = (u64)digit * count + place;
        if (i < n) out[i] += value * (float)((int)(rest % 3) - 1);
      }
      if (threadIdx.x == THREADS - 1) row_total[0] = scanned;
      __syncthreads();
      to += row_total[0];
      __syncthreads();
    }
  }
}
