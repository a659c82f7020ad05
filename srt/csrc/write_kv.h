// K and V of new tokens, to their slots in the cache.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention_int8.h"
#include "attention_tile.h"
#include "pool.h"
#include "vec.h"

namespace rg {

template <Dtype T>
inline void load_block(const typename Element<T>::type* from, long count, float* block) {
  for (long i = 0; i < BLOCK; i++) block[i] = i < count ? Element<T>::get(from[i]) : 0.0f;
}

// One head of one token.
template <Dtype T>
inline void encode_row(const typename Element<T>::type* from, long dim, uint8_t* row) {
  const long blocks = int8_blocks(dim);
  for (long b = 0; b < blocks; b++) {
    float block[BLOCK];
    load_block<T>(from + b * BLOCK, dim - b * BLOCK, block);
    const uint16_t scale = float_to_bf16(block_scale(block));
    // The codes are for the scale as it is stored.
    encode_block(block, bf16_to_float(scale), (int8_t*)row + b * BLOCK);
    store(row + blocks * BLOCK + 2 * b, scale);
  }
}

// The heads of one token, side by side.
template <Dtype From, Dtype To>
inline void convert_row(const typename Element<From>::type* from, long heads, long dim, void* row) {
  if constexpr (To == I8) {
    const long bytes = int8_blocks(dim) * INT8_BLOCK_BYTES;
    for (long h = 0; h < heads; h++)
      encode_row<From>(from + h * dim, dim, (uint8_t*)row + h * bytes);
  } else if constexpr (From == To) {
    std::memcpy(row, from, heads * dim * sizeof *from);
  } else {
    auto* to = (typename Element<To>::type*)row;
    for (long d = 0; d < heads * dim; d++) to[d] = Element<To>::put(Element<From>::get(from[d]));
  }
}

inline void write_kv(const AttentionPass& pass, const AttentionLayer& layer, const void* k,
                     long k_stride, const void* v, long v_stride) {
  const long heads = layer.num_kv_heads, dim = layer.head_dim;
  with_dtype(layer.dtype, [&](auto from) {
    with_cache_dtype(layer.kv_dtype, [&](auto to) {
      typedef typename Element<from.value>::type In;
      const long bytes = heads * row_bytes<to.value>(dim), tokens = pass.num_tokens;
      auto write = [&](long begin, long end) {
        for (long i = begin; i < end; i++) {
          const long at = pass.out_loc[i] * bytes;
          convert_row<from.value, to.value>((const In*)k + i * k_stride, heads, dim,
                                            (char*)layer.k + at);
          convert_row<from.value, to.value>((const In*)v + i * v_stride, heads, dim,
                                            (char*)layer.v + at);
        }
      };
      constexpr long STEP = 8;  // tokens worth sharing out
      if (tokens <= STEP)
        write(0, tokens);
      else
        Pool::get().run((tokens + STEP - 1) / STEP, [&](int64_t item) {
          write(item * STEP, std::min(tokens, (long)(item + 1) * STEP));
        });
    });
  });
}

}  // namespace rg
