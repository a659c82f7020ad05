// Linears over weights in blocks of 32 with a scale each (and a minimum, for 4 bits), with int8 or
// float32 activations.
//
// Weights are packed in panels of LANES outputs. A panel is a sequence of blocks along the input,
// read front to back:
//   4 bits: 4 vectors, scales, minima. Byte 4 * lane + j of vector g holds the codes of inputs
//           4 * g + j (low nibble) and 16 + 4 * g + j (high) of output `lane`.
//   8 bits: 8 vectors, scales. Byte 4 * lane + j of vector g is input 4 * g + j, plus CODE_BIAS.
//   Scales and minima are LANES float16 each.
// A weight is code * scale + minimum. Blocks and float16 scales are those of GGML's Q4_0, Q4_1 and
// Q8_0, whose values are kept exactly.
//
// Every result is summed over blocks in order, whatever rows it is computed with: a row's bits do
// not depend on its batch. Within a block of int8 activations all is exact integer arithmetic.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "dense.h"
#include "pool.h"
#include "vec.h"
#include "weight.h"

namespace rg {

// Rows computed at once, by the number of registers.
#ifdef RG_AVX512
constexpr int QUANTIZED_ROW_TILE = 6;
#else
constexpr int QUANTIZED_ROW_TILE = 4;
#endif

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

template <Format F>
constexpr long block_bytes() {
  return F == Q4 ? LANES * 20 : LANES * 34;
}

inline long panel_bytes(int32_t format, long blocks) {
  return blocks * (format == Q4 ? block_bytes<Q4>() : block_bytes<Q8>());
}

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

inline int32_t four(const int8_t* p) { return load<int32_t>(p); }

// Dot products of one block for LANES outputs and one row; `x` is four int8 in every lane.
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
  void add_q8(raw codes, raw x) {
#if defined(RG_VNNI) && defined(RG_AVX512)
    acc = _mm512_dpbusd_epi32(acc, codes, x);
#elif defined(RG_VNNI)
    acc = _mm256_dpbusd_avx_epi32(acc, codes, x);
#elif defined(RG_AVX512)
    __m512i low = _mm512_madd_epi16(_mm512_cvtepi8_epi16(_mm512_castsi512_si256(codes)),
                                    _mm512_cvtepi8_epi16(_mm512_castsi512_si256(x)));
    __m512i high = _mm512_madd_epi16(_mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(codes, 1)),
                                     _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(x, 1)));
    // Each holds pairs of an output side by side: add the pairs, in the outputs' order.
    __m512i even = _mm512_permutex2var_epi32(low, pairs(0), high);
    __m512i odd = _mm512_permutex2var_epi32(low, pairs(1), high);
    acc = _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#elif defined(RG_AVX2)
    // The instruction wants one side unsigned: the sign of x moves to the weight.
    __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(codes, x));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
#else
    add_portable<true>(codes, x);
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

// Keeps the compiler from moving the loads of all steps to the front, where they would fill the
// registers that accumulators need: 92 against 64 billion products a second on one core of a Zen 3.
inline void keep_order() { asm volatile("" ::: "memory"); }

// Results of MR rows for NV panels, `panel_stride` bytes apart. Not inlined: it needs all registers.
template <Format F, int MR, int NV>
__attribute__((noinline)) void quantized_tile(const uint8_t* panel, long panel_stride,
                                              const QuantizedRows& x, long row, vf (*out)[NV]) {
  const long blocks = x.blocks;
  const int8_t* codes = x.codes.data() + row * blocks * BLOCK;
  const float* scales = x.scales.data() + row * blocks;
  const float* sums = x.sums.data() + row * blocks;
  const int32_t* biases = x.biases.data() + row * blocks;
  const long stride = blocks * BLOCK;
  vf acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) acc[r][v] = vf{};
  for (long b = 0; b < blocks; b++, panel += block_bytes<F>()) {
    Dot dots[MR][NV];
    const int8_t* xb = codes + b * BLOCK;
    raw c[NV];
    if constexpr (F == Q4) {
#pragma GCC unroll 1
      for (int g = 0; g < 4; g++, xb += 4) {
        const uint8_t* from = panel + g * LANES * 4;
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) c[v] = low_nibbles(raw_load(from + v * panel_stride));
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
          raw four_x = raw_splat(four(xb + r * stride));
#pragma GCC unroll 8
          for (int v = 0; v < NV; v++) dots[r][v].add_q4(c[v], four_x);
        }
        keep_order();
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) c[v] = high_nibbles(raw_load(from + v * panel_stride));
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
          raw four_x = raw_splat(four(xb + r * stride + 16));
#pragma GCC unroll 8
          for (int v = 0; v < NV; v++) dots[r][v].add_q4(c[v], four_x);
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) {
        const uint16_t* factors = (const uint16_t*)(panel + v * panel_stride + LANES * 16);
        vf scale = load_half(factors), minimum = load_half(factors + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
          vf both = scale * splat(scales[r * blocks + b]);
          acc[r][v] = fma(dots[r][v].q4_result(), both, acc[r][v]);
          acc[r][v] = fma(minimum, splat(sums[r * blocks + b]), acc[r][v]);
        }
      }
    } else {
      if (CODE_BIAS != 0)
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
          for (int v = 0; v < NV; v++) dots[r][v].start(biases[r * blocks + b]);
#pragma GCC unroll 1
      for (int g = 0; g < 8; g++, xb += 4) {
        const uint8_t* from = panel + g * LANES * 4;
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) c[v] = raw_load(from + v * panel_stride);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
          raw four_x = raw_splat(four(xb + r * stride));
#pragma GCC unroll 8
          for (int v = 0; v < NV; v++) dots[r][v].add_q8(c[v], four_x);
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) {
        vf scale = load_half((const uint16_t*)(panel + v * panel_stride + LANES * 32));
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
          vf both = scale * splat(scales[r * blocks + b]);
          acc[r][v] = fma(dots[r][v].q8_result(), both, acc[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) out[r][v] = acc[r][v];
}

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

  // All rows of NV panels.
  template <Format F, int NV>
  void panel_rows(const QuantizedRows& x, long panel, long rows) const {
    constexpr int MR = NV == 4 ? 1 : QUANTIZED_ROW_TILE;
    long r = 0;
    for (; r + MR <= rows; r += MR) tile<F, MR, NV>(x, panel, r);
    if constexpr (NV != 4) {
      switch (rows - r) {
        case 5: tile<F, 5, NV>(x, panel, r); break;
        case 4: tile<F, 4, NV>(x, panel, r); break;
        case 3: tile<F, 3, NV>(x, panel, r); break;
        case 2: tile<F, 2, NV>(x, panel, r); break;
        case 1: tile<F, 1, NV>(x, panel, r); break;
        default: break;
      }
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

// --- packing ---

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
