// Linears over weights in blocks of 32 with a scale each (and a minimum, for 4 bits), with int8 or
// float32 activations.
//
// Every result is summed over blocks in order, whatever rows it is computed with: a row's bits do
// not depend on its batch. Within a block of int8 activations all is exact integer arithmetic.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "dense.h"
#include "pool.h"
#include "quantized_rows.h"
#include "quantized_tile.h"
#include "vec.h"
#include "weight.h"

namespace rg {

class Product {
 public:
  // y [rows][outputs] = x [rows][inputs] W^T + bias.
  Product(const Weight& w, float* y) : w_(w), y_(y) {}

  template <Format F>
  void quantized(const QuantizedRows& x, long rows) const {
    const long panels = w_.num_panels();
    // Items of some 20 microseconds: short enough to share, long enough to be worth taking. One
    // row alone goes four panels at a time, as one chain of sums would wait for itself.
    const long width = rows == 1 ? 4 : 2;
    const long work = w_.blocks() * BLOCK * LANES * width * rows;
    const long groups = (panels + width - 1) / width;
    const long step = std::clamp(1000000L / work, 1L, std::max(1L, groups / 4));
    Pool::get().run((groups + step - 1) / step, [&](int64_t item) {
      const long end = std::min(panels, (item + 1) * step * width);
      for (long p = item * step * width; p < end; p += width) {
        if (rows == 1 && p + 4 <= end)
          panel_rows<F, 4>(x, p, rows);
        else
          for (long q = p; q < std::min(p + width, end); q += 2) {
            if (q + 2 <= end)
              panel_rows<F, 2>(x, q, rows);
            else
              panel_rows<F, 1>(x, q, rows);
          }
      }
    });
  }

  // All rows of NV panels, in tiles as even as they can be: a small one at the end would take as
  // long as a whole one. While the tiles are computed the next panels are on their way, which
  // otherwise the first tile would wait for.
  template <Format F, int NV>
  void panel_rows(const QuantizedRows& x, long panel, long rows) const {
    constexpr long MAX = NV == 4 ? 1 : QUANTIZED_ROW_TILE;
    const long tiles = (rows + MAX - 1) / MAX;
    const long bytes = NV * w_.blocks() * block_bytes<F>();
    const uint8_t* next = w_.panels + (panel / NV + 1) * bytes;
    long asked = tiles > 1 ? 0 : bytes;  // the CPU foresees a lone tile's reads by itself
    for (long t = 0, r = 0; t < tiles; t++) {
      for (; asked < bytes * (t + 1) / tiles; asked += 64) prefetch(next + asked);
      const long end = rows * (t + 1) / tiles;
      switch (end - r) {
        case 1: tile<F, 1, NV>(x, panel, r); break;
        case 2: tile<F, MAX < 2 ? 1 : 2, NV>(x, panel, r); break;
        case 3: tile<F, MAX < 3 ? 1 : 3, NV>(x, panel, r); break;
        case 4: tile<F, MAX < 4 ? 1 : 4, NV>(x, panel, r); break;
        case 5: tile<F, MAX < 5 ? 1 : 5, NV>(x, panel, r); break;
        default: tile<F, MAX, NV>(x, panel, r); break;
      }
      r = end;
    }
  }

  template <Format F, int MR, int NV>
  void tile(const QuantizedRows& x, long panel, long row) const {
    const long bytes = w_.blocks() * block_bytes<F>();
    vf out[MR][NV];
    quantized_tile<F, MR, NV>(w_.panels + panel * bytes, bytes, x, row, out);
    for (int r = 0; r < MR; r++)
      for (int v = 0; v < NV; v++) w_.store_result(y_, row + r, panel + v, out[r][v]);
  }

  // float32 activations: weights are expanded a stretch at a time, shared by all rows.
  void exact(const float* x, long x_stride, long rows) const {
    constexpr long GROUP = 4, DEPTH = 4 * BLOCK;
    const long panels = w_.num_panels(), groups = (panels + GROUP - 1) / GROUP;
    Pool::get().run(groups, [&](int64_t group) {
      static thread_local std::vector<float> weights, results;
      weights.resize(DEPTH * GROUP * LANES);
      results.resize(rows * GROUP * LANES);
      const long first = group * GROUP, count = std::min(GROUP, panels - first);
      const long columns = count * LANES;
      for (long k = 0; k < w_.inputs; k += DEPTH) {
        const long depth = std::min(DEPTH, w_.inputs - k);
        for (long p = 0; p < count; p++)
          expand(first + p, k, depth, weights.data() + p * LANES, columns);
        product(x + k, x_stride, MatrixRows{weights.data(), columns}, rows, count, depth,
                results.data(), columns, k > 0);
      }
      for (long r = 0; r < rows; r++)
        for (long p = 0; p < count; p++)
          w_.store_result(y_, r, first + p, loadf(results.data() + r * columns + p * LANES));
    });
  }

  // Weights of a panel for inputs [k, k + depth), k at a block: out[i * stride + lane].
  void expand(long panel, long k, long depth, float* out, long stride) const {
    const bool q4 = w_.format == Q4;
    const long bytes = q4 ? block_bytes<Q4>() : block_bytes<Q8>();
    const uint8_t* block = w_.panels + panel_bytes(w_.format, w_.blocks()) * panel +
                           k / BLOCK * bytes;
    for (long done = 0; done < depth; done += BLOCK, block += bytes) {
      const uint16_t* factors = (const uint16_t*)(block + LANES * (q4 ? 16 : 32));
      const vf scale = load_half(factors);
      const vf minimum = q4 ? load_half(factors + LANES) : vf{};
      for (int g = 0; g < 8; g++) {
        vi v = load<vi>(block + (q4 ? g % 4 : g) * LANES * 4);
        for (int j = 0; j < 4; j++) {
          const long i = done + 4 * g + j;
          if (i >= depth) return;
          vi code = v >> (8 * j + (q4 && g >= 4 ? 4 : 0));
          code = q4 ? code & 15 : ((code << 24) >> 24);
          if (!q4 && CODE_BIAS != 0) code = (code & 255) - CODE_BIAS;
          vf value = to_float(code) * scale;
          store(out + i * stride, q4 ? value + minimum : value);
        }
      }
    }
  }

 private:
  const Weight& w_;
  float* y_;
};

// x [rows][inputs] with x_stride; float32 activations if `exact`, else int8 blocks.
inline void linear(const Weight& w, const float* x, long x_stride, long rows, bool exact,
                   float* y) {
  if (w.format == DENSE) {
    dense_product(w, x, x_stride, rows, y);
    return;
  }
  Product product(w, y);
  if (exact) {
    product.exact(x, x_stride, rows);
    return;
  }
  static QuantizedRows quantized;
  quantized.resize(rows, w.blocks());
  if (rows < 8) {
    for (long r = 0; r < rows; r++) quantized.set_row(r, x + r * x_stride, w.inputs);
  } else {
    Pool::get().run((rows + 7) / 8, [&](int64_t item) {
      for (long r = item * 8; r < std::min(rows, (long)(item + 1) * 8); r++)
        quantized.set_row(r, x + r * x_stride, w.inputs);
    });
  }
  if (w.format == Q4)
    product.quantized<Q4>(quantized, rows);
  else
    product.quantized<Q8>(quantized, rows);
}

}  // namespace rg
