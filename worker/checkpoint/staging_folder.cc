#include "worker/checkpoint/staging_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/owned_fd.h"

namespace muster {
namespace {

constexpr absl::string_view kDoomedDigits = "dead";

// Those who ask hold a shared lock for microseconds, unless they are interrupted then.
constexpr absl::Duration kAskersTakeAtMost = absl::Seconds(30);
constexpr int kMillisecondsBetweenAttempts = 1;

int OpenFolder(const std::string& path) {
  return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

// Whether the file system belongs to this machine alone: locks on others may be unknown here.
bool IsOfThisMachine(int fd) {
  struct statfs info;
  if (fstatfs(fd, &info) != 0) return false;
  switch (static_cast<unsigned long>(info.f_type)) {
    case EXT4_SUPER_MAGIC:
    case XFS_SUPER_MAGIC:
    case BTRFS_SUPER_MAGIC:
    case F2FS_SUPER_MAGIC:
    case OVERLAYFS_SUPER_MAGIC:
    case TMPFS_MAGIC:
    case RAMFS_MAGIC:
    case 0x2fc12fc1:  // ZFS
    case 0xca451a4e:  // bcachefs
      return true;
    default:
      return false;
  }
}

}  // namespace

bool HasMark(absl::string_view name, absl::string_view stem, absl::string_view mark) {
  if (!absl::ConsumePrefix(&name, stem) || !absl::ConsumePrefix(&name, mark)) return false;
  return name.size() == 16 && std::all_of(name.begin(), name.end(), absl::ascii_isxdigit);
}

absl::string_view StemOf(absl::string_view name, absl::string_view mark) {
  return name.substr(0, name.find(mark));
}

std::string NewStagingPath(absl::string_view dir) {
  std::string digits;
  do {
    digits = RandomHex();
  } while (absl::StartsWith(digits, kDoomedDigits));
  return absl::StrCat(dir, kStagingMark, digits);
}

std::string NewDoomedPath(absl::string_view dir) {
  return absl::StrCat(dir, kStagingMark, kDoomedDigits, RandomHex().substr(kDoomedDigits.size()));
}

bool IsDoomed(absl::string_view path) {
  const size_t mark = path.rfind(kStagingMark);
  return mark != absl::string_view::npos &&
         absl::StartsWith(path.substr(mark + kStagingMark.size()), kDoomedDigits);
}

int LockFolder(const std::string& path) {
  const int folder = OpenFolder(path);
  if (folder < 0) return -1;
  const Clock& clock = Clock::Real();
  for (const absl::Time end = clock.Now() + kAskersTakeAtMost; clock.Now() < end;) {
    if (flock(folder, LOCK_EX | LOCK_NB) == 0) return folder;
    // A writer's lock does not go with a shared one; that of somebody who asks does.
    if (errno != EWOULDBLOCK || flock(folder, LOCK_SH | LOCK_NB) != 0) break;
    flock(folder, LOCK_UN);  // others may be waiting here, too
    (void)poll(nullptr, 0, kMillisecondsBetweenAttempts);
  }
  close(folder);
  return -1;
}

FolderWriter WriterOf(const std::string& path) {
  const OwnedFd folder(OpenFolder(path));
  if (!folder.open()) return FolderWriter::kUnknown;
  if (flock(folder.get(), LOCK_SH | LOCK_NB) != 0) {
    return errno == EWOULDBLOCK ? FolderWriter::kAlive : FolderWriter::kUnknown;
  }
  flock(folder.get(), LOCK_UN);
  return IsOfThisMachine(folder.get()) ? FolderWriter::kGone : FolderWriter::kUnknown;
}

}  // namespace muster
