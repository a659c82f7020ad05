// The library's C interface. Pointers and sizes are checked by the Python side.
#include "attention.h"
#include "decoder.h"
#include "elementwise.h"
#include "linear.h"
#include "packing.h"
#include "pool.h"
#include "vec.h"
#include "write_kv.h"

extern "C" {

void rg_set_threads(int32_t count) { rg::Pool::get().set_threads(count); }

// Writes k, v at the pass's slots and attends; see AttentionBackend.forward. Strides count elements
// from one token's first head to the next's; the output is [n, num_heads, head_dim], packed.
void rg_attention(const rg::AttentionPass* pass, const rg::AttentionLayer* layer, const void* q,
                  int64_t q_stride, const void* k, int64_t k_stride, const void* v,
                  int64_t v_stride, void* out) {
  rg::write_kv(*pass, *layer, k, k_stride, v, v_stride);
  rg::Attend(*pass, *layer, q, q_stride, out).run();
}

// Bytes of a packed weight.
int64_t rg_packed_bytes(int32_t format, int64_t outputs, int64_t inputs) {
  rg::Weight w{nullptr, nullptr, outputs, inputs, format};
  if (format == rg::DENSE) return w.num_panels() * inputs * rg::LANES * (int64_t)sizeof(float);
  return w.num_panels() * rg::panel_bytes(format, w.blocks());
}

// `rows` rows of a source layout become outputs [first_row, first_row + rows) of `panels`.
void rg_pack(void* panels, int32_t format, const void* from, int32_t source, int64_t first_row,
             int64_t rows, int64_t inputs) {
  rg::pack((uint8_t*)panels, format, (const uint8_t*)from, source, first_row, rows, inputs);
}

void rg_unpack_rows(const rg::Weight* w, const int64_t* ids, int64_t count, float* y) {
  rg::unpack_rows(*w, ids, count, y);
}

void rg_linear(const rg::Weight* w, const float* x, int64_t x_stride, int64_t rows, int32_t exact,
               float* y) {
  rg::linear(*w, x, x_stride, rows, exact != 0, y);
}

// y = norm(x + residual) * (weight + add_one); `sum` gets x + residual unless it is null.
void rg_rms_norm(const float* x, const float* residual, const float* weight, float eps,
                 int32_t add_one, int64_t rows, int64_t size, float* sum, float* y) {
  rg::rms_norm(x, residual, weight, eps, add_one != 0, rows, size, sum, y);
}

// y [rows][size] = activation(x[:, :size]) * x[:, size:].
void rg_gated(const float* x, int32_t activation, int64_t rows, int64_t size, float* y) {
  rg::gated(x, activation, rows, size, y);
}

// y [n][heads][dim] = x rotated; x has its heads side by side and `stride` elements a token.
void rg_rotate(const float* x, int64_t stride, const float* cos, const float* sin, int64_t n,
               int64_t heads, int64_t dim, float* y) {
  rg::rotate(x, stride, cos, sin, n, heads, dim, y, heads * dim);
}

// The index of each row's largest value, the lowest among equals; -1 if the row holds NaN or +inf,
// or nothing but -inf.
void rg_argmax(const float* x, int64_t rows, int64_t size, int64_t* out) {
  rg::argmax(x, rows, size, out);
}

// See run_decoder.
void rg_decoder(const rg::DecoderLayer* layers, int64_t num_layers, const rg::AttentionPass* pass,
                const rg::Rotary* rotaries, int64_t size, float* hidden, float* x,
                rg::DecoderTimes* times) {
  rg::run_decoder(layers, num_layers, *pass, rotaries, size, hidden, x, times);
}
}
