#ifndef MUSTER_TESTS_CONFORMANCE_VALUE_OF_H_
#define MUSTER_TESTS_CONFORMANCE_VALUE_OF_H_

#include <stdexcept>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace muster::conformance {

// The value, or its status as an exception: how a handler rejects a case.
template <class T>
T ValueOf(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::invalid_argument(std::string(value.status().message()));
  return *std::move(value);
}

}  // namespace muster::conformance

#endif  // MUSTER_TESTS_CONFORMANCE_VALUE_OF_H_
