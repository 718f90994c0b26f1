#ifndef MUSTER_BASE_HOME_PATH_H_
#define MUSTER_BASE_HOME_PATH_H_

#include <string>

#include "absl/strings/string_view.h"

namespace muster {

// Whether a path begins in the user's home: "~" or "~/..." (not "~name", another user's).
bool BeginsAtHome(absl::string_view path);

// `path` with `home` in place of the "~" that it begins with; as it is where it begins elsewhere or
// `home` is empty.
std::string WithHome(absl::string_view path, absl::string_view home);

// With this process's home: $HOME or, without that, what the system has for the user. Blocks where
// it has to ask the system.
std::string WithHome(absl::string_view path);

}  // namespace muster

#endif  // MUSTER_BASE_HOME_PATH_H_
