#include "worker/checkpoint/lasting_folder.h"

#include <errno.h>
#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
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

// Makes the name of the folder itself durable, and those of the folders that it is in, up to where
// its file system begins, whoever has made them. Leaves out those that this process may not read.
absl::Status SyncAncestors(const std::string& folder) {
  std::error_code error;
  std::string path = std::filesystem::canonical(folder, error).string();
  // Below a folder of another user, in which a program may have been started.
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

// The folders that this process has made last. A folder that is made anew may have the inode of the
// one before, or its path.
class MadeLast {
 public:
  static MadeLast& Get() {
    static MadeLast* const folders = new MadeLast;
    return *folders;
  }
  bool Has(const std::string& path, uint64_t inode) {
    const MutexLock guard(&mu_);
    return folders_.contains({path, inode});
  }
  void Add(const std::string& path, uint64_t inode) {
    const MutexLock guard(&mu_);
    folders_.emplace(path, inode);
  }

 private:
  Mutex mu_;
  absl::flat_hash_set<std::pair<std::string, uint64_t>> folders_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::Status MakeLastingFolder(const std::string& folder) {
  MUSTER_RETURN_IF_ERROR(MakeDirectories(folder));
  struct stat info;
  if (stat(folder.c_str(), &info) != 0 || MadeLast::Get().Has(folder, info.st_ino)) {
    return absl::OkStatus();
  }
  MUSTER_RETURN_IF_ERROR(SyncAncestors(folder));
  MadeLast::Get().Add(folder, info.st_ino);
  return absl::OkStatus();
}

}  // namespace muster
