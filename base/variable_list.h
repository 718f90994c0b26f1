#ifndef MUSTER_BASE_VARIABLE_LIST_H_
#define MUSTER_BASE_VARIABLE_LIST_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// Returns the environment variables of this process. Of a name that occurs twice the first value
// counts, as for getenv(); entries without "=" are left out. Not thread-safe beside setenv().
std::map<std::string, std::string> ProcessVariables();

// The following functions have environment variables as one text: NAME=VALUE, each with a null byte
// at its end, as `env -0` prints them. Both are pure and thread-safe.

// Neither names nor values may contain a null byte; no environment has one.
std::string VariableList(const std::map<std::string, std::string>& variables);

// If a name occurs more than once, its last value counts. INVALID_ARGUMENT, with `source` in its
// message: an entry is not NAME=VALUE.
absl::StatusOr<std::map<std::string, std::string>> ParseVariableList(absl::string_view text,
                                                                     absl::string_view source);

}  // namespace muster

#endif  // MUSTER_BASE_VARIABLE_LIST_H_
