#include "tests/conformance/compare.h"

#include <cmath>
#include <limits>
#include <optional>

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

std::optional<double> Number(const Json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (value == "inf") return std::numeric_limits<double>::infinity();
  if (value == "-inf") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

bool Near(double got, double want, const Tolerance& tolerance) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  const double apart = std::abs(got - want);
  return apart <= tolerance.absolute || apart <= tolerance.relative * std::abs(want);
}

std::string Find(const Json& got, const Json& want, const Tolerance& tolerance,
                 const std::string& path) {
  const auto differs = [&] {
    return path + ": got " + got.dump().substr(0, 200) + ", want " + want.dump().substr(0, 200);
  };
  if (want.is_object()) {
    if (!got.is_object()) return differs();
    for (const auto& [key, value] : want.items()) {
      if (!got.contains(key)) return path + "." + key + ": missing";
      if (std::string d = Find(got[key], value, tolerance, path + "." + key); !d.empty()) return d;
    }
    for (const auto& [key, value] : got.items()) {
      if (!want.contains(key)) return path + "." + key + ": not wanted";
    }
    return "";
  }
  if (want.is_array()) {
    if (!got.is_array() || got.size() != want.size()) return differs();
    for (size_t i = 0; i < want.size(); ++i) {
      std::string d = Find(got[i], want[i], tolerance, path + "[" + std::to_string(i) + "]");
      if (!d.empty()) return d;
    }
    return "";
  }
  if (want.is_number_integer() && got.is_number_integer()) return got == want ? "" : differs();
  const std::optional<double> a = Number(got), b = Number(want);
  if (a.has_value() && b.has_value()) return Near(*a, *b, tolerance) ? "" : differs();
  return got == want ? "" : differs();
}

}  // namespace

std::string Difference(const Json& got, const Json& want, const Tolerance& tolerance) {
  return Find(got, want, tolerance, "out");
}

}  // namespace muster::conformance
