// The inner loop of products of quantised weights with int8 activations.
//
// Weights are packed in panels of LANES outputs. A panel is a sequence of blocks along the input,
// read front to back:
//   4 bits: 4 vectors, scales, minima. Byte 4 * lane + j of vector g holds the codes of inputs
//           4 * g + j (low nibble) and 16 + 4 * g + j (high) of output `lane`.
//   8 bits: 8 vectors, scales. Byte 4 * lane + j of vector g is input 4 * g + j, plus CODE_BIAS.
//   Scales and minima are LANES float16 each.
// A weight is code * scale + minimum. Blocks and float16 scales are those of GGML's Q4_0, Q4_1 and
// Q8_0, whose values are kept exactly.
//
// Sums stay in registers by force: left alone, the compiler keeps half of those of a block in
// memory, and a tile takes a sixth longer.
#pragma once

#include <cstdint>

#include "int8_dot.h"
#include "quantized_rows.h"
#include "vec.h"
#include "weight.h"

namespace rg {

// Rows computed at once, by the number of registers.
#ifdef RG_AVX512
constexpr int QUANTIZED_ROW_TILE = 6;
#else
constexpr int QUANTIZED_ROW_TILE = 5;
#endif

template <Format F>
constexpr long block_bytes() {
  return F == Q4 ? LANES * 20 : LANES * 34;
}

inline long panel_bytes(int32_t format, long blocks) {
  return blocks * (format == Q4 ? block_bytes<Q4>() : block_bytes<Q8>());
}

// Products of one block of MR rows `stride` apart with NV panels: 16 vectors of codes of 4 bits, or
// 8 of 8 bits, for inputs one after the other.
template <int MR, int NV>
RG_INLINE void add_block_q4(const uint8_t* panel, long panel_stride, const int8_t* x, long stride,
                            Dot (*dots)[NV]) {
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++)
#pragma GCC unroll 2
    for (int high = 0; high < 2; high++) {
      raw codes[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) {
        raw both = raw_load(panel + v * panel_stride + g * LANES * 4);
        codes[v] = high ? high_nibbles(both) : low_nibbles(both);
        pin(codes[v]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        raw four_x = raw_splat(four(x + r * stride + 4 * g + 16 * high));
        pin(four_x);
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
          dots[r][v].add_q4(codes[v], four_x);
          pin(dots[r][v].acc);
        }
      }
    }
}

template <int MR, int NV>
RG_INLINE void add_block_q8(const uint8_t* panel, long panel_stride, const int8_t* x, long stride,
                            Dot (*dots)[NV]) {
#pragma GCC unroll 8
  for (int g = 0; g < 8; g++) {
    Codes8 codes[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++)
      codes[v] = Codes8(raw_load(panel + v * panel_stride + g * LANES * 4));
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      raw four_x = raw_splat(four(x + r * stride + 4 * g));
      pin(four_x);
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) {
        dots[r][v].add_q8(codes[v], four_x);
        pin(dots[r][v].acc);
      }
    }
  }
}

// Results of MR rows for NV panels, `panel_stride` bytes apart. Not inlined: it needs all registers.
template <Format F, int MR, int NV>
__attribute__((noinline)) void quantized_tile(const uint8_t* panel, long panel_stride,
                                              const QuantizedRows& x, long row, vf (*out)[NV]) {
  const long blocks = x.blocks, stride = blocks * BLOCK;
  const int8_t* codes = x.codes.data() + row * stride;
  const float* scales = x.scales.data() + row * blocks;
  const float* sums = x.sums.data() + row * blocks;
  const int32_t* biases = x.biases.data() + row * blocks;
  vf acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) acc[r][v] = vf{};
  for (long b = 0; b < blocks; b++, panel += block_bytes<F>()) {
    Dot dots[MR][NV];
    if constexpr (F == Q4) {
      add_block_q4<MR, NV>(panel, panel_stride, codes + b * BLOCK, stride, dots);
    } else {
      if (CODE_BIAS != 0)
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
          for (int v = 0; v < NV; v++) dots[r][v].start(biases[r * blocks + b]);
      add_block_q8<MR, NV>(panel, panel_stride, codes + b * BLOCK, stride, dots);
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      const uint16_t* factors =
          (const uint16_t*)(panel + v * panel_stride + LANES * (F == Q4 ? 16 : 32));
      const vf scale = load_half(factors);
      const vf minimum = F == Q4 ? load_half(factors + LANES) : vf{};
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        const vf both = scale * splat(scales[r * blocks + b]);
        const vf dot = F == Q4 ? dots[r][v].q4_result() : dots[r][v].q8_result();
        acc[r][v] = fma(dot, both, acc[r][v]);
        if constexpr (F == Q4)
          acc[r][v] = fma(minimum, splat(sums[r * blocks + b]), acc[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) out[r][v] = acc[r][v];
}

}  // namespace rg
