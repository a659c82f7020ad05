// A packed weight matrix.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace rg {

constexpr int BLOCK = 32;

// As PackedFormat in packed_weight.py numbers them; linear.h and dense.h say how they lie.
enum Format : int32_t { Q4 = 0, Q8 = 1, DENSE = 2 };

// The matrix in panels of LANES outputs, and its bias. Mirrors NativeWeight in packed_weight.py.
struct Weight {
  const uint8_t* panels;
  const float* bias;  // [outputs] or null
  int64_t outputs;
  int64_t inputs;
  int32_t format;

  long blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
  long num_panels() const { return (outputs + LANES - 1) / LANES; }

  // One row's results of one panel, plus bias, to y [rows][outputs].
  void store_result(float* y, long row, long panel, vf result) const {
    const long n = panel * LANES, count = std::min((long)LANES, outputs - n);
    float* to = y + row * outputs + n;
    if (count == LANES) {
      if (bias) result += loadf(bias + n);
      store(to, result);
      return;
    }
    for (long j = 0; j < count; j++) to[j] = bias ? result[j] + bias[n + j] : result[j];
  }
};

}  // namespace rg
