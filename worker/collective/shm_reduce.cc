#include "worker/collective/shm_reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "c10/util/BFloat16.h"
#include "c10/util/Exception.h"
#include "c10/util/Half.h"

namespace muster {
namespace {

// Small enough for the first-level cache with a few sources.
constexpr int64_t kBlock = 1024;

template <ShmReduceOp kOp, class A>
inline A Combine(A a, A b) {
  if constexpr (kOp == ShmReduceOp::kMax) {
    return (a > b || a != a) ? a : b;
  } else if constexpr (kOp == ShmReduceOp::kMin) {
    return (a < b || a != a) ? a : b;
  } else if constexpr (kOp == ShmReduceOp::kProduct) {
    return static_cast<A>(a * b);
  } else {
    return static_cast<A>(a + b);
  }
}

template <ShmReduceOp kOp, class T>
void Reduce(const std::vector<const void*>& sources, const std::vector<void*>& outs,
            int64_t count) {
  // Narrow floats are added up in float; integers in their unsigned twin, where overflow is
  // defined.
  constexpr bool kNarrow = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;
  using A = std::conditional_t<kNarrow, float, T>;
  const auto ranks = static_cast<int64_t>(sources.size());
  A sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<A>(first[i]);
    for (int64_t r = 1; r < ranks; ++r) {
      const T* source = static_cast<const T*>(sources[r]) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] = Combine<kOp, A>(sum[i], static_cast<A>(source[i]));
    }
    if constexpr (kOp == ShmReduceOp::kAverage) {
      for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<A>(sum[i] / static_cast<A>(ranks));
    }
    for (void* const out : outs) {
      T* const to = static_cast<T*>(out) + begin;
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(sum[i]);
    }
  }
}

template <class T>
void ReduceAs(ShmReduceOp op, const std::vector<const void*>& sources,
              const std::vector<void*>& outs, int64_t count) {
  switch (op) {
    case ShmReduceOp::kSum:
      return Reduce<ShmReduceOp::kSum, T>(sources, outs, count);
    case ShmReduceOp::kAverage:
      return Reduce<ShmReduceOp::kAverage, T>(sources, outs, count);
    case ShmReduceOp::kMax:
      return Reduce<ShmReduceOp::kMax, T>(sources, outs, count);
    case ShmReduceOp::kMin:
      return Reduce<ShmReduceOp::kMin, T>(sources, outs, count);
    case ShmReduceOp::kProduct:
      return Reduce<ShmReduceOp::kProduct, T>(sources, outs, count);
  }
}

// Wrap-around as for unsigned numbers, whose sums and products have the same bits; order needs the
// sign.
template <class T>
void ReduceInteger(ShmReduceOp op, const std::vector<const void*>& sources,
                   const std::vector<void*>& outs, int64_t count) {
  if (op == ShmReduceOp::kSum || op == ShmReduceOp::kProduct) {
    ReduceAs<std::make_unsigned_t<T>>(op, sources, outs, count);
  } else {
    ReduceAs<T>(op, sources, outs, count);
  }
}

}  // namespace

bool CanReduce(c10::ScalarType dtype, ShmReduceOp op) {
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
      return true;
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::Bool:
      return op != ShmReduceOp::kAverage;
    default:
      return false;
  }
}

void ReduceArrays(c10::ScalarType dtype, ShmReduceOp op, const std::vector<const void*>& sources,
                  const std::vector<void*>& outs, int64_t count) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return ReduceAs<float>(op, sources, outs, count);
    case c10::ScalarType::Double:
      return ReduceAs<double>(op, sources, outs, count);
    case c10::ScalarType::Half:
      return ReduceAs<c10::Half>(op, sources, outs, count);
    case c10::ScalarType::BFloat16:
      return ReduceAs<c10::BFloat16>(op, sources, outs, count);
    case c10::ScalarType::Byte:
      return ReduceInteger<uint8_t>(op, sources, outs, count);
    case c10::ScalarType::Char:
      return ReduceInteger<int8_t>(op, sources, outs, count);
    case c10::ScalarType::Short:
      return ReduceInteger<int16_t>(op, sources, outs, count);
    case c10::ScalarType::Int:
      return ReduceInteger<int32_t>(op, sources, outs, count);
    case c10::ScalarType::Long:
      return ReduceInteger<int64_t>(op, sources, outs, count);
    case c10::ScalarType::Bool:
      // Truths are 0 or 1: any is their largest, all their smallest.
      return ReduceAs<uint8_t>(op == ShmReduceOp::kSum       ? ShmReduceOp::kMax
                               : op == ShmReduceOp::kProduct ? ShmReduceOp::kMin
                                                             : op,
                               sources, outs, count);
    default:
      TORCH_CHECK(false, "no reduction of ", c10::toString(dtype));
  }
}

}  // namespace muster
