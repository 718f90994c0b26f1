#include "agent/log_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"

namespace muster::agent {
namespace {

constexpr size_t kMaxLaunch = 256;

// Whether `name` is `prefix` and a number.
bool IsNumbered(absl::string_view name, absl::string_view prefix, int64_t* number) {
  return absl::ConsumePrefix(&name, prefix) && absl::SimpleAtoi(name, number) && *number >= 0;
}

// Moves folders of attempts into a new folder. Returns that folder; "": there are none.
absl::StatusOr<std::string> MoveAside(const std::string& folder) {
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(folder));
  std::vector<std::string> attempts;
  int64_t last = 0, number = 0;
  for (const std::string& name : names) {
    if (IsNumbered(name, "attempt_", &number)) attempts.push_back(name);
    if (IsNumbered(name, "before_", &number)) last = std::max(last, number);
  }
  if (attempts.empty()) return "";
  const std::string before = JoinPath(folder, absl::StrCat("before_", last + 1));
  if (mkdir(before.c_str(), 0777) != 0) return absl::ErrnoToStatus(errno, before);
  for (const std::string& name : attempts) {
    const std::string from = JoinPath(folder, name);
    if (rename(from.c_str(), JoinPath(before, name).c_str()) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot move ", from, " to ", before));
    }
  }
  return before;
}

}  // namespace

absl::StatusOr<std::string> BeginLogFolder(const std::string& folder, const std::string& launch) {
  MUSTER_RETURN_IF_ERROR(MakeDirectories(folder));
  if (launch.empty()) return "";
  const std::string path = JoinPath(folder, ".launch");
  // Never replaced by another file, so that over NFS the holder of its lock reads its current
  // contents.
  const OwnedFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!file.open()) return absl::ErrnoToStatus(errno, path);
  while (flock(file.get(), LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    return absl::UnimplementedError(absl::ErrnoToStatus(errno, path).message());
  }
  std::string found(kMaxLaunch, '\0');
  const ssize_t size = pread(file.get(), found.data(), found.size(), 0);
  if (size < 0) return absl::ErrnoToStatus(errno, path);
  found.resize(static_cast<size_t>(size));
  if (found == launch) return "";
  MUSTER_ASSIGN_OR_RETURN(std::string before, MoveAside(folder));
  // After: where this fails, the next launch moves what is left.
  if (ftruncate(file.get(), 0) != 0 ||
      pwrite(file.get(), launch.data(), launch.size(), 0) != static_cast<ssize_t>(launch.size())) {
    return absl::ErrnoToStatus(errno, path);
  }
  return before;
}

}  // namespace muster::agent
