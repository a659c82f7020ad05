// A stack of decoder layers in one call: at batch 1 the way back to Python after each of a dozen
// operations a layer costs more than they do. The same kernels in the same order as the models call
// them, so the results have the same bits.
#pragma once

#include <chrono>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "write_kv.h"

namespace rg {

// One layer. Mirrors NativeDecoderLayer in native_decoder.py; null where a family has no such norm.
struct DecoderLayer {
  const Weight* qkv;
  const Weight* o;
  const Weight* gate_up;
  const Weight* down;
  const float* q_norm;
  const float* k_norm;
  const float* post_attention_norm;  // on the attention's result, before it is added
  const float* mlp_norm;             // on the sum
  const float* post_mlp_norm;
  const float* next_norm;  // on the sum: the next layer's first norm, or the model's last
  AttentionLayer attention;
  float eps;
  int32_t norm_adds_one;
  int32_t activation;
  int32_t exact;
  int32_t rotary;  // which pair of cos and sin
  int32_t padding;
};

// Mirrors NativeRotary in native_decoder.py.
struct Rotary {
  const float* cos;  // [n, head_dim / 2]
  const float* sin;
};

// Where the time of run_decoder went, in seconds, added up over calls. Mirrors NativeTimes in
// native_decoder.py.
struct DecoderTimes {
  double linear, attention, rest;
};

// Adds the time since the last lap to one of the parts, if anybody wants to know.
class Laps {
 public:
  explicit Laps(bool on) : on_(on), last_(on ? now() : Time()) {}

  void lap(double& part) {
    if (!on_) return;
    const Time time = now();
    part += std::chrono::duration<double>(time - last_).count();
    last_ = time;
  }

 private:
  typedef std::chrono::steady_clock::time_point Time;
  static Time now() { return std::chrono::steady_clock::now(); }

  bool on_;
  Time last_;
};

// hidden [n][size] are embeddings, x the same through the first layer's norm; x becomes the result. `times`
// may be null.
inline void run_decoder(const DecoderLayer* layers, long num_layers, const AttentionPass& pass,
                        const Rotary* rotaries, long size, float* hidden, float* x,
                        DecoderTimes* times) {
  static std::vector<float> qkv, attended, update, gate_up, activated;
  const long n = pass.num_tokens;
  DecoderTimes unwanted;
  DecoderTimes& t = times ? *times : unwanted;
  Laps laps(times != nullptr);
  auto grow = [&](std::vector<float>& v, long columns) {
    if ((long)v.size() < n * columns) v.resize(n * columns);
    return v.data();
  };
  for (long i = 0; i < num_layers; i++) {
    const DecoderLayer& layer = layers[i];
    const AttentionLayer& a = layer.attention;
    const bool add_one = layer.norm_adds_one, exact = layer.exact;
    const long dim = a.head_dim, heads = a.num_heads, kv_heads = a.num_kv_heads;
    const long inner = layer.down->inputs, width = layer.qkv->outputs;
    float* q = grow(qkv, width);
    float* k = q + heads * dim;
    float* out = grow(attended, heads * dim);
    float* added = grow(update, size);
    float* gates = grow(gate_up, 2 * inner);
    float* active = grow(activated, inner);

    linear(*layer.qkv, x, size, n, exact, q);
    laps.lap(t.linear);
    if (layer.q_norm) norm_heads(q, width, n, heads, dim, layer.q_norm, layer.eps, add_one);
    if (layer.k_norm) norm_heads(k, width, n, kv_heads, dim, layer.k_norm, layer.eps, add_one);
    const Rotary& rotary = rotaries[layer.rotary];
    rotate(q, width, rotary.cos, rotary.sin, n, heads + kv_heads, dim, q, width);
    laps.lap(t.rest);
    write_kv(pass, a, k, width, k + kv_heads * dim, width);
    Attend(pass, a, q, width, out).run();
    laps.lap(t.attention);
    linear(*layer.o, out, heads * dim, n, exact, added);
    laps.lap(t.linear);
    if (layer.post_attention_norm)
      rms_norm(added, nullptr, layer.post_attention_norm, layer.eps, add_one, n, size, nullptr,
               added);
    rms_norm(hidden, added, layer.mlp_norm, layer.eps, add_one, n, size, hidden, x);

    laps.lap(t.rest);
    linear(*layer.gate_up, x, size, n, exact, gates);
    laps.lap(t.linear);
    gated(gates, layer.activation, n, inner, active);
    laps.lap(t.rest);
    linear(*layer.down, active, inner, n, exact, added);
    laps.lap(t.linear);
    if (layer.post_mlp_norm)
      rms_norm(added, nullptr, layer.post_mlp_norm, layer.eps, add_one, n, size, nullptr, added);
    rms_norm(hidden, added, layer.next_norm, layer.eps, add_one, n, size, hidden, x);
    laps.lap(t.rest);
  }
}

}  // namespace rg
