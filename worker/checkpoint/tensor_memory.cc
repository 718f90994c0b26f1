#include "worker/checkpoint/tensor_memory.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "ATen/ops/empty.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

// TensorIterator supports no more.
constexpr size_t kMaxDimensions = 64;

}  // namespace

absl::StatusOr<std::vector<int64_t>> TensorSizes(const std::vector<uint64_t>& shape,
                                                 const std::string& place) {
  if (shape.size() > kMaxDimensions ||
      std::any_of(shape.begin(), shape.end(), [](uint64_t dimension) {
        return dimension > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
      })) {
    return absl::InvalidArgumentError(
        absl::StrCat(place, "shape: has more dimensions or larger ones than a tensor can have"));
  }
  return std::vector<int64_t>(shape.begin(), shape.end());
}

absl::StatusOr<at::Tensor> NewTensor(const std::vector<int64_t>& sizes, at::ScalarType type,
                                     const std::string& place) {
  // Count like LibTorch: a dimension of zero does not make up for others that are too large.
  auto bytes = static_cast<int64_t>(c10::elementSize(type));
  bool overflow = false;
  bool empty = false;
  for (const int64_t size : sizes) {
    empty = empty || size == 0;
    overflow = overflow || (size != 0 && __builtin_mul_overflow(bytes, size, &bytes));
  }
  if (overflow) {
    return absl::InvalidArgumentError(absl::StrCat(place, "shape: is larger than a tensor can be"));
  }
  at::Tensor tensor;
  MUSTER_RETURN_IF_ERROR(
      WithMemory(place, empty ? 0 : static_cast<uint64_t>(bytes),
                 "is the file what it is taken for? A machine with more memory may load it",
                 [&] { tensor = at::empty(sizes, at::TensorOptions().dtype(type)); }));
  return tensor;
}

absl::Status WithMemory(const std::string& place, uint64_t bytes, absl::string_view way_out,
                        absl::FunctionRef<void()> code) {
  const auto refused = [&] {
    return absl::ResourceExhaustedError(absl::StrCat(
        place, "needs ", bytes, " bytes of memory, which this process does not get: ", way_out));
  };
  try {
    code();
  } catch (const c10::Error& error) {
    // LibTorch has no class of its own for a lack of host memory.
    const std::string text = error.what_without_backtrace();
    if (!absl::StrContains(text, "can't allocate memory") &&
        !absl::StrContains(text, "not enough memory")) {
      throw;
    }
    return refused();
  } catch (const std::bad_alloc&) {
    return refused();
  }
  return absl::OkStatus();
}

bool SameBytes(const at::Tensor& first, const at::Tensor& second, at::ScalarType type) {
  const auto resolved = [type](const at::Tensor& tensor) {
    return tensor.to(at::kCPU, type).resolve_conj().resolve_neg().contiguous();
  };
  const at::Tensor a = resolved(first);
  const at::Tensor b = resolved(second);
  return a.nbytes() == b.nbytes() &&
         (a.nbytes() == 0 || memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

absl::StatusOr<bool> AreSameWeights(const std::string& place, absl::string_view other,
                                    const at::Tensor& first, const at::Tensor& second,
                                    at::ScalarType type) {
  bool same = false;
  MUSTER_RETURN_IF_ERROR(WithMemory(
      place, 2 * static_cast<uint64_t>(first.numel()) * c10::elementSize(type),
      absl::StrCat("to be compared, in ", c10::toString(type), ", with ", Printable(other),
                   ", which is the same tensor here: a machine with more memory may load it"),
      [&] { same = SameBytes(first, second, type); }));
  return same;
}

std::string PlaceOfTensor(absl::string_view path, absl::string_view name) {
  return absl::StrCat(path, ": tensor \"", Printable(name), "\": ");
}

}  // namespace muster
