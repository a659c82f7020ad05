// Products with float32 weights and activations: exact, and with the same bits for a row in any
// batch, which a general library does not promise.
//
// A panel holds LANES outputs: for each input, their weights side by side.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "vec.h"
#include "weight.h"

namespace rg {

// Panels side by side as the right side of a product.
struct PanelRows {
  const float* panel;
  long panel_size;

  RG_INLINE vf load(long k, long v) const { return loadf(panel + v * panel_size + k * LANES); }
  PanelRows skip(long vectors) const { return {panel + vectors * panel_size, panel_size}; }
};

// y [rows][outputs] = x [rows][inputs] W^T + bias.
inline void dense_product(const Weight& w, const float* x, long x_stride, long rows, float* y) {
  // A stretch of the panels of a group stays in the first cache while all rows go by.
  constexpr long GROUP = 4, DEPTH = 128;
  const long panels = w.num_panels(), size = w.inputs * LANES;
  Pool::get().run((panels + GROUP - 1) / GROUP, [&](int64_t group) {
    static thread_local std::vector<float> results;
    results.resize(rows * GROUP * LANES);
    const long first = group * GROUP, count = std::min(GROUP, panels - first);
    const long columns = count * LANES;
    const float* panel = (const float*)w.panels + first * size;
    for (long k = 0; k < w.inputs; k += DEPTH)
      product(x + k, x_stride, PanelRows{panel + k * LANES, size}, rows, count,
              std::min(DEPTH, w.inputs - k), results.data(), columns, k > 0);
    for (long r = 0; r < rows; r++)
      for (long p = 0; p < count; p++)
        w.store_result(y, r, first + p, loadf(results.data() + r * columns + p * LANES));
  });
}

// `rows` rows of float32 become outputs [first_row, first_row + rows).
inline void pack_dense(float* panels, const float* from, long first_row, long rows, long inputs) {
  for (long r = 0; r < rows; r++) {
    const long row = first_row + r;
    float* to = panels + row / LANES * inputs * LANES + row % LANES;
    for (long k = 0; k < inputs; k++) to[k * LANES] = from[r * inputs + k];
  }
}

inline void unpack_dense_rows(const Weight& w, const int64_t* ids, long count, float* y) {
  for (long r = 0; r < count; r++) {
    const float* from = (const float*)w.panels + ids[r] / LANES * w.inputs * LANES + ids[r] % LANES;
    for (long k = 0; k < w.inputs; k++) y[r * w.inputs + k] = from[k * LANES];
  }
}

}  // namespace rg
