// Activations as int8 in blocks of BLOCK with a scale each.
#pragma once

#include <cstdint>
#include <vector>

#include "int8_dot.h"
#include "vec.h"
#include "weight.h"

namespace rg {

// A block's codes as int8.
inline void store_codes(int8_t* to, const vi* codes) {
#if defined(RG_AVX512)
  for (int i = 0; i < BLOCK / LANES; i++)
    _mm_storeu_si128((__m128i*)(to + i * LANES), _mm512_cvtepi32_epi8((__m512i)codes[i]));
#elif defined(RG_AVX2)
  const __m256i low = _mm256_packs_epi32((__m256i)codes[0], (__m256i)codes[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)codes[2], (__m256i)codes[3]);
  // Packing goes on in each half of a register: sort fours of codes back.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_packs_epi16(low, high);
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(bytes, order));
#else
  for (int i = 0; i < BLOCK; i++) to[i] = (int8_t)codes[i / LANES][i % LANES];
#endif
}

// Activations of a pass, quantised in blocks: value = code * scale.
struct QuantizedRows {
  std::vector<int8_t> codes;   // [rows][blocks * BLOCK]
  std::vector<float> scales;   // [rows][blocks]
  std::vector<float> sums;     // [rows][blocks], of values
  std::vector<int32_t> biases;  // [rows][blocks], what CODE_BIAS adds to a dot product, negated
  long blocks = 0;

  void resize(long rows, long num_blocks) {
    blocks = num_blocks;
    // Only ever grown: a pass of many rows comes again.
    if ((long)codes.size() < rows * blocks * BLOCK) codes.resize(rows * blocks * BLOCK);
    if ((long)scales.size() < rows * blocks) {
      scales.resize(rows * blocks);
      sums.resize(rows * blocks);
      biases.resize(rows * blocks);
    }
  }

  // x [count]; count may end within the last block.
  void set_row(long row, const float* x, long count) {
    for (long b = 0; b < blocks; b++) {
      float padded[BLOCK];
      const float* from = x + b * BLOCK;
      if ((b + 1) * BLOCK > count) {
        for (long i = 0; i < BLOCK; i++) padded[i] = b * BLOCK + i < count ? from[i] : 0.0f;
        from = padded;
      }
      vf top = vf{};
      for (int i = 0; i < BLOCK; i += LANES) {
        vf v = loadf(from + i);
        top = vmax(top, vmax(v, -v));
      }
      const float scale = hmax(top) * (1.0f / 127);
      const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
      int8_t* out = codes.data() + (row * blocks + b) * BLOCK;
      vi each[BLOCK / LANES], sum = vi{};
      for (int i = 0; i < BLOCK / LANES; i++) {
        each[i] = round_to_int(loadf(from + i * LANES) * splat(inverse));
        sum += each[i];
      }
      store_codes(out, each);
      const int32_t total = hsum_int(sum);
      scales[row * blocks + b] = scale;
      sums[row * blocks + b] = scale * (float)total;
      biases[row * blocks + b] = -CODE_BIAS * total;
    }
  }
};

}  // namespace rg
