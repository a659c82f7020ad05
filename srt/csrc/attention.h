// Attention over the paged KV cache: ragged batches, no padding, no gathered copies.
//
// A request's keys and values are read in tiles of TILE positions, each once for all query heads of
// its KV head and for QUERY_BLOCK queries: first the scores of SPLIT positions, then their softmax,
// then their values. Splits begin at multiples of SPLIT counted from position 0 and never depend on
// the batch: a token gets the same bits whether it is decoded or part of a prefill, alone or in
// company.
//
// Merging the softmax of splits as in Milakov and Gimelshein, "Online normalizer calculation for
// softmax" (2018), and in Flash-Decoding (Dao et al. 2023).
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention_int8.h"
#include "attention_tile.h"
#include "pool.h"
#include "vec.h"

namespace rg {

constexpr int QUERY_BLOCK = 16;

// The work of one thread on one block of queries of some KV heads. Row (h * queries + i) * group + g
// is query i of head g of the h-th KV head.
struct AttentionScratch {
  std::unique_ptr<float[]> memory;
  size_t size = 0;
  float *q, *tile, *scores, *part, *part_max, *part_sum, *total, *total_max, *total_sum;
  // For an int8 cache: of the tile's rows; weights times one block's.
  float *scales, *scaled;
  Int8Queries int8_q;

  void reserve(long rows, long width) {
    const long blocks = int8_blocks(width);
    size_t needed = rows * (3 * width + SPLIT + 4 + TILE) + TILE * width;
    needed += TILE * blocks + rows * blocks * (2 + BLOCK / (long)sizeof(float));
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
    scores = take(rows * SPLIT);
    part_max = take(rows);
    part_sum = take(rows);
    total_max = take(rows);
    total_sum = take(rows);
    tile = take(TILE * width);
    scales = take(TILE * blocks);
    scaled = take(TILE * rows);
    int8_q.codes = (int8_t*)take(rows * blocks * BLOCK / sizeof(float));
    int8_q.scales = take(rows * blocks);
    int8_q.biases = (int32_t*)take(rows * blocks);
  }
};

// Queries at positions [begin, end) of one request, from row `token` of q on, and KV heads
// [first_head, last_head).
struct QueryBlock {
  long request, token, begin, end, first_head, last_head;

  long queries() const { return end - begin; }
  long heads() const { return last_head - first_head; }
};

// The first position that the query at `position` sees.
inline long first_seen(const AttentionLayer& layer, long position) {
  return layer.window > 0 ? std::max(0L, position - (long)layer.window + 1) : 0L;
}

// Attention of a block over the keys [split * SPLIT, ..) of that split: s.part and its statistics.
template <Dtype T>
class SplitAttention {
 public:
  SplitAttention(const AttentionLayer& layer, const QueryBlock& block, const int32_t* slots,
                 long group, long width, AttentionScratch& scratch)
      : layer_(layer), block_(block), slots_(slots), width_(width), s_(scratch) {
    group_ = group;
    per_head_ = block.queries() * group;
  }

  void run(long split) const {
    const long start = split * SPLIT, end = std::min(block_.end, start + SPLIT);
    // Positions before the first one seen are read too if they share its tile. They are the
    // request's own.
    const long first = std::max(start, first_seen(layer_, block_.begin) / TILE * TILE);
    for (long tile = first; tile < end; tile += TILE) score_tile(start, tile, end, first);
    for (long h = 0; h < block_.heads(); h++)
      for (long i = 0; i < per_head_; i++) {
        const long position = block_.begin + i / group_, r = h * per_head_ + i;
        const long high = std::min(end, position + 1) - start;
        weigh_row(s_.scores + r * SPLIT, first - start, (high + TILE - 1) / TILE * TILE,
                  first_seen(layer_, position) - start, high, layer_.cap, s_.part_max + r,
                  s_.part_sum + r);
      }
    std::fill(s_.part, s_.part + block_.heads() * per_head_ * width_, 0.0f);
    for (long tile = first; tile < end; tile += TILE) add_values(start, tile, end);
  }

 private:
  void score_tile(long start, long tile, long end, long first) const {
    const bool more = tile + TILE < end;
    Prefetcher ahead = prefetcher(more ? layer_.k : layer_.v, more ? tile + TILE : first,
                                  STEPS * block_.heads());
    const long skip = skipped(tile), count = std::min((long)TILE, end - tile);
    for (long h = 0; h < block_.heads(); h++) {
      const long r = h * per_head_ + skip, rows = per_head_ - skip;
      float* scores = s_.scores + r * SPLIT + tile - start;
      if constexpr (T == I8) {
        const Int8Tile keys = int8_tile(layer_.k, h, tile, count, ahead);
        turn_codes(keys, s_.tile);
        score_tile_int8(s_.tile, keys.scales, keys.blocks, s_.int8_q, r, rows, scores);
      } else {
        load_columns(cache_rows(layer_.k, h, tile, ahead), count, layer_.head_dim, s_.tile);
        product(s_.q + r * width_, width_, MatrixRows{s_.tile, TILE}, rows, TILE / LANES,
                layer_.head_dim, scores, SPLIT, false);
      }
    }
  }

  void add_values(long start, long tile, long end) const {
    const bool more = tile + TILE < end;
    // Few rows convert what they read; for more a converted tile pays.
    const long skip = skipped(tile), rows = per_head_ - skip, dim = layer_.head_dim;
    const bool direct = rows <= ROW_TILE && (T == I8 || dim == width_);
    Prefetcher ahead = prefetcher(more ? layer_.v : layer_.k, tile + TILE,
                                  (direct && T != I8 ? TILE : STEPS) * block_.heads());
    const long count = std::min((long)TILE, end - tile), vectors = width_ / LANES;
    for (long h = 0; h < block_.heads(); h++) {
      const long r = h * per_head_ + skip;
      const float* weights = s_.scores + r * SPLIT + tile - start;
      float* out = s_.part + r * width_;
      if constexpr (T == I8) {
        const Int8Tile values = int8_tile(layer_.v, h, tile, count, ahead);
        if (!direct) load_codes(values, count, s_.tile);
        for (long d = 0; d < width_; d += BLOCK) {
          scale_weights(weights, rows, values.scales + d / BLOCK * TILE, s_.scaled);
          if (direct)
            add_block(values, d, s_.scaled, rows, count, out + d, width_);
          else
            product(s_.scaled, TILE, MatrixRows{s_.tile + d, width_}, rows, BLOCK / LANES, count,
                    out + d, width_, true);
        }
      } else if (direct) {
        product(weights, SPLIT, cache_rows(layer_.v, h, tile, ahead), rows, vectors, count, out,
                width_, true);
      } else {
        load_rows(cache_rows(layer_.v, h, tile, ahead), count, dim, width_, s_.tile);
        product(weights, SPLIT, MatrixRows{s_.tile, width_}, rows, vectors, count, out, width_,
                true);
      }
    }
  }

  // Rows of each head whose queries lie before the tile and see nothing of it.
  long skipped(long tile) const { return std::max(0L, tile - block_.begin) * group_; }

  CacheRows<T> cache_rows(const void* cache, long head, long tile, Prefetcher& ahead) const {
    const long dim = layer_.head_dim;
    return {(const typename Element<T>::type*)cache + (block_.first_head + head) * dim,
            slots_ + tile, layer_.num_kv_heads * dim, &ahead};
  }

  Int8Tile int8_tile(const void* cache, long head, long tile, long count,
                     Prefetcher& ahead) const {
    const long bytes = row_bytes<I8>(layer_.head_dim);
    Int8Tile rows;
    rows.scales = s_.scales;
    rows.blocks = int8_blocks(layer_.head_dim);
    rows.load((const uint8_t*)cache + (block_.first_head + head) * bytes,
              layer_.num_kv_heads * bytes, slots_ + tile, count, ahead);
    return rows;
  }

  // For the block's heads at positions [tile, tile + TILE), if the request has them.
  Prefetcher prefetcher(const void* cache, long tile, long steps) const {
    const long bytes = row_bytes<T>(layer_.head_dim);
    return Prefetcher((const char*)cache + block_.first_head * bytes, layer_.num_kv_heads * bytes,
                      block_.heads() * bytes, slots_ + tile,
                      std::clamp(block_.end - tile, 0L, (long)TILE), steps);
  }

  const AttentionLayer& layer_;
  const QueryBlock& block_;
  const int32_t* slots_;
  long group_, per_head_, width_;
  AttentionScratch& s_;
};

class Attend {
 public:
  Attend(const AttentionPass& pass, const AttentionLayer& layer, const void* q, long q_stride,
         void* out)
      : pass_(pass), layer_(layer), q_(q), q_stride_(q_stride), out_(out) {
    group_ = layer.num_heads / layer.num_kv_heads;
    const long step = layer.kv_dtype == I8 ? BLOCK : LANES;
    width_ = (layer.head_dim + step - 1) / step * step;
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
    load_queries(block, s);
    std::fill(s.total, s.total + rows * width_, 0.0f);
    std::fill(s.total_max, s.total_max + rows, NEVER);
    std::fill(s.total_sum, s.total_sum + rows, 0.0f);
    for (long split = first_seen(layer_, block.begin) / SPLIT; split * SPLIT < block.end; split++) {
      with_cache_dtype(layer_.kv_dtype, [&](auto t) {
        SplitAttention<t.value>(layer_, block, slots_of(block), group_, width_, s).run(split);
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
      load_queries(block, s);
      with_cache_dtype(layer_.kv_dtype, [&](auto t) {
        SplitAttention<t.value>(layer_, block, slots_of(block), group, width, s).run(split);
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

  void load_queries(const QueryBlock& block, AttentionScratch& s) const {
    const long rows = block.queries() * block.heads() * group_;
    with_dtype(layer_.dtype, [&](auto t) {
      typedef typename Element<t.value>::type Item;
      for (long r = 0; r < rows; r++) {
        const Item* from = (const Item*)q_ + token_of(block, r) * q_stride_ +
                           head_of(block, r) * layer_.head_dim;
        for (long d = 0; d < layer_.head_dim; d++)
          s.q[r * width_ + d] = Element<t.value>::get(from[d]) * layer_.scale;
      }
    });
    if (layer_.kv_dtype != I8) return;
    for (long r = 0; r < rows; r++) {
      std::fill(s.q + r * width_ + layer_.head_dim, s.q + (r + 1) * width_, 0.0f);
      s.int8_q.set_row(r, width_ / BLOCK, s.q + r * width_);
    }
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

}  // namespace rg
