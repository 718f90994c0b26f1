#ifndef MUSTER_CLIENT_CONFIG_PYTHON_VALUES_H_
#define MUSTER_CLIENT_CONFIG_PYTHON_VALUES_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/string_view.h"

namespace muster::client {

// Reads values as Accelerate, which is written in Python, does. Pure.

// Reads a number as Python's int() and float() do, and so Accelerate's flags and variables: blanks
// around it and an underscore between two digits are allowed. nullopt: not a number, or one that
// does not fit.
std::optional<int64_t> ParsePythonInt(absl::string_view text);
std::optional<double> ParsePythonFloat(absl::string_view text);

// Does the same as Python's bool(): empty texts, zeros, null and empty collections are false, all
// else is true.
bool IsPythonTrue(const nlohmann::json& value);
// Does the same as Python's ==, to which true is 1 and false is 0.
bool IsPythonEqual(const nlohmann::json& a, const nlohmann::json& b);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_PYTHON_VALUES_H_
