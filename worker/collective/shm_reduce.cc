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

struct Request {
  const std::vector<ReduceSource>& sources;
  const std::vector<void*>& outs;
  bool wide_outs;
  int64_t ranks;
  int64_t count;
};

template <ShmReduceOp kOp, class T>
void Reduce(const Request& request) {
  // Narrow floats are added up in float; integers in their unsigned counterpart, where overflow is
  // defined.
  constexpr bool kNarrow = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;
  using A = std::conditional_t<kNarrow, float, T>;
  A sum[kBlock];
  for (int64_t begin = 0; begin < request.count; begin += kBlock) {
    const int64_t n = std::min(kBlock, request.count - begin);
    bool first = true;
    for (const ReduceSource& source : request.sources) {
      const auto take = [&](const auto* from) {
        if (first) {
          for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<A>(from[i]);
        } else {
          for (int64_t i = 0; i < n; ++i) sum[i] = Combine<kOp, A>(sum[i], static_cast<A>(from[i]));
        }
      };
      if (source.wide) {
        take(static_cast<const A*>(source.data) + begin);
      } else {
        take(static_cast<const T*>(source.data) + begin);
      }
      first = false;
    }
    if constexpr (kOp == ShmReduceOp::kAverage) {
      if (request.ranks > 0) {
        for (int64_t i = 0; i < n; ++i)
          sum[i] = static_cast<A>(sum[i] / static_cast<A>(request.ranks));
      }
    }
    for (void* const out : request.outs) {
      if (request.wide_outs) {
        std::copy(sum, sum + n, static_cast<A*>(out) + begin);
      } else {
        T* const to = static_cast<T*>(out) + begin;
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(sum[i]);
      }
    }
  }
}

template <class T>
void ReduceAs(ShmReduceOp op, const Request& request) {
  switch (op) {
    case ShmReduceOp::kSum:
      return Reduce<ShmReduceOp::kSum, T>(request);
    case ShmReduceOp::kAverage:
      return Reduce<ShmReduceOp::kAverage, T>(request);
    case ShmReduceOp::kMax:
      return Reduce<ShmReduceOp::kMax, T>(request);
    case ShmReduceOp::kMin:
      return Reduce<ShmReduceOp::kMin, T>(request);
    case ShmReduceOp::kProduct:
      return Reduce<ShmReduceOp::kProduct, T>(request);
  }
}

// Sums and products wrap around as unsigned numbers, which gives the same bits; order needs the
// sign.
template <class T>
void ReduceInteger(ShmReduceOp op, const Request& request) {
  if (op == ShmReduceOp::kSum || op == ShmReduceOp::kProduct) {
    ReduceAs<std::make_unsigned_t<T>>(op, request);
  } else {
    ReduceAs<T>(op, request);
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

c10::ScalarType WideType(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16
             ? c10::ScalarType::Float
             : dtype;
}

void ReduceArrays(c10::ScalarType dtype, ShmReduceOp op, const std::vector<const void*>& sources,
                  const std::vector<void*>& outs, int64_t count) {
  std::vector<ReduceSource> all;
  for (const void* const source : sources) all.push_back({source});
  ReduceSources(dtype, op, all, outs, /*wide_outs=*/false, static_cast<int64_t>(sources.size()),
                count);
}

void ReduceSources(c10::ScalarType dtype, ShmReduceOp op, const std::vector<ReduceSource>& sources,
                   const std::vector<void*>& outs, bool wide_outs, int64_t ranks, int64_t count) {
  const Request request = {sources, outs, wide_outs, ranks, count};
  switch (dtype) {
    case c10::ScalarType::Float:
      return ReduceAs<float>(op, request);
    case c10::ScalarType::Double:
      return ReduceAs<double>(op, request);
    case c10::ScalarType::Half:
      return ReduceAs<c10::Half>(op, request);
    case c10::ScalarType::BFloat16:
      return ReduceAs<c10::BFloat16>(op, request);
    case c10::ScalarType::Byte:
      return ReduceInteger<uint8_t>(op, request);
    case c10::ScalarType::Char:
      return ReduceInteger<int8_t>(op, request);
    case c10::ScalarType::Short:
      return ReduceInteger<int16_t>(op, request);
    case c10::ScalarType::Int:
      return ReduceInteger<int32_t>(op, request);
    case c10::ScalarType::Long:
      return ReduceInteger<int64_t>(op, request);
    case c10::ScalarType::Bool:
      // Booleans are 0 or 1: "any" is their maximum, "all" their minimum.
      return ReduceAs<uint8_t>(op == ShmReduceOp::kSum       ? ShmReduceOp::kMax
                               : op == ShmReduceOp::kProduct ? ShmReduceOp::kMin
                                                             : op,
                               request);
    default:
      TORCH_CHECK(false, "no reduction of ", c10::toString(dtype));
  }
}

}  // namespace muster
