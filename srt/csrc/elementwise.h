// What lies between the products, for float32: norms, gated activations, rotation, argmax.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace rg {

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2 };

// body(row) for each row: on several threads once there is enough to do, about 10 microseconds.
template <typename Body>
inline void for_rows(long rows, long size, const Body& body) {
  const long step = std::max(1L, 16384 / std::max(1L, size));
  if (rows <= 2 * step) {
    for (long r = 0; r < rows; r++) body(r);
    return;
  }
  Pool::get().run((rows + step - 1) / step, [&](int64_t item) {
    for (long r = item * step; r < std::min(rows, (long)(item + 1) * step); r++) body(r);
  });
}

// y = x / rms(x) * (weight + add_one), one row; y may be x.
inline void norm_row(const float* x, const float* weight, float eps, bool add_one, long size,
                     float* y) {
  const long whole = size / LANES * LANES;
  vf squares = vf{};
  for (long i = 0; i < whole; i += LANES) squares = fma(loadf(x + i), loadf(x + i), squares);
  float square = hsum(squares);
  for (long i = whole; i < size; i++) square += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(square / (float)size + eps);
  const float one = add_one ? 1.0f : 0.0f;
  for (long i = 0; i < whole; i += LANES)
    store(y + i, loadf(x + i) * splat(factor) * (loadf(weight + i) + splat(one)));
  for (long i = whole; i < size; i++) y[i] = x[i] * factor * (weight[i] + one);
}

// Rows of x, plus those of `residual` if there is one; `sum` then gets what is normalised. Both y
// and sum may be x.
inline void rms_norm(const float* x, const float* residual, const float* weight, float eps,
                     bool add_one, long rows, long size, float* sum, float* y) {
  const long whole = size / LANES * LANES;
  for_rows(rows, size, [&](long r) {
    const float* from = x + r * size;
    if (residual) {
      float* total = sum + r * size;
      const float* add = residual + r * size;
      for (long i = 0; i < whole; i += LANES) store(total + i, loadf(from + i) + loadf(add + i));
      for (long i = whole; i < size; i++) total[i] = from[i] + add[i];
      from = total;
    }
    norm_row(from, weight, eps, add_one, size, y + r * size);
  });
}

// In place, each of `heads` heads that lie side by side in x, `stride` elements a token.
inline void norm_heads(float* x, long stride, long n, long heads, long dim, const float* weight,
                       float eps, bool add_one) {
  for_rows(n, heads * dim, [&](long t) {
    for (long h = 0; h < heads; h++) {
      float* head = x + t * stride + h * dim;
      norm_row(head, weight, eps, add_one, dim, head);
    }
  });
}

inline vf activate(vf x, int32_t kind) {
  if (kind == SILU) return x / (splat(1.0f) + vexp(-x));
  if (kind == GELU_TANH) {
    vf inner = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
    return splat(0.5f) * x * (splat(1.0f) + vtanh(inner));
  }
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
  return out;
}

inline void gated(const float* x, int32_t activation, long rows, long size, float* y) {
  const long whole = size / LANES * LANES;
  for_rows(rows, 8 * size, [&](long r) {
    const float* gate = x + r * 2 * size;
    const float* up = gate + size;
    float* to = y + r * size;
    for (long i = 0; i < whole; i += LANES)
      store(to + i, activate(loadf(gate + i), activation) * loadf(up + i));
    for (long i = whole; i < size; i++) to[i] = activate(splat(gate[i]), activation)[0] * up[i];
  });
}

// y may be x.
inline void rotate(const float* x, long stride, const float* cos, const float* sin, long n,
                   long heads, long dim, float* y, long y_stride) {
  const long half = dim / 2;
  for_rows(n, heads * dim, [&](long t) {
    const float *c = cos + t * half, *s = sin + t * half;
    for (long h = 0; h < heads; h++) {
      const float* from = x + t * stride + h * dim;
      float* to = y + t * y_stride + h * dim;
      for (long i = 0; i < half; i++) {
        const float first = from[i], second = from[i + half];
        to[i] = first * c[i] - second * s[i];
        to[i + half] = second * c[i] + first * s[i];
      }
    }
  });
}

inline void argmax(const float* x, long rows, long size, int64_t* out) {
  const long whole = size / LANES * LANES;
  for_rows(rows, size / 8, [&](long r) {
    const float* row = x + r * size;
    // The largest value first, then where it is: both loops run at the speed of memory.
    // NaN compares false with everything, so no maximum shows it: it is looked for beside.
    const vf most = splat(FLT_MAX);
    vf top = splat(-INFINITY);
    vi good = splat_int(-1);
    for (long i = 0; i < whole; i += LANES) {
      const vf x = loadf(row + i);
      top = vmax(x, top);
      good &= x <= most;
    }
    float best = hmax(top);
    bool is_good = true;
    for (int lane = 0; lane < LANES; lane++) is_good &= good[lane] != 0;
    for (long i = whole; i < size; i++) {
      best = std::max(best, row[i]);
      is_good &= row[i] <= FLT_MAX;
    }
    if (!is_good || best < -FLT_MAX) {
      out[r] = -1;
      return;
    }
    long at = 0;
    while (at < size - 1 && row[at] != best) at++;
    out[r] = at;
  });
}

}  // namespace rg
