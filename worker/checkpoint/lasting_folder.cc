#include "worker/checkpoint/lasting_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/checkpoint/read_error.h"

namespace muster {
namespace {

// Makes the names of the folder and of its parents durable, up to the mount point, no matter who
// created them. Skips those that this process may not read.
absl::Status SyncAncestors(const std::string& folder) {
  std::error_code error;
  std::string path = std::filesystem::canonical(folder, error).string();
  // This happens below a folder of another user, in which a program may have been started.
  if (error == std::errc::permission_denied) return absl::OkStatus();
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot examine ", folder));
  struct stat info, above;
  if (stat(path.c_str(), &info) != 0)
    return ReadError(errno, absl::StrCat("cannot examine ", path));
  while (path != "/") {
    path = ParentPath(path);
    if (stat(path.c_str(), &above) != 0 || above.st_dev != info.st_dev) break;
    if (const absl::Status synced = SyncDirectory(path);
        !synced.ok() && !absl::IsPermissionDenied(synced)) {
      return synced;
    }
  }
  return absl::OkStatus();
}

// Identifies one folder. A folder that is created again at the same path may have the same inode,
// but not both the inode and the creation time.
struct Identity {
  std::string path;
  uint64_t device = 0, inode = 0;
  int64_t seconds = 0;
  uint32_t nanoseconds = 0;

  bool operator==(const Identity&) const = default;
  template <class H>
  friend H AbslHashValue(H state, const Identity& one) {
    return H::combine(std::move(state), one.path, one.device, one.inode, one.seconds,
                      one.nanoseconds);
  }
};

// Returns nothing if the system does not report the creation time.
std::optional<Identity> Identify(const std::string& folder) {
  struct statx info = {};
  if (statx(AT_FDCWD, folder.c_str(), 0, STATX_INO | STATX_BTIME, &info) != 0 ||
      (info.stx_mask & STATX_BTIME) == 0) {
    return std::nullopt;
  }
  return Identity{.path = folder,
                  .device = makedev(info.stx_dev_major, info.stx_dev_minor),
                  .inode = info.stx_ino,
                  .seconds = info.stx_btime.tv_sec,
                  .nanoseconds = info.stx_btime.tv_nsec};
}

// The folders whose names this process has made durable.
class Lasting {
 public:
  static Lasting& Get() {
    static Lasting* const folders = new Lasting;
    return *folders;
  }
  bool Has(const Identity& folder) {
    const MutexLock guard(&mu_);
    return folders_.contains(folder);
  }
  void Add(const Identity& folder) {
    const MutexLock guard(&mu_);
    folders_.insert(folder);
  }

 private:
  Mutex mu_;
  absl::flat_hash_set<Identity> folders_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::Status MakeLastingFolder(const std::string& folder) {
  // Check whether it is new, because file systems take the time from a clock that stands still for
  // milliseconds.
  const bool is_new = !PathExists(folder);
  MUSTER_RETURN_IF_ERROR(MakeDirectories(folder));
  const std::optional<Identity> identity = Identify(folder);
  if (!is_new && identity.has_value() && Lasting::Get().Has(*identity)) return absl::OkStatus();
  MUSTER_RETURN_IF_ERROR(SyncAncestors(folder));
  if (identity.has_value()) Lasting::Get().Add(*identity);
  return absl::OkStatus();
}

}  // namespace muster
