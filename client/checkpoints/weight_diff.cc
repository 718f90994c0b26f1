#include "client/checkpoints/weight_diff.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shape_text.h"

namespace muster::client {
namespace {

std::string Description(const StoredTensor& tensor) {
  return absl::StrCat(SafetensorsTypeName(tensor.type), " ", ShapeText(tensor.shape));
}

template <class T>
T Element(absl::string_view bytes) {
  T value;
  memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

double FromHalf(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  double value = 0;
  if (exponent == 0x1f) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, -24);
  } else {
    value = std::ldexp(fraction + 1024, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

std::optional<double> AsDouble(SafetensorsType type, absl::string_view bytes) {
  switch (type) {
    case SafetensorsType::kF64:
      return Element<double>(bytes);
    case SafetensorsType::kF32:
      return Element<float>(bytes);
    case SafetensorsType::kF16:
      return FromHalf(Element<uint16_t>(bytes));
    case SafetensorsType::kBF16:
      return std::bit_cast<float>(static_cast<uint32_t>(Element<uint16_t>(bytes)) << 16);
    default:
      return std::nullopt;
  }
}

double Distance(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double distance = std::abs(a - b);
  return std::isnan(distance) ? std::numeric_limits<double>::infinity() : distance;
}

constexpr uint64_t kPartElements = uint64_t{1} << 18;

// A view may repeat each byte of its file any number of times: beyond this size, and beyond what
// honest files have, nothing is compared.
constexpr uint64_t kManyBytes = uint64_t{1} << 32;
constexpr uint64_t kManyTimes = 16;

// Reads the elements of a tensor in order and keeps only a part in memory; for a tensor that is not
// contiguous also its extent.
class Elements {
 public:
  Elements(const WeightFiles& files, WeightFiles::Entry entry, size_t width)
      : files_(files), entry_(std::move(entry)), width_(width) {}

  absl::Status Begin() {
    if (entry_.tensor.strides.empty()) return absl::OkStatus();
    place_.assign(entry_.tensor.shape.size(), 0);
    if (const absl::Status grown = extent_.Grow(entry_.tensor.extent_bytes); !grown.ok()) {
      return absl::Status(grown.code(),
                          absl::StrCat(files_.FileOf(entry_), ": tensor \"",
                                       Printable(entry_.tensor.name), "\": ", grown.message()));
    }
    return files_.Read(entry_, extent_.data());
  }

  // Returns the next elements, which must exist. Valid until the next call.
  absl::StatusOr<absl::string_view> Next(uint64_t elements) {
    part_.resize(elements * width_);
    if (entry_.tensor.strides.empty()) {
      WeightFiles::Entry part = entry_;
      part.tensor.begin += done_;
      part.tensor.extent_bytes = part_.size();
      done_ += part_.size();
      MUSTER_RETURN_IF_ERROR(files_.Read(part, part_.data()));
      return absl::string_view(part_);
    }
    const std::vector<uint64_t>& shape = entry_.tensor.shape;
    const std::vector<uint64_t>& strides = entry_.tensor.strides;
    for (uint64_t i = 0; i < elements; ++i) {
      memcpy(part_.data() + i * width_, extent_.data() + at_ * width_, width_);
      for (size_t d = shape.size(); d > 0; --d) {
        at_ += strides[d - 1];
        if (++place_[d - 1] < shape[d - 1]) break;
        at_ -= strides[d - 1] * shape[d - 1];
        place_[d - 1] = 0;
      }
    }
    return absl::string_view(part_);
  }

 private:
  const WeightFiles& files_;
  const WeightFiles::Entry entry_;
  const size_t width_;
  AlignedMemory extent_;         // for a tensor that is not contiguous
  std::vector<uint64_t> place_;  // the index there, and the element of the extent
  uint64_t at_ = 0;
  uint64_t done_ = 0;  // bytes of a contiguous tensor that were read
  std::string part_;
};

// Removes from both the repetitions that both have; returns how many there were.
uint64_t WithoutRepeats(StoredTensor& a, StoredTensor& b) {
  uint64_t times = 1;
  if (a.strides.empty() || b.strides.empty()) return times;
  for (size_t d = 0; d < a.shape.size(); ++d) {
    if (a.strides[d] != 0 || b.strides[d] != 0 || a.shape[d] == 0) continue;
    times *= a.shape[d];
    a.shape[d] = b.shape[d] = 1;
  }
  return times;
}

}  // namespace

absl::StatusOr<TensorDifference> CompareTensors(const WeightFiles& a,
                                                const WeightFiles::Entry& in_a,
                                                const WeightFiles& b,
                                                const WeightFiles::Entry& in_b) {
  TensorDifference difference;
  const StoredTensor& first = in_a.tensor;
  const StoredTensor& second = in_b.tensor;
  if (first.type != second.type || first.shape != second.shape) {
    difference.equal = false;
    difference.shape = absl::StrCat(Description(first), " and ", Description(second));
    return difference;
  }
  WeightFiles::Entry left_entry = in_a, right_entry = in_b;
  const uint64_t times = WithoutRepeats(left_entry.tensor, right_entry.tensor);
  // Elements smaller than a byte are compared as bytes.
  const size_t width = std::max(1, SafetensorsTypeBits(first.type) / 8);
  const uint64_t bytes = WeightFiles::BytesOf(left_entry);
  if (bytes > kManyBytes &&
      bytes / kManyTimes > left_entry.tensor.extent_bytes + right_entry.tensor.extent_bytes) {
    difference.equal = false;
    difference.not_compared =
        absl::StrCat("not compared: a view of ", bytes, " bytes, of which ", a.FileOf(in_a),
                     " has ", left_entry.tensor.extent_bytes, " and ", b.FileOf(in_b), " ",
                     right_entry.tensor.extent_bytes, "; save it as it is in memory to compare it");
    return difference;
  }
  const uint64_t elements = bytes / width;
  difference.elements = elements * times;
  if (elements == 0) return difference;
  Elements left(a, std::move(left_entry), width), right(b, std::move(right_entry), width);
  MUSTER_RETURN_IF_ERROR(left.Begin());
  MUSTER_RETURN_IF_ERROR(right.Begin());
  for (uint64_t done = 0; done < elements; done += kPartElements) {
    const uint64_t count = std::min(kPartElements, elements - done);
    MUSTER_ASSIGN_OR_RETURN(const absl::string_view here, left.Next(count));
    MUSTER_ASSIGN_OR_RETURN(const absl::string_view there, right.Next(count));
    if (here == there) continue;
    for (size_t i = 0; i < here.size(); i += width) {
      const absl::string_view x = here.substr(i, width), y = there.substr(i, width);
      if (x == y) continue;
      difference.differing += times;
      const std::optional<double> u = AsDouble(first.type, x), v = AsDouble(first.type, y);
      if (!u.has_value() || !v.has_value()) continue;
      difference.largest = std::max(difference.largest.value_or(0), Distance(*u, *v));
    }
  }
  difference.equal = difference.differing == 0;
  return difference;
}

}  // namespace muster::client
