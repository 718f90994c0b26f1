#include "base/file_identity.h"

#include "absl/strings/str_cat.h"

namespace muster {

std::string FileIdentityOf(const struct stat& info) {
  return absl::StrCat(info.st_dev, ":", info.st_ino);
}

std::optional<std::string> FileIdentityAt(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return std::nullopt;
  return FileIdentityOf(info);
}

bool RetryUntilUnchanged(absl::FunctionRef<bool()> look) {
  constexpr int kLooks = 3;
  for (int looks = 1; looks <= kLooks; ++looks) {
    if (look()) return true;
  }
  return false;
}

}  // namespace muster
