#ifndef MUSTER_TESTS_CONFORMANCE_CASE_FIELDS_H_
#define MUSTER_TESTS_CONFORMANCE_CASE_FIELDS_H_

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace muster::conformance {

// Returns the value, or throws its status: how a handler rejects a case.
template <class T>
T ValueOf(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::invalid_argument(std::string(value.status().message()));
  return *std::move(value);
}

// Returns `in[field]`, a whole number between the limits. Throws an error that names the field and
// its value.
inline int64_t IntOf(const nlohmann::json& in, const char* field, int64_t at_least = 0,
                     int64_t at_most = std::numeric_limits<int64_t>::max()) {
  const nlohmann::json& value = in.at(field);
  // Read as unsigned if it is positive: a number too large for int64 must not wrap around.
  const bool fits =
      value.is_number_integer() &&
      (!value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(at_most)) &&
      value.get<int64_t>() >= at_least && value.get<int64_t>() <= at_most;
  if (!fits) {
    throw std::invalid_argument(std::string(field) + " must be a whole number from " +
                                std::to_string(at_least) + " to " + std::to_string(at_most) +
                                ", not " + value.dump().substr(0, 100));
  }
  return value.get<int64_t>();
}

// Returns the case's number of processes. Each is a thread or a computed answer here, so it is
// limited.
inline int RanksOf(const nlohmann::json& in) {
  return static_cast<int>(IntOf(in, "num_processes", 1, 1024));
}

}  // namespace muster::conformance

#endif  // MUSTER_TESTS_CONFORMANCE_CASE_FIELDS_H_
