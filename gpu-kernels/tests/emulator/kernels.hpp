// Every module in one translation unit, and a line per kernel.
#pragma once
#include "gains.cu"
#include "quantize.cu"
#include "select.cu"

#define KERNELS \
  KERNEL(cut_second) \
  KERNEL(cut_third) \
  KERNEL(take) \
  KERNEL(gaps) \
  KERNEL(clear) \
  KERNEL(pack) \
  KERNEL(feed_f32) \
  KERNEL(feed_f16) \
  KERNEL(feed_bf16) \
  KERNEL(gains_f32) \
  KERNEL(gains_f16) \
  KERNEL(gains_bf16) \
  KERNEL(norms) \
  KERNEL(signs) \
  KERNEL(add_signs) \
  KERNEL(majority) \
  KERNEL(natural) \
  KERNEL(add_natural) \
  KERNEL(eightbit) \
  KERNEL(add_eightbit) \
  KERNEL(cast_f16) \
  KERNEL(cast_bf16) \
  KERNEL(add_f16) \
  KERNEL(add_bf16) \
  KERNEL(stats_f32) \
  KERNEL(stats_f16) \
  KERNEL(stats_bf16) \
  KERNEL(quantize_linear) \
  KERNEL(quantize_powers) \
  KERNEL(quantize_draw) \
  KERNEL(dequantize_linear) \
  KERNEL(dequantize_powers) \
  KERNEL(dequantize_draw)
