// The int8 cache. A row, one head of one token, is the codes of its blocks of BLOCK elements and
// then their bfloat16 scales; the last block is filled up with zeros. srt/mem_cache/int8_rows.py
// writes the same bytes.
//
// Scores are exact integer dot products of a block of the key with one of the query, which is
// quantised too, times both scales, summed over blocks in order. Of values the codes alone are
// converted, and the weights take their scales.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_tile.h"
#include "int8_dot.h"
#include "quantized_rows.h"
#include "vec.h"

namespace rg {

constexpr long INT8_BLOCK_BYTES = BLOCK + 2;

inline long int8_blocks(long dim) { return (dim + BLOCK - 1) / BLOCK; }

// Bytes of one head of one token in a cache of T.
template <Dtype T>
inline long row_bytes(long dim) {
  if (T == I8) return int8_blocks(dim) * INT8_BLOCK_BYTES;
  return dim * (long)sizeof(typename Element<T>::type);
}

// Calls body with the dtype of a cache as a compile-time constant.
template <typename Body>
inline void with_cache_dtype(int32_t dtype, Body body) {
  if (dtype == I8)
    body(std::integral_constant<Dtype, I8>());
  else
    with_dtype(dtype, body);
}

// The scale of BLOCK elements, NaN if one of them is not finite.
inline float block_scale(const float* x) {
  // Magnitudes are in the order of their bits, and what is not finite comes last.
  vi top = vi{};
  for (int i = 0; i < BLOCK; i += LANES) {
    const vi magnitude = load<vi>(x + i) & splat_int(0x7fffffff);
    top = magnitude > top ? magnitude : top;
  }
  int32_t most = top[0];
  for (int j = 1; j < LANES; j++) most = std::max(most, top[j]);
  if (most >= 0x7f800000) return NAN;
  return load<float>(&most) / 127.0f;
}

inline void encode_block(const float* x, float scale, int8_t* codes) {
  const vf inverse = splat(scale > 0 ? 1.0f / scale : 0.0f);
  vi each[BLOCK / LANES];
  for (int i = 0; i < BLOCK / LANES; i++) {
    const vf v = loadf(x + i * LANES) * inverse;
    each[i] = round_to_int(vmin(vmax(v, splat(-127.0f)), splat(127.0f)));
  }
  store_codes(codes, each);
}

// Queries of a block: codes [rows][blocks * BLOCK], the others [rows][blocks].
struct Int8Queries {
  int8_t* codes;
  float* scales;
  int32_t* biases;  // what CODE_BIAS adds to a dot product, negated

  // x [blocks * BLOCK]
  void set_row(long row, long blocks, const float* x) const {
    for (long i = row * blocks; i < (row + 1) * blocks; i++, x += BLOCK) {
      int8_t* to = codes + i * BLOCK;
      scales[i] = block_scale(x);
      encode_block(x, scales[i], to);
      int32_t sum = 0;
      for (int j = 0; j < BLOCK; j++) sum += to[j];
      biases[i] = -CODE_BIAS * sum;
    }
  }
};

// Rows of one KV head in a tile, and their scales; past the last key it is repeated.
struct Int8Tile {
  const uint8_t* rows[TILE];
  float* scales;  // [blocks][TILE]
  long blocks;

  // Row k is that of slots[k], `stride` bytes a slot from `base` on. STEPS steps of the prefetcher.
  void load(const uint8_t* base, long stride, const int32_t* slots, long count, Prefetcher& ahead) {
    for (long k = 0; k < count; k++) {
      if (k % 8 == 0) ahead.step();
      rows[k] = base + slots[k] * stride;
    }
    for (long k = count; k < TILE; k++) rows[k] = rows[count - 1];
    // Two scales at a time.
    for (long b = 0; b < blocks; b += 2) {
      const long at = blocks * BLOCK + 2 * b;
      const bool both = b + 1 < blocks;
      uint32_t pairs[TILE];
      if (both)
        for (long k = 0; k < TILE; k++) pairs[k] = rg::load<uint32_t>(rows[k] + at);
      else
        for (long k = 0; k < TILE; k++) pairs[k] = rg::load<uint16_t>(rows[k] + at);
      float* to = scales + b * TILE;
      for (long k = 0; k < TILE; k += LANES) {
        const vi pair = rg::load<vi>(pairs + k);
        store(to + k, pair << 16);
        if (both) store(to + TILE + k, pair & splat_int(0xffff0000));
      }
    }
  }
};

// Four codes of each row in a column: turned [blocks * 8][TILE].
inline void turn_codes(const Int8Tile& tile, float* turned) {
  for (long k = 0; k < TILE; k += 8) {
#ifdef RG_AVX2
    const float* eight[8];
    for (long j = 0; j < 8; j++) eight[j] = (const float*)tile.rows[k + j];
    for (long d = 0; d < tile.blocks * 8; d += 8) turn_8x8(eight, d, turned + d * TILE + k);
#else
    for (long d = 0; d < tile.blocks * 8; d++)
      for (long j = 0; j < 8; j++)
        std::memcpy(turned + d * TILE + k + j, tile.rows[k + j] + d * 4, 4);
#endif
  }
}

// Scores of MR rows from `row` on with the keys of a tile, NV vectors of them at a time.
template <int MR, int NV>
__attribute__((noinline)) void score_rows(const float* tile, const float* scales, long blocks,
                                          const Int8Queries& queries, long row, float* scores) {
  const long stride = blocks * BLOCK;
  const int8_t* codes = queries.codes + row * stride;
  const float* factors = queries.scales + row * blocks;
  const int32_t* biases = queries.biases + row * blocks;
  for (long k = 0; k < TILE; k += NV * LANES) {
    vf acc[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) acc[r][v] = vf{};
    for (long b = 0; b < blocks; b++) {
      Dot dots[MR][NV];
      if (CODE_BIAS != 0)
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
          for (int v = 0; v < NV; v++) dots[r][v].start(biases[r * blocks + b]);
      const int8_t* x = codes + b * BLOCK;
      const float* from = tile + b * 8 * TILE + k;
#pragma GCC unroll 8
      for (int g = 0; g < 8; g++) {
        Codes8 keys[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
          raw four_keys = raw_load(from + g * TILE + v * LANES);
          if (CODE_BIAS != 0) four_keys = (raw)((vi)four_keys ^ splat_int(0x80808080));
          keys[v] = Codes8(four_keys);
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
          raw four_x = raw_splat(four(x + r * stride + 4 * g));
          pin(four_x);
#pragma GCC unroll 8
          for (int v = 0; v < NV; v++) {
            dots[r][v].add_q8(keys[v], four_x);
            pin(dots[r][v].acc);
          }
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) {
        const vf scale = loadf(scales + b * TILE + k + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
          acc[r][v] = fma(dots[r][v].q8_result(), scale * splat(factors[r * blocks + b]),
                          acc[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) store(scores + r * SPLIT + k + v * LANES, acc[r][v]);
  }
}

// Scores [rows][SPLIT] of rows from `row` on with the keys of a tile.
inline void score_tile_int8(const float* tile, const float* scales, long blocks,
                            const Int8Queries& queries, long row, long rows, float* scores) {
  constexpr int NV = 2;
  long r = 0;
  for (; r + 3 <= rows; r += 3)
    score_rows<3, NV>(tile, scales, blocks, queries, row + r, scores + r * SPLIT);
  scores += r * SPLIT;
  switch (rows - r) {
    case 2: score_rows<2, NV>(tile, scales, blocks, queries, row + r, scores); break;
    case 1: score_rows<1, NV>(tile, scales, blocks, queries, row + r, scores); break;
    default: break;
  }
}

// By intrinsics, as GCC 12 takes __builtin_convertvector of bytes apart: half the speed of all.
RG_INLINE vf codes_as_float(const int8_t* p) {
#if defined(RG_AVX512)
  return to_float((vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(RG_AVX2)
  return to_float((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vi codes;
  for (int i = 0; i < LANES; i++) codes[i] = p[i];
  return to_float(codes);
#endif
}

// out [MR][..] += weights [MR][TILE] times the codes of `count` rows from code `first` on.
template <int MR, int NV>
__attribute__((noinline)) void add_codes(const Int8Tile& tile, long first, const float* weights,
                                         long count, float* out, long ldo) {
  vf acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) acc[r][v] = loadf(out + r * ldo + v * LANES);
#pragma GCC unroll 1
  for (long k = 0; k < count; k++) {
    const int8_t* from = (const int8_t*)tile.rows[k] + first;
    vf left[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      left[r] = splat(weights[r * TILE + k]);
      pin(left[r]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      vf right = codes_as_float(from + v * LANES);
      pin(right);
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) acc[r][v] = fma(left[r], right, acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) store(out + r * ldo + v * LANES, acc[r][v]);
}

// The same for a whole block and few rows.
template <int MR>
inline void add_block(const Int8Tile& tile, long first, const float* weights, long count,
                      float* out, long ldo) {
  constexpr int VECTORS = BLOCK / LANES, NV = MR <= 3 ? VECTORS : 2;
  for (int v = 0; v < VECTORS; v += NV)
    add_codes<MR, NV>(tile, first + v * LANES, weights, count, out + v * LANES, ldo);
}

inline void add_block(const Int8Tile& tile, long first, const float* weights, long rows, long count,
                      float* out, long ldo) {
  switch (rows) {
    case 1: add_block<1>(tile, first, weights, count, out, ldo); break;
    case 2: add_block<2>(tile, first, weights, count, out, ldo); break;
    case 3: add_block<3>(tile, first, weights, count, out, ldo); break;
    case 4: add_block<4>(tile, first, weights, count, out, ldo); break;
    case 5: add_block<5>(tile, first, weights, count, out, ldo); break;
    case 6: add_block<6>(tile, first, weights, count, out, ldo); break;
    default: break;
  }
}

// scaled [rows][TILE] = weights [rows][SPLIT] * scales [TILE].
inline void scale_weights(const float* weights, long rows, const float* scales, float* scaled) {
  for (long r = 0; r < rows; r++)
    for (long k = 0; k < TILE; k += LANES)
      store(scaled + r * TILE + k, loadf(weights + r * SPLIT + k) * loadf(scales + k));
}

// codes [count][blocks * BLOCK] as float32.
inline void load_codes(const Int8Tile& tile, long count, float* codes) {
  const long width = tile.blocks * BLOCK;
  for (long k = 0; k < count; k++)
    for (long d = 0; d < width; d += LANES)
      store(codes + k * width + d, codes_as_float((const int8_t*)tile.rows[k] + d));
}

}  // namespace rg
