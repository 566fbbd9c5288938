// Every module in one translation unit, and a line per kernel.
#pragma once
#include "select.cu"

#define KERNELS                                                                                                        \
  KERNEL(feed_f32)                                                                                                     \
  KERNEL(feed_f16)                                                                                                     \
  KERNEL(feed_bf16)                                                                                                    \
  KERNEL(cut_second)                                                                                                   \
  KERNEL(cut_third)                                                                                                    \
  KERNEL(take)                                                                                                         \
  KERNEL(gaps)                                                                                                         \
  KERNEL(clear)                                                                                                        \
  KERNEL(pack)
