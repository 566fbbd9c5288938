// What is selected is sent in few bits: Strom's hard threshold and Qsparse. After `take` (select.cu): the values of the list
// become codes, and the rest of each goes back into the memory.
#include "codes.cuh"
#include "rules.cuh"

#define LARGEST 3.40282346638528859812e38

// The Euclidean norm of the list, or the mean of its magnitudes.
extern "C" __global__ void __launch_bounds__(THREADS) list_norm(const float* values, u32 mean, State* s, Outcome* o,
                                                                Partials* p) {
  const u32 k = o->kept;
  double sum = 0.0;
  for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < k; j += gridDim.x * THREADS) {
    const double wide = (double)values[j];
    sum += mean ? fabs(wide) : wide * wide;
  }
  if (!last_sums(p, s->done + 1, sum) || threadIdx.x != 0) return;
  const double norm = mean ? sum / (double)(k == 0 ? 1 : k) : sqrt(sum);
  o->norm = o->refused ? 0.0f : (float)(norm < LARGEST ? norm : LARGEST);
}

// As `finish`: what was not selected stays as it is.
__device__ __forceinline__ void finish_list(double sent, double residual, State* s, Outcome* o, Partials* p) {
  if (!last_sums(p, s->done + 1, sent, residual) || threadIdx.x != 0) return;
  o->sent = sent;
  o->residual += residual;
}

// Values become `levels` + their level at random, which is worth level / (levels * divisor) of the norm.
extern "C" __global__ void __launch_bounds__(THREADS) list_levels(float* compensated, const u32* indices, float* values, u32 levels,
                                                                  double divisor, u32 a, u32 b, u32 c, State* s, Outcome* o,
                                                                  Partials* p) {
  const Stream random = {a, b, c};
  const bool refused = o->refused != 0;
  const u32 k = o->kept;
  const float norm = o->norm, most = (float)levels;
  double sent = 0.0, residual = 0.0;
  for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < k; j += gridDim.x * THREADS) {
    const float x = values[j], share = norm > 0.0f ? fminf(fabsf(x) / norm, 1.0f) * most : 0.0f;
    const float level = fminf(floorf(share + (float)(random.word(j) >> 8) * (1.0f / 16777216.0f)), most);
    const float with_sign = refused ? 0.0f : x < 0.0f ? -level : level;
    const float value = (float)((double)norm * ((double)with_sign / ((double)levels * divisor)));
    values[j] = float_of((u32)(most + with_sign));
    if (!refused) leave(compensated + indices[j], x - value, residual);
    sent += square(value);
  }
  finish_list(sent, residual, s, o, p);
}

// Values become signs, which are worth the norm, or tau.
extern "C" __global__ void __launch_bounds__(THREADS) list_signs(float* compensated, const u32* indices, float* values, u32 by_norm,
                                                                 float tau, State* s, Outcome* o, Partials* p) {
  const bool refused = o->refused != 0;
  const u32 k = o->kept;
  const float worth = by_norm ? o->norm : tau;
  double sent = 0.0, residual = 0.0;
  for (u32 j = blockIdx.x * THREADS + threadIdx.x; j < k; j += gridDim.x * THREADS) {
    const float x = values[j], value = x < 0.0f ? -worth : worth;
    values[j] = float_of(x < 0.0f ? 1u : 0u);
    if (!refused) leave(compensated + indices[j], x - value, residual);
    sent += square(value);
  }
  finish_list(sent, residual, s, o, p);
}
