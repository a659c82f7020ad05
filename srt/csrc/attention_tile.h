// The pieces of attention: tiles of the cache, and the softmax of a stretch of scores.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace rg {

constexpr int TILE = 32;
constexpr int SPLIT = 256;
constexpr float NEVER = -1e30f;  // a maximum before there is any score

// One pass, made once for all layers. Mirrors NativePass in native_attention.py.
struct AttentionPass {
  const int32_t* table;       // [rows, table_stride] slots
  const int64_t* table_rows;  // [b]
  const int64_t* seq_lens;    // [b]
  const int64_t* extend_lens;  // [b]
  const int64_t* out_loc;     // [n]
  int64_t table_stride;
  int64_t num_requests;
  int64_t num_tokens;
};

// One layer. Mirrors NativeLayer in native_attention.py.
struct AttentionLayer {
  void* k;  // [slots, num_kv_heads, head_dim]; of int8 see attention_int8.h
  void* v;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t window;  // 0: none
  float scale;
  float cap;  // 0: none
  int32_t kv_dtype;
  int32_t dtype;  // of q, k, v and the output
};

// Asks for rows of the cache ahead of their use, some at each step: they lie anywhere, so the CPU
// cannot foresee them, and more requests than it can remember at once would stop it until they are
// served.
class Prefetcher {
 public:
  Prefetcher(const void* base, long stride, long bytes, const int32_t* slots, long count,
             long steps)
      : base_((const char*)base), slots_(slots), stride_(stride), bytes_(bytes), count_(count) {
    rows_ = (count + steps - 1) / steps;
  }

  RG_INLINE void step() {
    const long end = std::min(count_, next_ + rows_);
    for (; next_ < end; next_++)
      for (long at = 0; at < bytes_; at += 64) prefetch(base_ + slots_[next_] * stride_ + at);
  }

 private:
  const char* base_;
  const int32_t* slots_;
  long stride_, bytes_, count_, rows_, next_ = 0;
};

// K or V of one KV head as they lie in the cache: row k is that of slots[k]. The right side of a
// product; asks for a row ahead at each of its own.
template <Dtype T>
struct CacheRows {
  typedef typename Element<T>::type Item;
  const Item* base;
  const int32_t* slots;
  long stride;  // elements
  Prefetcher* ahead;

  RG_INLINE const Item* row(long k) const { return base + slots[k] * stride; }
  RG_INLINE vf load(long k, long v) const {
    if (v == 0) ahead->step();
    return load_as_float<T>(row(k) + v * LANES);
  }
  CacheRows skip(long vectors) const { return {base + vectors * LANES, slots, stride, ahead}; }
};

constexpr int STEPS = TILE / 8;  // of the prefetcher in each of the next two

// tile [count][width] of float32; columns from `dim` on are zero.
template <Dtype T>
inline void load_rows(const CacheRows<T>& rows, long count, long dim, long width, float* tile) {
  const long whole = dim / LANES * LANES;
  for (long i = 0; i < count; i++) {
    if (i % 8 == 0) rows.ahead->step();
    const auto* row = rows.row(i);
    float* out = tile + i * width;
    for (long d = 0; d < whole; d += LANES) store(out + d, load_as_float<T>(row + d));
    for (long d = whole; d < width; d++) out[d] = d < dim ? Element<T>::get(row[d]) : 0.0f;
  }
}

#ifdef RG_AVX2
// Eight elements of eight rows, turned: out[i * TILE + j] = rows[j][i].
RG_INLINE void turn_8x8(const float* const* rows, long d, float* out) {
  __m256 r[8], t[8];
  for (int j = 0; j < 8; j++) r[j] = _mm256_loadu_ps(rows[j] + d);
  for (int j = 0; j < 8; j += 2) {
    t[j] = _mm256_unpacklo_ps(r[j], r[j + 1]);
    t[j + 1] = _mm256_unpackhi_ps(r[j], r[j + 1]);
  }
  for (int j = 0; j < 8; j += 4) {
    r[j] = _mm256_shuffle_ps(t[j], t[j + 2], 0x44);
    r[j + 1] = _mm256_shuffle_ps(t[j], t[j + 2], 0xee);
    r[j + 2] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0x44);
    r[j + 3] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0xee);
  }
  for (int j = 0; j < 4; j++) {
    _mm256_storeu_ps(out + j * TILE, _mm256_permute2f128_ps(r[j], r[j + 4], 0x20));
    _mm256_storeu_ps(out + (j + 4) * TILE,
                     _mm256_permute2f128_ps(r[j], r[j + 4], 0x31));
  }
}

// Sixteen elements of eight rows, turned while they are narrow: half the shuffles.
template <Dtype T>
RG_INLINE void turn_16x8(const uint16_t* const* rows, long d, float* out) {
  __m256i r[8], t[8];
  for (int j = 0; j < 8; j++) r[j] = _mm256_loadu_si256((const __m256i*)(rows[j] + d));
  for (int j = 0; j < 4; j++) {
    t[j] = _mm256_unpacklo_epi16(r[2 * j], r[2 * j + 1]);
    t[j + 4] = _mm256_unpackhi_epi16(r[2 * j], r[2 * j + 1]);
  }
  for (int j = 0; j < 4; j++) {
    r[2 * j] = _mm256_unpacklo_epi32(t[2 * j], t[2 * j + 1]);
    r[2 * j + 1] = _mm256_unpackhi_epi32(t[2 * j], t[2 * j + 1]);
  }
  // r[0], r[1] hold rows 0 to 3 of elements 0, 1 and 2, 3; r[2], r[3] rows 4 to 7; r[4] on the same
  // of elements 4 to 7. The upper halves are 8 elements further.
  auto put = [&](int i, __m256i v) {
    const __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
    auto widen = [](__m128i half) {
      if constexpr (T == F16) return _mm256_cvtph_ps(half);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    };
    _mm256_storeu_ps(out + i * TILE, widen(low));
    _mm256_storeu_ps(out + (i + 8) * TILE, widen(high));
  };
  for (int j = 0; j < 4; j++) {
    const int a = j / 2 * 4 + j % 2;
    put(2 * j, _mm256_unpacklo_epi64(r[a], r[a + 2]));
    put(2 * j + 1, _mm256_unpackhi_epi64(r[a], r[a + 2]));
  }
}
#endif

// tile [dim][TILE] of float32, turned; past `count` the last row is repeated.
template <Dtype T>
inline void load_columns(const CacheRows<T>& rows, long count, long dim, float* tile) {
  for (long i = 0; i < TILE; i += 8) {
    rows.ahead->step();
    const typename Element<T>::type* eight[8];
    for (long j = 0; j < 8; j++) eight[j] = rows.row(std::min(i + j, count - 1));
    long d = 0;
#ifdef RG_AVX2
    if constexpr (T == F32)
      for (; d + 8 <= dim; d += 8) turn_8x8(eight, d, tile + d * TILE + i);
    else
      for (; d + 16 <= dim; d += 16) turn_16x8<T>(eight, d, tile + d * TILE + i);
#endif
    for (; d < dim; d++)
      for (long j = 0; j < 8; j++) tile[d * TILE + i + j] = Element<T>::get(eight[j][d]);
  }
}

// Scores [first, end) of one row become weights, those outside [low, high) zero, and the row's
// maximum and sum follow. first and end are multiples of TILE; more zeros would not change the sum.
// A score that is NaN makes the sum NaN: neither a maximum nor vexp would let it through.
inline void weigh_row(float* scores, long first, long end, long low, long high, float cap,
                      float* row_max, float* row_sum) {
  vf top = splat(NEVER), lane;
  vi strange = vi{};
  for (int j = 0; j < LANES; j++) lane[j] = (float)j;
  for (long i = first; i < end; i += LANES) {
    vf s = loadf(scores + i);
    if (cap > 0) s = vtanh(s * splat(1.0f / cap)) * splat(cap);
    if (i < low || i + LANES > high) {
      vi seen = (lane >= splat((float)(low - i))) & (lane < splat((float)(high - i)));
      s = seen ? s : splat(-INFINITY);
    }
    if (cap > 0 || i < low || i + LANES > high) store(scores + i, s);
    top = vmax(top, s);
    strange |= s != s;
  }
  const float most = hmax(top);
  vf sum = vf{};
  for (long i = first; i < end; i += LANES) {
    vf p = vexp(loadf(scores + i) - splat(most));
    store(scores + i, p);
    sum += p;
  }
  *row_max = most;
  *row_sum = hsum(strange ? splat(NAN) : sum);
}

// Folds (part_max, part_sum, part) into (total_max, total_sum, total) for one row.
inline void merge_row(float part_max, float part_sum, const float* part, float* total_max,
                      float* total_sum, float* total, long width) {
  float top = std::max(part_max, *total_max);
  float keep = vexp(splat(*total_max - top))[0], add = vexp(splat(part_max - top))[0];
  *total_sum = *total_sum * keep + part_sum * add;
  for (long d = 0; d < width; d += LANES)
    store(total + d, fma(loadf(total + d), splat(keep), loadf(part + d) * splat(add)));
  *total_max = top;
}

}  // namespace rg
