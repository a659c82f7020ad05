// Weights into panels and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dense.h"
#include "pool.h"
#include "quantized_tile.h"
#include "vec.h"
#include "weight.h"

namespace rg {

// One row's codes [inputs] (0..15 or int8), scales and minima [blocks] float16, to output `row`.
inline void pack_row(uint8_t* panels, int32_t format, long row, long inputs, const int16_t* codes,
                     const uint16_t* scales, const uint16_t* minima) {
  const long blocks = (inputs + BLOCK - 1) / BLOCK, lane = row % LANES;
  const bool q4 = format == Q4;
  uint8_t* block = panels + row / LANES * panel_bytes(format, blocks);
  for (long b = 0; b < blocks; b++, block += q4 ? block_bytes<Q4>() : block_bytes<Q8>()) {
    for (int i = 0; i < BLOCK; i++) {
      const long k = b * BLOCK + i;
      const int code = k < inputs ? codes[k] : 0;
      if (q4) {
        uint8_t& byte = block[i % 16 / 4 * LANES * 4 + lane * 4 + i % 4];
        byte = i < 16 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4;
      } else {
        block[i / 4 * LANES * 4 + lane * 4 + i % 4] = (uint8_t)(code + CODE_BIAS);
      }
    }
    uint16_t* factors = (uint16_t*)(block + LANES * (q4 ? 16 : 32));
    factors[lane] = scales[b];
    if (q4) factors[LANES + lane] = minima[b];
  }
}

// Source layouts: GGML's blocks, or float32 rows that are quantised here.
enum Source : int32_t { FROM_F32 = 0, FROM_Q4_0 = 1, FROM_Q4_1 = 2, FROM_Q8_0 = 3 };

inline long source_row_bytes(int32_t source, long inputs) {
  const long blocks = (inputs + BLOCK - 1) / BLOCK;
  switch (source) {
    case FROM_Q4_0: return blocks * 18;
    case FROM_Q4_1: return blocks * 20;
    case FROM_Q8_0: return blocks * 34;
    default: return inputs * 4;
  }
}

inline void read_row(const uint8_t* from, int32_t source, int32_t format, long inputs,
                     int16_t* codes, uint16_t* scales, uint16_t* minima) {
  const long blocks = (inputs + BLOCK - 1) / BLOCK;
  for (long b = 0; b < blocks; b++) {
    int16_t* out = codes + b * BLOCK;
    if (source == FROM_F32) {
      const float* x = (const float*)from + b * BLOCK;
      const long count = std::min((long)BLOCK, inputs - b * BLOCK);
      float low = x[0], high = x[0];
      for (long i = 1; i < count; i++) {
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
      }
      if (format == Q4) {
        scales[b] = float_to_half((high - low) / 15);
        minima[b] = float_to_half(low);
      } else {
        scales[b] = float_to_half(std::max(high, -low) / 127);
        minima[b] = 0;
      }
      // The codes are for the factors as they are stored.
      const float scale = half_to_float(scales[b]), minimum = half_to_float(minima[b]);
      const int top = format == Q4 ? 15 : 127, bottom = format == Q4 ? 0 : -127;
      for (long i = 0; i < count; i++) {
        const float code = scale > 0 ? __builtin_rintf((x[i] - minimum) / scale) : 0.0f;
        out[i] = (int16_t)std::clamp(code, (float)bottom, (float)top);
      }
      continue;
    }
    const uint8_t* block = from + b * (source == FROM_Q4_0 ? 18 : source == FROM_Q4_1 ? 20 : 34);
    scales[b] = load<uint16_t>(block);
    if (source == FROM_Q8_0) {
      minima[b] = 0;
      for (int i = 0; i < BLOCK; i++) out[i] = (int8_t)block[2 + i];
      continue;
    }
    // Q4_0 is code - 8: a minimum of -8 scales, exact in float16 short of its largest values.
    minima[b] = source == FROM_Q4_1 ? load<uint16_t>(block + 2)
                                    : float_to_half(-8.0f * half_to_float(scales[b]));
    const uint8_t* nibbles = block + (source == FROM_Q4_1 ? 4 : 2);
    for (int i = 0; i < 16; i++) {
      out[i] = nibbles[i] & 15;
      out[16 + i] = nibbles[i] >> 4;
    }
  }
}

// `rows` source rows to outputs first_row on.
inline void pack(uint8_t* panels, int32_t format, const uint8_t* from, int32_t source,
                 long first_row, long rows, long inputs) {
  if (format == DENSE) {
    pack_dense((float*)panels, (const float*)from, first_row, rows, inputs);
    return;
  }
  const long bytes = source_row_bytes(source, inputs), blocks = (inputs + BLOCK - 1) / BLOCK;
  // A panel is one item: rows of a panel share its bytes.
  const long first_panel = first_row / LANES, end = first_row + rows;
  Pool::get().run((end + LANES - 1) / LANES - first_panel, [&](int64_t item) {
    std::vector<int16_t> codes(blocks * BLOCK);
    std::vector<uint16_t> scales(blocks), minima(blocks);
    const long panel = first_panel + item;
    for (long row = std::max(first_row, panel * LANES); row < std::min(end, (panel + 1) * LANES);
         row++) {
      read_row(from + (row - first_row) * bytes, source, format, inputs, codes.data(),
               scales.data(), minima.data());
      pack_row(panels, format, row, inputs, codes.data(), scales.data(), minima.data());
    }
  });
}

// float32 values of the rows `ids`: y [count][inputs].
inline void unpack_rows(const Weight& w, const int64_t* ids, long count, float* y) {
  if (w.format == DENSE) {
    unpack_dense_rows(w, ids, count, y);
    return;
  }
  const bool q4 = w.format == Q4;
  const long bytes = q4 ? block_bytes<Q4>() : block_bytes<Q8>();
  for (long r = 0; r < count; r++) {
    const long lane = ids[r] % LANES;
    const uint8_t* block = w.panels + ids[r] / LANES * panel_bytes(w.format, w.blocks());
    for (long b = 0; b < w.blocks(); b++, block += bytes) {
      const uint16_t* factors = (const uint16_t*)(block + LANES * (q4 ? 16 : 32));
      const float scale = half_to_float(factors[lane]);
      const float minimum = q4 ? half_to_float(factors[LANES + lane]) : 0.0f;
      for (long i = 0; i < std::min((long)BLOCK, (long)w.inputs - b * BLOCK); i++) {
        int code;
        if (q4) {
          const uint8_t byte = block[i % 16 / 4 * LANES * 4 + lane * 4 + i % 4];
          code = i < 16 ? byte & 15 : byte >> 4;
        } else {
          code = block[i / 4 * LANES * 4 + lane * 4 + i % 4];
          code = CODE_BIAS != 0 ? code - CODE_BIAS : (int8_t)code;
        }
        y[r * w.inputs + b * BLOCK + i] = (float)code * scale + minimum;
      }
    }
  }
}

}  // namespace rg
