// Activations as int8 in blocks of BLOCK with a scale each.
#pragma once

#include <cstdint>
#include <vector>

#include "int8_dot.h"
#include "vec.h"
#include "weight.h"

namespace rg {

inline void store_codes(int8_t* to, vi codes) {
#if defined(RG_AVX512)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)codes));
#elif defined(RG_AVX2)
  __m256i v = (__m256i)codes;
  __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
#else
  for (int i = 0; i < LANES; i++) to[i] = (int8_t)codes[i];
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
      vi sum = vi{};
      for (int i = 0; i < BLOCK; i += LANES) {
        vi code = round_to_int(loadf(from + i) * splat(inverse));
        sum += code;
        store_codes(out + i, code);
      }
      int32_t total = 0;
      for (int j = 0; j < LANES; j++) total += sum[j];
      scales[row * blocks + b] = scale;
      sums[row * blocks + b] = scale * (float)total;
      biases[row * blocks + b] = -CODE_BIAS * total;
    }
  }
};

}  // namespace rg
