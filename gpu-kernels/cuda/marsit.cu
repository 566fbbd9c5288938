// Marsit's operator (seed 004, section 4.1.1, equation 2): sign bits of several workers and of one more become sign bits again,
// whose mean is that of all.
#include "common.cuh"
#include "rules.cuh"

// received = (received AND own) OR ((received XOR own) AND transient), bit by bit. A transient bit is 1 with chance 1/m where
// own is 1, else (m - 1)/m: both by whether a random word is below 2^32/m. `first` is the segment's place in the tensor.
extern "C" __global__ void __launch_bounds__(THREADS) marsit(u8* received, const u8* own, u32 n, u32 first, u32 below, u32 a,
                                                             u32 b, u32 c) {
  const Stream random = {a, b, c};
  const u32 words = n / 32 + (n % 32 != 0), end = n / 8 + (n % 8 != 0);
  for (u32 at = blockIdx.x * THREADS + threadIdx.x; at < words; at += gridDim.x * THREADS) {
    const u32 bytes = end - 4 * at < 4 ? end - 4 * at : 4;
    u32 theirs = 0, ours = 0;
    if (bytes == 4) {
      theirs = reinterpret_cast<const u32*>(received)[at];
      ours = reinterpret_cast<const u32*>(own)[at];
    } else {
      for (u32 j = 0; j < bytes; j++) {
        theirs |= (u32)received[4 * at + j] << (8 * j);
        ours |= (u32)own[4 * at + j] << (8 * j);
      }
    }
    u32 transient = 0;
    for (u32 differ = theirs ^ ours; differ != 0; differ &= differ - 1) {
      const u32 bit = (u32)__ffs(differ) - 1;
      const u32 low = random.word(first + 32 * at + bit) < below ? 1u : 0u;
      transient |= (low == (ours >> bit & 1u) ? 1u : 0u) << bit;
    }
    const u32 both = (theirs & ours) | ((theirs ^ ours) & transient);
    if (bytes == 4) reinterpret_cast<u32*>(received)[at] = both;
    else
      for (u32 j = 0; j < bytes; j++) received[4 * at + j] = (u8)(both >> (8 * j));
  }
}
