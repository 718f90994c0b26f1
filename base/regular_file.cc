#include "base/regular_file.h"

#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "base/file.h"

namespace muster {

absl::StatusOr<std::string> ReadRegularFile(const std::string& path, int64_t max_bytes) {
  struct stat info;
  // For missing files and for folders, ReadFile() has better messages.
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is a pipe or a device, not a file"));
  }
  return ReadFile(path, max_bytes);
}

}  // namespace muster
