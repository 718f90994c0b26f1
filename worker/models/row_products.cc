#include "worker/models/row_products.h"

#include <bit>

// Uses the widest registers of the machine, chosen at program start.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MUSTER_WIDEST_REGISTERS \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MUSTER_WIDEST_REGISTERS
#endif

namespace muster::models {
namespace {

// The number of partial sums of a product, each over every kLanes-th element: independent, so that
// they fill registers, and added in one order on every machine.
constexpr int64_t kLanes = 32;

inline float Widen(float value) { return value; }
inline float Widen(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Computes the products of one row of the weight with kRows rows of x, `stride` elements apart.
template <int64_t kRows, class Number>
[[gnu::always_inline]] inline void RowProducts(const Number* weight, const float* x, int64_t in,
                                               float* products) {
  float sums[kRows][kLanes] = {};
  const int64_t whole = in / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    float wide[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) wide[lane] = Widen(weight[i + lane]);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        sums[row][lane] += wide[lane] * x[row * in + i + lane];
      }
    }
  }
  for (int64_t row = 0; row < kRows; ++row) {
    float sum = 0;
    for (int64_t i = whole; i < in; ++i) sum += Widen(weight[i]) * x[row * in + i];
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t lane = 0; lane < width; ++lane) sums[row][lane] += sums[row][lane + width];
    }
    products[row] = sum + sums[row][0];
  }
}

// Computes outputs `begin` to `end` of each row: y[row * out + o].
template <int64_t kRows, class Number>
[[gnu::always_inline]] inline void Outputs(const Number* weight, const float* bias, const float* x,
                                           int64_t in, int64_t out, int64_t begin, int64_t end,
                                           float* y) {
  for (int64_t o = begin; o < end; ++o) {
    float products[kRows];
    RowProducts<kRows>(weight + o * in, x, in, products);
    for (int64_t row = 0; row < kRows; ++row) {
      y[row * out + o] = products[row] + (bias == nullptr ? 0 : bias[o]);
    }
  }
}

template <class Number>
[[gnu::always_inline]] inline void Run(const RowProduct& p, const Number* weight, int64_t begin,
                                       int64_t end) {
  // Pairs of rows, then the last one: few enough sums to stay in registers.
  int64_t row = 0;
  const auto outputs = [&]<int64_t kRows>() {
    Outputs<kRows>(weight, p.bias, p.x + row * p.in, p.in, p.out, begin, end, p.y + row * p.out);
    row += kRows;
  };
  while (row + 4 <= p.rows) outputs.template operator()<4>();
  if (row + 2 <= p.rows) outputs.template operator()<2>();
  if (row < p.rows) outputs.template operator()<1>();
}  // namespace

}  // namespace

MUSTER_WIDEST_REGISTERS
void MultiplyRows(const RowProduct& p, const float* weight, int64_t begin, int64_t end) {
  Run(p, weight, begin, end);
}

MUSTER_WIDEST_REGISTERS
void MultiplyRows(const RowProduct& p, const uint16_t* weight, int64_t begin, int64_t end) {
  Run(p, weight, begin, end);
}

}  // namespace muster::models
