// Attention over the paged KV cache: ragged batches, no padding, no gathered copies.
//
// A request's keys are read in tiles of TILE positions, each once for all query heads of its KV
// head and for QUERY_BLOCK queries. Tiles begin at multiples of TILE and softmax statistics are
// merged at multiples of SPLIT, both counted from position 0, and never depend on the batch: a token
// gets the same bits whether it is decoded or part of a prefill, alone or in company.
//
// Softmax over tiles as in Milakov and Gimelshein, "Online normalizer calculation for softmax"
// (2018); splitting keys and merging the parts as in Flash-Decoding (Dao et al. 2023).
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>

#include "pool.h"
#include "vec.h"

namespace rg {

constexpr int TILE = 32;
constexpr int SPLIT = 256;
constexpr int QUERY_BLOCK = 16;
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
  void* k;  // [slots, num_kv_heads, head_dim]
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

// The work of one thread on one block of queries of some KV heads. Row (h * queries + i) * group + g
// is query i of head g of the h-th KV head.
struct AttentionScratch {
  std::unique_ptr<float[]> memory;
  size_t size = 0;
  float *q, *keys, *values, *scores, *part, *part_max, *part_sum, *total, *total_max, *total_sum;

  void reserve(long rows, long width) {
    size_t needed = rows * (3 * width + TILE + 4) + 2 * TILE * width;
    if (needed > size) {
      memory.reset(new float[needed]);
      size = needed;
    }
    float* p = memory.get();
    auto take = [&](size_t count) {
      float* start = p;
      p += count;
      return start;
    };
    q = take(rows * width);
    part = take(rows * width);
    total = take(rows * width);
    scores = take(rows * TILE);
    part_max = take(rows);
    part_sum = take(rows);
    total_max = take(rows);
    total_sum = take(rows);
    keys = take(TILE * width);
    values = take(TILE * width);
  }
};

// Queries at positions [begin, end) of one request, from row `token` of q on, and KV heads
// [first_head, last_head).
struct QueryBlock {
  long request, token, begin, end, first_head, last_head;

  long queries() const { return end - begin; }
  long heads() const { return last_head - first_head; }
};

// Asks for the K and V of a tile ahead, some rows at a time: they lie anywhere, so the CPU cannot
// foresee them, and more requests than it can remember at once would stop it until they are served.
class Prefetcher {
 public:
  Prefetcher(const AttentionLayer& layer, const QueryBlock& block, long item_bytes,
             const int32_t* slots, long count)
      : slots_(slots), count_(count), stride_(layer.num_kv_heads * layer.head_dim * item_bytes) {
    const long offset = block.first_head * layer.head_dim * item_bytes;
    k_ = (const char*)layer.k + offset;
    v_ = (const char*)layer.v + offset;
    bytes_ = block.heads() * layer.head_dim * item_bytes;
    // A tile is loaded and used in about ten steps a head.
    rows_ = std::max(1L, TILE / (10 * block.heads()));
  }

  void step() {
    const long end = std::min(count_, next_ + rows_);
    for (; next_ < end; next_++)
      for (long at = 0; at < bytes_; at += 64) {
        prefetch(k_ + slots_[next_] * stride_ + at);
        prefetch(v_ + slots_[next_] * stride_ + at);
      }
  }

 private:
  const int32_t* slots_;
  long count_, stride_, bytes_, rows_, next_ = 0;
  const char *k_, *v_;
};

// values [count][width] and keys [width][TILE] of `count` slots; the rest of the tile is zero.
template <Dtype T>
inline void load_tile(const AttentionLayer& layer, long kv_head, const int32_t* slots, long count,
                      long width, float* keys, float* values, Prefetcher& ahead) {
  typedef typename Element<T>::type Item;
  const long dim = layer.head_dim, stride = layer.num_kv_heads * dim;
  const Item* k_base = (const Item*)layer.k + kv_head * dim;
  const Item* v_base = (const Item*)layer.v + kv_head * dim;
  const long whole = dim / LANES * LANES;
  for (long i = 0; i < count; i++) {
    if (i % 8 == 0) ahead.step();
    const Item* v = v_base + slots[i] * stride;
    float* out = values + i * width;
    for (long d = 0; d < whole; d += LANES) store(out + d, load_as_float<T>(v + d));
    for (long d = whole; d < width; d++) out[d] = d < dim ? Element<T>::get(v[d]) : 0.0f;
  }
#ifdef RG_AVX2
  long i = 0;
  for (; i < count; i += 8) {
    ahead.step();
    const Item* rows[8];
    // Past the end the last row is repeated; its scores are masked.
    for (long j = 0; j < 8; j++) rows[j] = k_base + slots[std::min(i + j, count - 1)] * stride;
    long d = 0;
    for (; d + 8 <= dim; d += 8) {
      __m256 r[8], t[8];
      for (int j = 0; j < 8; j++) {
        if constexpr (T == F32) r[j] = _mm256_loadu_ps(rows[j] + d);
        if constexpr (T == F16)
          r[j] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(rows[j] + d)));
        if constexpr (T == BF16)
          r[j] = _mm256_castsi256_ps(_mm256_slli_epi32(
              _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(rows[j] + d))), 16));
      }
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
        _mm256_storeu_ps(keys + (d + j) * TILE + i, _mm256_permute2f128_ps(r[j], r[j + 4], 0x20));
        _mm256_storeu_ps(keys + (d + j + 4) * TILE + i,
                         _mm256_permute2f128_ps(r[j], r[j + 4], 0x31));
      }
    }
    for (; d < dim; d++)
      for (long j = 0; j < 8; j++) keys[d * TILE + i + j] = Element<T>::get(rows[j][d]);
  }
  for (long d = 0; d < dim; d++)
    for (long j = i; j < TILE; j++) keys[d * TILE + j] = 0.0f;
#else
  for (long d = 0; d < dim; d++)
    for (long i = 0; i < TILE; i++)
      keys[d * TILE + i] =
          i < count ? Element<T>::get(k_base[slots[i] * stride + d]) : 0.0f;
#endif
}

// Scores of one row over a tile become weights; the row's statistics follow. Lanes outside
// [low, high) weigh nothing. The row of the result is scaled to the new maximum.
inline void weigh_row(float* scores, long low, long high, float cap, float* row_max,
                      float* row_sum, float* out, long width) {
  vf top = splat(NEVER);
  for (int i = 0; i < TILE; i += LANES) {
    vf s = loadf(scores + i);
    if (cap > 0) s = vtanh(s * splat(1.0f / cap)) * splat(cap);
    vf lane;
    for (int j = 0; j < LANES; j++) lane[j] = (float)(i + j);
    vi seen = (lane >= splat((float)low)) & (lane < splat((float)high));
    s = seen ? s : splat(-INFINITY);
    store(scores + i, s);
    top = vmax(top, s);
  }
  float new_max = std::max(*row_max, hmax(top));
  vf sum = vf{};
  for (int i = 0; i < TILE; i += LANES) {
    vf p = vexp(loadf(scores + i) - splat(new_max));
    store(scores + i, p);
    sum += p;
  }
  float keep = vexp(splat(*row_max - new_max))[0];
  *row_sum = *row_sum * keep + hsum(sum);
  if (keep != 1.0f)
    for (long d = 0; d < width; d += LANES) store(out + d, loadf(out + d) * splat(keep));
  *row_max = new_max;
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

// The first position that the query at `position` sees.
inline long first_seen(const AttentionLayer& layer, long position) {
  return layer.window > 0 ? std::max(0L, position - (long)layer.window + 1) : 0L;
}

// Attention of a block over the keys [split * SPLIT, ..) of that split: s.part and its statistics.
template <Dtype T>
inline void attend_split(const AttentionLayer& layer, const QueryBlock& block,
                         const int32_t* slots, long split, long group, long width,
                         AttentionScratch& s) {
  const long per_head = block.queries() * group, rows = block.heads() * per_head;
  std::fill(s.part, s.part + rows * width, 0.0f);
  std::fill(s.part_max, s.part_max + rows, NEVER);
  std::fill(s.part_sum, s.part_sum + rows, 0.0f);
  const long last = std::min(block.end, (split + 1) * (long)SPLIT);
  const long seen = first_seen(layer, block.begin);
  for (long tile = split * SPLIT; tile < last; tile += TILE) {
    if (tile + TILE <= seen) continue;
    // Positions before `seen` are read too if they share its tile. They are the request's own.
    const long count = std::min((long)TILE, last - tile), next = tile + TILE;
    Prefetcher ahead(layer, block, sizeof(typename Element<T>::type), slots + next,
                     std::min((long)TILE, block.end - next));
    // Queries before the tile see nothing of it.
    const long skip = std::max(0L, tile - block.begin) * group;
    for (long h = 0; h < block.heads(); h++) {
      load_tile<T>(layer, block.first_head + h, slots + tile, count, width, s.keys, s.values,
                   ahead);
      const long first = h * per_head + skip, end = (h + 1) * per_head;
      product(s.q + first * width, width, s.keys, TILE, end - first, TILE, layer.head_dim,
              s.scores + first * TILE, TILE, false);
      for (long r = first; r < end; r++) {
        ahead.step();
        const long position = block.begin + (r - h * per_head) / group;
        weigh_row(s.scores + r * TILE, first_seen(layer, position) - tile, position + 1 - tile,
                  layer.cap, s.part_max + r, s.part_sum + r, s.part + r * width, width);
      }
      product(s.scores + first * TILE, TILE, s.values, width, end - first, width, count,
              s.part + first * width, width, true);
    }
  }
}

class Attend {
 public:
  Attend(const AttentionPass& pass, const AttentionLayer& layer, const void* q, long q_stride,
         void* out)
      : pass_(pass), layer_(layer), q_(q), q_stride_(q_stride), out_(out) {
    group_ = layer.num_heads / layer.num_kv_heads;
    width_ = (layer.head_dim + LANES - 1) / LANES * LANES;
  }

  void run() {
    // Kept between calls: a pass makes these for each of its layers.
    static std::vector<QueryBlock> blocks;
    blocks.clear();
    Pool& pool = Pool::get();
    const long all_heads = layer_.num_kv_heads, requests = pass_.num_requests;
    // A lone query takes all heads at once, if there are enough to share out.
    const bool together = requests >= 4 * pool.threads();
    long token = 0, splits = 0;
    bool single = true;  // every request has one new token
    for (long i = 0; i < requests; i++) {
      const long length = pass_.extend_lens[i], prefix = pass_.seq_lens[i] - length;
      single = single && length == 1;
      const long step = together && length == 1 ? all_heads : 1;
      for (long start = 0; start < length; start += QUERY_BLOCK) {
        const long end = std::min(length, start + QUERY_BLOCK);
        for (long head = 0; head < all_heads; head += step)
          blocks.push_back({i, token + start, prefix + start, prefix + end, head, head + step});
      }
      splits = std::max(splits, (pass_.seq_lens[i] + SPLIT - 1) / SPLIT);
      token += length;
    }
    const long num = (long)blocks.size();
    if (single && splits > 1 && num < 4 * pool.threads()) {
      run_split(blocks, splits);
      return;
    }
    // From the end, where the long ones of a prefill are: the last to finish is a short one.
    pool.run(num, [&](int64_t item) { attend_block(blocks[num - 1 - item]); });
  }

 private:
  const int32_t* slots_of(const QueryBlock& block) const {
    return pass_.table + pass_.table_rows[block.request] * pass_.table_stride;
  }

  // One block, all its splits one after the other.
  void attend_block(const QueryBlock& block) const {
    static thread_local AttentionScratch s;
    const long rows = block.queries() * block.heads() * group_;
    s.reserve(rows, width_);
    load_queries(block, s.q);
    std::fill(s.total, s.total + rows * width_, 0.0f);
    std::fill(s.total_max, s.total_max + rows, NEVER);
    std::fill(s.total_sum, s.total_sum + rows, 0.0f);
    for (long split = first_seen(layer_, block.begin) / SPLIT; split * SPLIT < block.end; split++) {
      with_dtype(layer_.kv_dtype, [&](auto t) {
        attend_split<t.value>(layer_, block, slots_of(block), split, group_, width_, s);
      });
      for (long r = 0; r < rows; r++)
        merge_row(s.part_max[r], s.part_sum[r], s.part + r * width_, s.total_max + r,
                  s.total_sum + r, s.total + r * width_, width_);
    }
    for (long r = 0; r < rows; r++) write_row(block, r, s.total_sum[r], s.total + r * width_);
  }

  // Few rows with many keys: splits are items of their own, merged in a second round.
  void run_split(const std::vector<QueryBlock>& blocks, long splits) const {
    static std::vector<float> parts;
    const long width = width_, group = group_, num = (long)blocks.size();
    const long size = group * (width + 2);  // of one block and split
    parts.resize(num * splits * size);
    Pool::get().run(num * splits, [&](int64_t item) {
      const long split = item % splits;
      const QueryBlock& block = blocks[item / splits];
      if (split * SPLIT >= block.end || (split + 1) * SPLIT <= first_seen(layer_, block.begin))
        return;
      static thread_local AttentionScratch s;
      s.reserve(group, width);
      load_queries(block, s.q);
      with_dtype(layer_.kv_dtype, [&](auto t) {
        attend_split<t.value>(layer_, block, slots_of(block), split, group, width, s);
      });
      float* out = parts.data() + item * size;
      std::copy(s.part, s.part + group * width, out);
      std::copy(s.part_max, s.part_max + group, out + group * width);
      std::copy(s.part_sum, s.part_sum + group, out + group * (width + 1));
    });
    std::vector<float> total(width);
    for (long i = 0; i < num; i++) {
      const QueryBlock& block = blocks[i];
      for (long g = 0; g < group; g++) {
        float top = NEVER, sum = 0.0f;
        std::fill(total.begin(), total.end(), 0.0f);
        for (long split = first_seen(layer_, block.begin) / SPLIT; split * SPLIT < block.end;
             split++) {
          const float* part = parts.data() + (i * splits + split) * size;
          merge_row(part[group * width + g], part[group * (width + 1) + g], part + g * width, &top,
                    &sum, total.data(), width);
        }
        write_row(block, g, sum, total.data());
      }
    }
  }

  // Row r of a block is this query (of the pass) and this head.
  long token_of(const QueryBlock& block, long r) const {
    return block.token + r / group_ % block.queries();
  }
  long head_of(const QueryBlock& block, long r) const {
    return (block.first_head + r / group_ / block.queries()) * group_ + r % group_;
  }

  void load_queries(const QueryBlock& block, float* q) const {
    const long rows = block.queries() * block.heads() * group_;
    with_dtype(layer_.dtype, [&](auto t) {
      typedef typename Element<t.value>::type Item;
      for (long r = 0; r < rows; r++) {
        const Item* from = (const Item*)q_ + token_of(block, r) * q_stride_ +
                           head_of(block, r) * layer_.head_dim;
        for (long d = 0; d < layer_.head_dim; d++)
          q[r * width_ + d] = Element<t.value>::get(from[d]) * layer_.scale;
      }
    });
  }

  void write_row(const QueryBlock& block, long r, float sum, const float* row) const {
    const float inverse = 1.0f / sum;
    with_dtype(layer_.dtype, [&](auto t) {
      auto* to = (typename Element<t.value>::type*)out_ +
                 (token_of(block, r) * layer_.num_heads + head_of(block, r)) * layer_.head_dim;
      for (long d = 0; d < layer_.head_dim; d++)
        to[d] = Element<t.value>::put(row[d] * inverse);
    });
  }

  const AttentionPass& pass_;
  const AttentionLayer& layer_;
  const void* q_;
  long q_stride_;
  void* out_;
  long group_, width_;
};

template <Dtype From, Dtype To>
inline void convert_row(const typename Element<From>::type* from, long count,
                        typename Element<To>::type* to) {
  if constexpr (From == To) {
    std::memcpy(to, from, count * sizeof *to);
  } else {
    for (long d = 0; d < count; d++) to[d] = Element<To>::put(Element<From>::get(from[d]));
  }
}

inline void write_kv(const AttentionPass& pass, const AttentionLayer& layer, const void* k,
                     long k_stride, const void* v, long v_stride) {
  const long size = layer.num_kv_heads * layer.head_dim;
  with_dtype(layer.dtype, [&](auto from) {
    with_dtype(layer.kv_dtype, [&](auto to) {
      typedef typename Element<from.value>::type In;
      typedef typename Element<to.value>::type Out;
      for (long i = 0; i < pass.num_tokens; i++) {
        const long slot = pass.out_loc[i];
        convert_row<from.value, to.value>((const In*)k + i * k_stride, size,
                                          (Out*)layer.k + slot * size);
        convert_row<from.value, to.value>((const In*)v + i * v_stride, size,
                                          (Out*)layer.v + slot * size);
      }
    });
  });
}

}  // namespace rg
