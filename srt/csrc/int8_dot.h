// Exact dot products of int8 and of 4-bit codes, LANES outputs at a time: four products of inputs
// side by side go to the same output.
#pragma once

#include <cstdint>

#include "vec.h"

namespace rg {

#if defined(RG_AVX512) && defined(__AVX512VNNI__)
#define RG_VNNI 1
#elif defined(RG_AVX2) && !defined(RG_AVX512) && defined(__AVXVNNI__)
#define RG_VNNI 1
#endif

#ifdef RG_VNNI
constexpr int CODE_BIAS = 128;  // the instruction wants the weights unsigned
#else
constexpr int CODE_BIAS = 0;
#endif

inline int32_t four(const int8_t* p) { return load<int32_t>(p); }

// The codes of LANES outputs, four each, and four activations in every lane.
#if defined(RG_AVX512)
typedef __m512i raw;
inline raw raw_load(const void* p) { return _mm512_loadu_si512(p); }
inline raw raw_splat(int32_t x) { return _mm512_set1_epi32(x); }
inline raw low_nibbles(raw v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline raw high_nibbles(raw v) {
  return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}
#elif defined(RG_AVX2)
typedef __m256i raw;
inline raw raw_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline raw raw_splat(int32_t x) { return _mm256_set1_epi32(x); }
inline raw low_nibbles(raw v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline raw high_nibbles(raw v) {
  return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}
#else
typedef vb raw;
inline raw raw_load(const void* p) { return load<vb>(p); }
inline raw raw_splat(int32_t x) { return (vb)splat_int(x); }
inline raw low_nibbles(raw v) { return v & 15; }
inline raw high_nibbles(raw v) { return v >> 4; }
#endif

// 8-bit codes of LANES outputs, ready to be multiplied with many rows.
struct Codes8 {
  raw value;
#if defined(RG_AVX2) && !defined(RG_AVX512) && !defined(RG_VNNI)
  raw magnitude;
  Codes8() = default;
  explicit Codes8(raw v) : value(v), magnitude(_mm256_abs_epi8(v)) {
    pin(value);
    pin(magnitude);
  }
#else
  Codes8() = default;
  explicit Codes8(raw v) : value(v) { pin(value); }
#endif
};

// Sums of products for LANES outputs of one row.
struct Dot {
  raw acc = raw{};

  // The bias of a row with 8-bit codes; 0 for 4 bits.
  void start(int32_t bias) { acc = raw_splat(bias); }

  // Codes of 4 bits. Without VNNI the sums stay in 16 bits: 16 products of 15 * 127 fit.
  void add_q4(raw codes, raw x) {
#if defined(RG_VNNI) && defined(RG_AVX512)
    acc = _mm512_dpbusd_epi32(acc, codes, x);
#elif defined(RG_VNNI)
    acc = _mm256_dpbusd_avx_epi32(acc, codes, x);
#elif defined(RG_AVX512)
    acc = _mm512_add_epi16(acc, _mm512_maddubs_epi16(codes, x));
#elif defined(RG_AVX2)
    acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, x));
#else
    add_portable<false>(codes, x);
#endif
  }

  // Codes of 8 bits, plus CODE_BIAS.
  void add_q8(const Codes8& codes, raw x) {
#if defined(RG_VNNI) && defined(RG_AVX512)
    acc = _mm512_dpbusd_epi32(acc, codes.value, x);
#elif defined(RG_VNNI)
    acc = _mm256_dpbusd_avx_epi32(acc, codes.value, x);
#elif defined(RG_AVX512)
    __m512i low = _mm512_madd_epi16(_mm512_cvtepi8_epi16(_mm512_castsi512_si256(codes.value)),
                                    _mm512_cvtepi8_epi16(_mm512_castsi512_si256(x)));
    __m512i high = _mm512_madd_epi16(_mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(codes.value, 1)),
                                     _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(x, 1)));
    // Each holds pairs of an output side by side: add the pairs, in the outputs' order.
    __m512i even = _mm512_permutex2var_epi32(low, pairs(0), high);
    __m512i odd = _mm512_permutex2var_epi32(low, pairs(1), high);
    acc = _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#elif defined(RG_AVX2)
    // The instruction wants one side unsigned: the sign of the weight moves to x.
    __m256i products = _mm256_maddubs_epi16(codes.magnitude, _mm256_sign_epi8(x, codes.value));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
#else
    add_portable<true>(codes.value, x);
#endif
  }

  vf q4_result() const {
#if defined(RG_VNNI) || !defined(RG_AVX2)
    return to_float((vi)acc);
#elif defined(RG_AVX512)
    return to_float((vi)_mm512_madd_epi16(acc, _mm512_set1_epi16(1)));
#else
    return to_float((vi)_mm256_madd_epi16(acc, _mm256_set1_epi16(1)));
#endif
  }

  vf q8_result() const { return to_float((vi)acc); }

 private:
#if defined(RG_AVX512)
  static __m512i pairs(int odd) {
    return _mm512_add_epi32(
        _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
        _mm512_set1_epi32(odd));
  }
#elif !defined(RG_AVX2)
  template <bool Signed>
  void add_portable(raw codes, raw x) {
    vi sum = (vi)acc;
    for (int i = 0; i < LANES * 4; i++) {
      int code = Signed ? (int8_t)codes[i] : codes[i];
      sum[i / 4] += code * (int8_t)x[i];
    }
    acc = (raw)sum;
  }
#endif
};

}  // namespace rg
