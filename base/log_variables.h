#ifndef MUSTER_BASE_LOG_VARIABLES_H_
#define MUSTER_BASE_LOG_VARIABLES_H_

#include <map>
#include <string>

#include "absl/status/status.h"

namespace muster {

// The log reads MUSTER_LOG_LEVEL and MUSTER_LOG_FORMAT by itself, and writes at its defaults where
// they are neither level nor format: programs call this at their start. Empty counts as not set.
// Errors: INVALID_ARGUMENT names the variable and what it may be.
absl::Status CheckLogVariables(const std::map<std::string, std::string>& variables);

}  // namespace muster

#endif  // MUSTER_BASE_LOG_VARIABLES_H_
