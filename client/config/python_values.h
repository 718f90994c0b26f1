#ifndef MUSTER_CLIENT_CONFIG_PYTHON_VALUES_H_
#define MUSTER_CLIENT_CONFIG_PYTHON_VALUES_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/string_view.h"

namespace muster::client {

// Values as Accelerate, which is written in Python, takes them. Pure.

// A number as Python's int() and float() read it, and so Accelerate's flags and variables: blanks
// around it and an underscore between two digits are allowed. nullopt: none, or one that does not
// fit.
std::optional<int64_t> ParsePythonInt(absl::string_view text);
std::optional<double> ParsePythonFloat(absl::string_view text);

// As Python's bool(): empty texts, zeros, null and what has no entries are false, all else is true.
bool IsPythonTrue(const nlohmann::json& value);
// As Python's ==, to which true is 1 and false is 0.
bool IsPythonEqual(const nlohmann::json& a, const nlohmann::json& b);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_PYTHON_VALUES_H_
