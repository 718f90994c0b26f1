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
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster::agent {
namespace {

constexpr size_t kMaxLaunch = 256;

// Whether `name` is `prefix` and a number.
bool IsNumbered(absl::string_view name, absl::string_view prefix, int64_t* number) {
  return absl::ConsumePrefix(&name, prefix) && absl::SimpleAtoi(name, number) && *number >= 0;
}

// Moves folders of attempts into a new folder. Returns that folder; "" if there were none.
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

// Never replaced by another file, so that over NFS the holder of its lock reads its current
// contents.
absl::StatusOr<OwnedFd> OpenLock(const std::string& path) {
  OwnedFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!file.open()) return absl::ErrnoToStatus(errno, path);
  return file;
}

// Takes the lock. Returns false if, with LOCK_NB, another process has it.
absl::StatusOr<bool> Lock(const OwnedFd& file, int operation, const std::string& path) {
  while (flock(file.get(), operation) != 0) {
    if (errno == EINTR) continue;
    if (errno == EWOULDBLOCK) return false;
    return absl::UnimplementedError(absl::ErrnoToStatus(errno, path).message());
  }
  return true;
}

// Describes the holder of the lock for users whom it blocks: it may be a machine that has died.
std::string DescribeHolder() {
  return absl::StrCat("process ", getpid(), " on ", HostName(), " since ",
                      absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone()),
                      "\n");
}

// Returns the first of the holders that the lock's file names, and their number.
std::string Holders(const std::string& path) {
  constexpr int64_t kMost = 1 << 20;
  const std::string text = ReadFile(path, kMost).value_or("");
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  if (lines.empty()) return "";
  const std::string more = lines.size() > 1 ? absl::StrCat(" and ", lines.size() - 1, " more") : "";
  return absl::StrCat(" (", Printable(lines[0]), more, ")");
}

}  // namespace

absl::StatusOr<LogFolder> BeginLogFolder(const std::string& folder, const std::string& launch) {
  MUSTER_RETURN_IF_ERROR(MakeDirectories(folder));
  LogFolder begun;
  if (launch.empty()) return begun;
  const std::string path = JoinPath(folder, ".launch"), runs = JoinPath(folder, ".runs");
  MUSTER_ASSIGN_OR_RETURN(const OwnedFd file, OpenLock(path));
  MUSTER_RETURN_IF_ERROR(Lock(file, LOCK_EX, path).status());
  MUSTER_ASSIGN_OR_RETURN(begun.runs, OpenLock(runs));
  std::string found(kMaxLaunch, '\0');
  const ssize_t size = pread(file.get(), found.data(), found.size(), 0);
  if (size < 0) return absl::ErrnoToStatus(errno, path);
  found.resize(static_cast<size_t>(size));
  if (found != launch) {
    MUSTER_ASSIGN_OR_RETURN(const bool none_runs, Lock(begun.runs, LOCK_EX | LOCK_NB, runs));
    if (!none_runs) {
      return absl::AlreadyExistsError(absl::StrCat(
          folder, " has the logs of another launch that still runs", Holders(runs),
          ": give this one a log_dir of its own, or remove ", runs,
          " if that launch has ended (a file server may keep the lock of a machine that died)"));
    }
    if (ftruncate(begun.runs.get(), 0) != 0) return absl::ErrnoToStatus(errno, runs);
    MUSTER_ASSIGN_OR_RETURN(begun.before, MoveAside(folder));
    // Afterwards: if this fails, the next launch moves what is left.
    if (ftruncate(file.get(), 0) != 0 || pwrite(file.get(), launch.data(), launch.size(), 0) !=
                                             static_cast<ssize_t>(launch.size())) {
      return absl::ErrnoToStatus(errno, path);
    }
  }
  // Does not block: only the holder of the lock on `file` asks for this one exclusively.
  if (!Lock(begun.runs, LOCK_SH, runs).ok()) {
    // Everything is moved; only, others do not learn that this launch runs.
    begun.runs = OwnedFd();
    return begun;
  }
  // The launch works even if its name cannot be written.
  const std::string holder = DescribeHolder();
  struct stat now = {};
  if (fstat(begun.runs.get(), &now) != 0 ||
      pwrite(begun.runs.get(), holder.data(), holder.size(), now.st_size) < 0) {
    MUSTER_LOG(Debug) << "cannot write " << runs << ": "
                      << absl::ErrnoToStatus(errno, "write").message();
  }
  return begun;
}

}  // namespace muster::agent
