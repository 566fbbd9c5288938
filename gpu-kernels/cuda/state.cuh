// What the kernels of one call tell each other, at the front of the workspace. gpu-kernels/src/workspace.rs knows the
// sizes; a test compares them.
#ifndef FLEXCOMM_STATE
#define FLEXCOMM_STATE
#include "common.cuh"

// The caller copies this back when it wants to know.
struct Outcome {
  double compensated;  // |g_e|^2
  double sent;         // |g_c|^2
  double residual;     // |g_e - g_c|^2, with the values as they are stored
  u64 bytes;           // of the payload
  u32 kept;            // values selected
  u16 refused;         // 1: NaN or infinity; the memory is as before, and what was written means zeros
  u16 over;            // 1: more values reached the threshold than there is room for; the others stay in the memory
  float max;           // max |g_e|
  float norm;          // as sent, of methods with one
};

// Of the histogram that gains are read from.
#define FINE_BINS 9216

// All zero when a call starts.
struct State {
  u32 fine[FINE_BINS];  // keys by the bins of gains.cu,
  u32 first[2048];   // by their upper 11 bits,
  u32 second[1024];  // of those in play by the next 10,
  u32 third[1024];   // by the last 10
  u32 done[8];       // blocks that finished, by pass
  u32 max_key;
  u32 ticket;        // tiles begun
  u32 prefix;        // upper bits of the keys in play
  u32 rest;          // how many of these are in
  u32 count;         // how many they are
  u32 listed;        // of these, how many are in the list
  u32 gap;           // the largest distance between indices, less 1
  u32 above;         // keys above the band
  // What is selected: keys from hi on, and of those from lo on, by position, numbers start to start + length.
  u32 hi, lo, start, length;
  u32 band;          // keys in it
  u32 k;
  u32 settled;       // 1: hi and lo are known, no further cuts
  float threshold;
  double mean;       // of |g_e|
  double spare[3];
};

// Sums of every block.
struct Partials { double sums[5][MOST_BLOCKS]; };

#endif
