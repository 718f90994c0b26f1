#ifndef MUSTER_BASE_LOG_VARIABLES_H_
#define MUSTER_BASE_LOG_VARIABLES_H_

#include <map>
#include <string>

#include "absl/status/status.h"

namespace muster {

// Checks the variables of the log, for programs at their start: the log itself reads
// MUSTER_LOG_LEVEL and MUSTER_LOG_FORMAT, but silently uses its defaults if they are invalid. Empty
// counts as not set. Errors: INVALID_ARGUMENT names the variable and the values that it may have.
absl::Status CheckLogVariables(const std::map<std::string, std::string>& variables);

}  // namespace muster

#endif  // MUSTER_BASE_LOG_VARIABLES_H_
