#include "worker/checkpoint/removal.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace muster {
namespace {

struct Entry {
  bool is_folder = false;
  uint64_t device = 0;
  std::optional<bool> is_mount;  // absent: the kernel does not report it
};

// Returns NOT_FOUND if there is nothing. Other errors say that it cannot be removed.
absl::StatusOr<Entry> Examine(const std::string& path) {
  struct statx info = {};
  const bool seen = statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_TYPE, &info) == 0;
  // Old profiles of containers refuse statx() with these errors, which have no other cause.
  if (struct stat old;
      !seen && (errno == EPERM || errno == ENOSYS) && lstat(path.c_str(), &old) == 0) {
    return Entry{.is_folder = S_ISDIR(old.st_mode), .device = old.st_dev, .is_mount = std::nullopt};
  }
  if (!seen) {
    return absl::ErrnoToStatus(errno, absl::StrCat("what is in ", path, " cannot be removed"));
  }
  Entry entry = {.is_folder = S_ISDIR(info.stx_mode),
                 .device = makedev(info.stx_dev_major, info.stx_dev_minor),
                 .is_mount = std::nullopt};
  if ((info.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0) {
    entry.is_mount = (info.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
  }
  return entry;
}

// `above`: the device of the parent folder.
absl::Status CheckNoMount(const std::string& path, const Entry& entry, uint64_t above) {
  // If the kernel does not report mount points, compare devices, but only of folders: files of one
  // overlay may be on several file systems.
  if (!entry.is_mount.value_or(entry.is_folder && entry.device != above)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(path, " is a mount point, whose contents would go with it: unmount it first"));
}

// `permitted`: whether to check the rights to its folders, too.
absl::Status CheckBelow(const std::string& dir, uint64_t device, bool permitted) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(dir);
  if (absl::IsNotFound(names.status())) return absl::OkStatus();
  MUSTER_RETURN_IF_ERROR(names.status());
  if (permitted && !names->empty() &&
      faccessat(AT_FDCWD, dir.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("what is in ", dir, " cannot be removed"));
  }
  for (const std::string& name : *names) {
    const std::string path = JoinPath(dir, name);
    const absl::StatusOr<Entry> entry = Examine(path);
    if (absl::IsNotFound(entry.status())) continue;
    MUSTER_RETURN_IF_ERROR(entry.status());
    MUSTER_RETURN_IF_ERROR(CheckNoMount(path, *entry, device));
    if (entry->is_folder) MUSTER_RETURN_IF_ERROR(CheckBelow(path, entry->device, permitted));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRemovable(const std::string& dir) {
  MUSTER_ASSIGN_OR_RETURN(const Entry entry, Examine(dir));
  return CheckBelow(dir, entry.device, /*permitted=*/true);
}

absl::Status RemoveCheckpointTree(const std::string& path) {
  const absl::Status unmounted = [&]() -> absl::Status {
    MUSTER_ASSIGN_OR_RETURN(const Entry entry, Examine(path));
    // Files and links have nothing below them.
    if (!entry.is_folder) return absl::OkStatus();
    MUSTER_RETURN_IF_ERROR(CheckNoMount(path, entry, entry.device));
    return CheckBelow(path, entry.device, /*permitted=*/false);
  }();
  if (absl::IsNotFound(unmounted)) return absl::OkStatus();
  if (!unmounted.ok()) {
    return absl::Status(unmounted.code(),
                        absl::StrCat("cannot remove ", path, ": ", unmounted.message()));
  }
  return RemoveTree(path);
}

}  // namespace muster
