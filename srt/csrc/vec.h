// Vectors of LANES floats or 32-bit integers, and the few operations that need the CPU's own
// instructions. Arithmetic is GCC's vector extension; with RG_LANES the same code runs without
// intrinsics, for tests and for CPUs that are not x86.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(RG_LANES) && defined(__AVX512F__) && defined(__AVX512BW__)
#define RG_AVX512 1
#define RG_AVX2 1
#define RG_LANES 16
#elif !defined(RG_LANES) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define RG_AVX2 1
#define RG_LANES 8
#elif !defined(RG_LANES)
#define RG_LANES 8
#endif
#ifdef RG_AVX2
#include <immintrin.h>
#endif

// For what lies in the innermost loops: a large translation unit exhausts what the compiler is
// willing to inline.
#define RG_INLINE inline __attribute__((always_inline))

namespace rg {

constexpr int LANES = RG_LANES;
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint8_t vb __attribute__((vector_size(LANES * 4)));

template <typename V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

inline vf loadf(const float* p) { return load<vf>(p); }

inline vf splat(float x) {
#if defined(RG_AVX512)
  return (vf)_mm512_set1_ps(x);
#elif defined(RG_AVX2)
  return (vf)_mm256_set1_ps(x);
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = x;
  return v;
#endif
}

inline vi splat_int(int32_t x) {
#if defined(RG_AVX512)
  return (vi)_mm512_set1_epi32(x);
#elif defined(RG_AVX2)
  return (vi)_mm256_set1_epi32(x);
#else
  vi v;
  for (int i = 0; i < LANES; i++) v[i] = x;
  return v;
#endif
}

// a * b + c, rounded once where the CPU can. Always this and never a bare a * b + c: the compiler
// may fuse the latter in one place and not in another, and rows would depend on their neighbours.
inline vf fma(vf a, vf b, vf c) {
#if defined(RG_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(RG_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }

// To the nearest integer, ties to even.
inline vi round_to_int(vf v) {
#if defined(RG_AVX512)
  return (vi)_mm512_cvtps_epi32((__m512)v);
#elif defined(RG_AVX2)
  return (vi)_mm256_cvtps_epi32((__m256)v);
#else
  vi out;
  for (int i = 0; i < LANES; i++) out[i] = (int32_t)__builtin_rintf(v[i]);
  return out;
#endif
}

inline float hsum(vf v) {
  float sum = v[0];
  for (int i = 1; i < LANES; i++) sum += v[i];
  return sum;
}

inline float hmax(vf v) {
#if defined(RG_AVX2) && !defined(RG_AVX512)
  __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  float top = v[0];
  for (int i = 1; i < LANES; i++) top = top > v[i] ? top : v[i];
  return top;
#endif
}

inline int32_t hsum_int(vi v) {
#if defined(RG_AVX2) && !defined(RG_AVX512)
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v),
                            _mm256_extracti128_si256((__m256i)v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
#else
  int32_t sum = v[0];
  for (int i = 1; i < LANES; i++) sum += v[i];
  return sum;
#endif
}

// --- 16-bit floats ---

inline float half_to_float(uint16_t h) {
#ifdef RG_AVX2
  return _cvtsh_ss(h);
#else
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
  if (magnitude >= 0x7c00) {
    bits = sign | 0x7f800000u | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = sign | ((magnitude << 13) + 0x38000000u);
  } else {
    float value = (float)magnitude * 0x1p-24f;
    return sign ? -value : value;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

inline uint16_t float_to_half(float f) {
#ifdef RG_AVX2
  return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint16_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // subnormal: let float addition round
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | (uint16_t)(bits - 0x3f000000);
  }
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | (uint16_t)((bits - 0x38000000) >> 13);
#endif
}

inline float bf16_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline vf load_half(const uint16_t* p) {
#if defined(RG_AVX512)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(RG_AVX2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
  return v;
#endif
}

// Element types as the Python side numbers them. I8 is blocks with scales, and only a KV cache's.
enum Dtype : int32_t { F32 = 0, F16 = 1, BF16 = 2, I8 = 3 };

template <Dtype T>
struct Element;
template <>
struct Element<F32> {
  typedef float type;
  static float get(float x) { return x; }
  static float put(float x) { return x; }
};
template <>
struct Element<F16> {
  typedef uint16_t type;
  static float get(uint16_t x) { return half_to_float(x); }
  static uint16_t put(float x) { return float_to_half(x); }
};
template <>
struct Element<BF16> {
  typedef uint16_t type;
  static float get(uint16_t x) { return bf16_to_float(x); }
  static uint16_t put(float x) { return float_to_bf16(x); }
};

template <>
struct Element<I8> {  // codes of blocks, as bytes
  typedef uint8_t type;
};

template <Dtype T>
RG_INLINE vf load_as_float(const typename Element<T>::type* p) {
  if constexpr (T == F32) {
    return loadf(p);
  } else if constexpr (T == F16) {
    return load_half(p);
  } else {
    typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
    return (vf)(__builtin_convertvector(load<halves>(p), vi) << 16);
  }
}

// Calls body with the dtype, one of numbers, as a compile-time constant.
template <typename Body>
inline void with_dtype(int32_t dtype, Body body) {
  if (dtype == F32) body(std::integral_constant<Dtype, F32>());
  if (dtype == F16) body(std::integral_constant<Dtype, F16>());
  if (dtype == BF16) body(std::integral_constant<Dtype, BF16>());
}

inline void prefetch(const void* p) {
#ifdef RG_AVX2
  // GCC takes a function that only has its builtin for one without effect, and drops the calls.
  asm volatile("prefetcht0 %0" ::"m"(*(const char*)p));
#else
  __builtin_prefetch(p);
#endif
}

// --- exp ---

// e^x for x <= 88, 0 below -87.3. Range reduction by ln 2 in two parts and a polynomial of degree
// 6 on [-ln2/2, ln2/2]; within 2 units in the last place.
inline vf vexp(vf x) {
  vf clamped = vmin(vmax(x, splat(-87.3f)), splat(88.3f));
  vi n = round_to_int(clamped * splat(1.44269504f));
  vf nf = to_float(n);
  vf r = fma(nf, splat(-0.693145752f), clamped);
  r = fma(nf, splat(-1.42860677e-6f), r);
  vf p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  vi exponent = (n + 127) << 23;
  vf scaled = p * (vf)exponent;
  return x < splat(-87.3f) ? splat(0.0f) : scaled;
}

inline vf vtanh(vf x) {
  // 1 - 2 / (e^2x + 1); x is bounded so that e^2x stays finite.
  vf bounded = vmin(vmax(x, splat(-20.0f)), splat(20.0f));
  // Close to zero the difference would cancel; the odd series is exact enough there.
  vf x2 = x * x;
  vf series = x * fma(x2, fma(x2, splat(0.13333333f), splat(-0.33333333f)), splat(1.0f));
  vf far = splat(1.0f) - splat(2.0f) / (vexp(bounded + bounded) + splat(1.0f));
  vf magnitude = vmax(x, -x);
  return magnitude < splat(0.05f) ? series : far;
}

// --- a small product, the core of attention and of linears with float activations ---

// Keeps v in a register from here on.
template <typename V>
RG_INLINE void pin(V& v) {
#ifdef RG_AVX2
  asm("" : "+v"(v));
#else
  (void)v;
#endif
}

// The right side of a product, a row-major matrix: vector v of row k.
struct MatrixRows {
  const float* b;
  long ldb;

  RG_INLINE vf load(long k, long v) const { return loadf(b + k * ldb + v * LANES); }
  MatrixRows skip(long vectors) const { return {b + vectors * LANES, ldb}; }
};

// C[MR][NV * LANES] (+)= A[MR][depth] B[depth][NV * LANES]. Every element is one chain of fma over
// depth in order, whatever MR and NV are: results do not depend on the tile that computed them.
template <int MR, int NV, typename Right>
inline void product_tile(const float* a, long lda, const Right& b, long depth, float* c, long ldc,
                         bool accumulate) {
  vf acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) acc[r][v] = accumulate ? loadf(c + r * ldc + v * LANES) : vf{};
  for (long k = 0; k < depth; k++) {
    // The side of fewer vectors stays in registers while the other goes by: pinned, or each use
    // would load it again and loads would be the limit.
    if constexpr (MR <= NV) {
      vf left[MR];
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        left[r] = splat(a[r * lda + k]);
        pin(left[r]);
      }
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) {
        vf right = b.load(k, v);
        if constexpr (MR > 1) pin(right);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) acc[r][v] = fma(left[r], right, acc[r][v]);
      }
    } else {
      vf right[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) {
        right[v] = b.load(k, v);
        pin(right[v]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        vf left = splat(a[r * lda + k]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) acc[r][v] = fma(left, right[v], acc[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) store(c + r * ldc + v * LANES, acc[r][v]);
}

constexpr int ROW_TILE = 6;

template <int NV, typename Right>
inline void product_columns(const float* a, long lda, const Right& b, long rows, long depth,
                            float* c, long ldc, bool accumulate) {
  long r = 0;
  for (; r + ROW_TILE <= rows; r += ROW_TILE)
    product_tile<ROW_TILE, NV>(a + r * lda, lda, b, depth, c + r * ldc, ldc, accumulate);
  const float* rest = a + r * lda;
  float* out = c + r * ldc;
  switch (rows - r) {
    case 5: product_tile<5, NV>(rest, lda, b, depth, out, ldc, accumulate); break;
    case 4: product_tile<4, NV>(rest, lda, b, depth, out, ldc, accumulate); break;
    case 3: product_tile<3, NV>(rest, lda, b, depth, out, ldc, accumulate); break;
    case 2: product_tile<2, NV>(rest, lda, b, depth, out, ldc, accumulate); break;
    case 1: product_tile<1, NV>(rest, lda, b, depth, out, ldc, accumulate); break;
    default: break;
  }
}

// C[rows][vectors * LANES] (+)= A[rows][depth] B, row-major.
template <typename Right>
inline void product(const float* a, long lda, const Right& b, long rows, long vectors, long depth,
                    float* c, long ldc, bool accumulate) {
  long v = 0;
  if (rows <= 3)  // more columns at once, or the chains would wait for each other
    for (; v + 4 <= vectors; v += 4)
      product_columns<4>(a, lda, b.skip(v), rows, depth, c + v * LANES, ldc, accumulate);
  for (; v + 2 <= vectors; v += 2)
    product_columns<2>(a, lda, b.skip(v), rows, depth, c + v * LANES, ldc, accumulate);
  if (v < vectors)
    product_columns<1>(a, lda, b.skip(v), rows, depth, c + v * LANES, ldc, accumulate);
}

}  // namespace rg
