#include "client/checkpoints/weight_diff.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
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
  std::string left;
  MUSTER_RETURN_IF_ERROR(a.Stream(in_a, [&](absl::string_view part) {
    left.append(part.data(), part.size());
    return absl::OkStatus();
  }));
  // Elements smaller than a byte are compared by bytes.
  const size_t width = std::max(1, SafetensorsTypeBits(first.type) / 8);
  difference.elements = left.size() / width;
  size_t at = 0;
  // Parts end at whole elements.
  MUSTER_RETURN_IF_ERROR(b.Stream(in_b, [&](absl::string_view part) {
    const absl::string_view other(left.data() + at, part.size());
    at += part.size();
    if (other == part) return absl::OkStatus();
    for (size_t i = 0; i + width <= part.size(); i += width) {
      const absl::string_view x = other.substr(i, width), y = part.substr(i, width);
      if (x == y) continue;
      ++difference.differing;
      const std::optional<double> u = AsDouble(first.type, x), v = AsDouble(first.type, y);
      if (!u.has_value() || !v.has_value()) continue;
      difference.largest = std::max(difference.largest.value_or(0), Distance(*u, *v));
    }
    return absl::OkStatus();
  }));
  difference.equal = difference.differing == 0;
  return difference;
}

}  // namespace muster::client
