#include "base/home_path.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace muster {
namespace {

std::string Home() {
  const char* const variable = std::getenv("HOME");
  if (variable != nullptr && *variable != '\0') return variable;
  std::vector<char> buffer(16 << 10);
  struct passwd entry;
  struct passwd* found = nullptr;
  const int error = getpwuid_r(getuid(), &entry, buffer.data(), buffer.size(), &found);
  return error == 0 && found != nullptr && found->pw_dir != nullptr ? found->pw_dir : "";
}

}  // namespace

bool BeginsAtHome(absl::string_view path) { return path == "~" || absl::StartsWith(path, "~/"); }

std::string WithHome(absl::string_view path, absl::string_view home) {
  if (!BeginsAtHome(path) || home.empty()) return std::string(path);
  return absl::StrCat(home, path.substr(1));
}

std::string WithHome(absl::string_view path) {
  return BeginsAtHome(path) ? WithHome(path, Home()) : std::string(path);
}

}  // namespace muster
