#ifndef MUSTER_WORKER_MODELS_ROW_PRODUCTS_H_
#define MUSTER_WORKER_MODELS_ROW_PRODUCTS_H_

#include <cstdint>

namespace muster::models {

// A product y[r * out + o] = sum_i weight[o * in + i] x[r * in + i] + bias[o], in float32.
struct RowProduct {
  int64_t rows = 0, in = 0, out = 0;
  const float* x = nullptr;
  const float* bias = nullptr;  // may be null
  float* y = nullptr;
};

// Compute columns `begin` to `end` of y. The order of the sums depends neither on the rows nor on
// the machine. The uint16_t weights are the bits of bfloat16.
void MultiplyRows(const RowProduct& product, const float* weight, int64_t begin, int64_t end);
void MultiplyRows(const RowProduct& product, const uint16_t* weight, int64_t begin, int64_t end);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_ROW_PRODUCTS_H_
