#include "worker/checkpoint/staging_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/text.h"
#include "worker/checkpoint/read_error.h"

namespace muster {
namespace {

constexpr absl::string_view kDoomedDigits = "dead";

constexpr int kMillisecondsBetweenAttempts = 1;

// Attempts to create a folder that no other process has locked.
constexpr int kAttempts = 100;

std::atomic<int64_t> patience_ms = 10'000;

struct HeldInPlace {
  Mutex mu;
  std::vector<OwnedFd> locks ABSL_GUARDED_BY(mu);
};
HeldInPlace& Held() {
  static HeldInPlace* const held = new HeldInPlace;
  return *held;
}

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

// Returns false, with errno, if processes that share the lock keep it for longer than `shared`, or
// a writer for longer than `exclusive`.
bool LockWithin(int folder, absl::Duration shared, absl::Duration exclusive) {
  const Clock& clock = Clock::Real();
  const absl::Time start = clock.Now();
  while (flock(folder, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return false;
    // A writer's lock excludes a shared one; the lock of a process that only checks does not.
    const bool is_shared = flock(folder, LOCK_SH | LOCK_NB) == 0;
    if (is_shared) flock(folder, LOCK_UN);  // other processes may be trying this, too
    if (clock.Now() - start >= (is_shared ? shared : exclusive)) {
      errno = EWOULDBLOCK;
      return false;
    }
    (void)poll(nullptr, 0, kMillisecondsBetweenAttempts);
  }
  return true;
}

// Whether the process has the folder of `info` open. Absent: this process may not look.
std::optional<bool> HasOpen(int pid, const struct stat& info) {
  const std::string files = absl::StrCat("/proc/", pid, "/fd");
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(files);
  if (!names.ok() && !absl::IsNotFound(names.status())) return std::nullopt;
  for (const std::string& name : names.value_or(std::vector<std::string>())) {
    struct stat other;
    if (stat(JoinPath(files, name).c_str(), &other) == 0 && other.st_ino == info.st_ino &&
        other.st_dev == info.st_dev) {
      return true;
    }
  }
  return false;
}

// Returns when the folder, or a file in it, was last changed; absent if that cannot be read.
std::optional<absl::Time> LastChange(const std::string& dir) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(dir);
  if (!names.ok()) return std::nullopt;
  absl::Time last = absl::InfinitePast();
  std::vector<std::string> paths = {dir};
  for (const std::string& name : *names) paths.push_back(JoinPath(dir, name));
  for (const std::string& path : paths) {
    struct stat info;
    if (lstat(path.c_str(), &info) != 0) return std::nullopt;
    // Moving a folder changes its ctime.
    last = std::max(
        {last, absl::TimeFromTimespec(info.st_mtim), absl::TimeFromTimespec(info.st_ctim)});
  }
  return last;
}

// The process that has the folder locked as its writer, according to the kernel's table.
struct Writer {
  int pid = 0;             // 0: the table shows none
  bool has_ended = false;  // it has left the lock to a child
};
Writer WriterIn(int folder) {
  struct stat info;
  if (fstat(folder, &info) != 0) return {};
  const absl::StatusOr<std::string> table = ReadFile("/proc/locks");
  // 3: FLOCK  ADVISORY  WRITE 4711 08:02:393232 0 EOF
  for (const absl::string_view line : absl::StrSplit(table.value_or(""), '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    unsigned device_major = 0, device_minor = 0;
    unsigned long inode = 0;
    int pid = 0;
    if (words.size() < 6 || words[1] != "FLOCK" || words[3] != "WRITE" ||
        !absl::SimpleAtoi(words[4], &pid) || pid <= 0 ||
        sscanf(words[5].c_str(), "%x:%x:%lu", &device_major, &device_minor, &inode) != 3) {
      continue;
    }
    if (inode != info.st_ino) continue;
    const std::optional<bool> has_open = HasOpen(pid, info);
    // Btrfs uses other numbers there.
    const bool same = device_major == major(info.st_dev) && device_minor == minor(info.st_dev);
    if (same || has_open == true) return {.pid = pid, .has_ended = has_open == false};
  }
  return {};
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

int LockFolder(const std::string& path, absl::Duration shared) {
  const int folder = OpenFolder(path);
  if (folder < 0) return -1;
  if (LockWithin(folder, shared, absl::ZeroDuration())) return folder;
  close(folder);
  return -1;
}

absl::StatusOr<int> LockFolderPatiently(const std::string& path) {
  OwnedFd folder(OpenFolder(path));
  if (!folder.open()) return ReadError(errno, absl::StrCat("cannot open ", path));
  const absl::Duration patience = absl::Milliseconds(patience_ms.load());
  if (LockWithin(folder.get(), patience, patience)) {
    // The duplicated descriptor holds the lock, too.
    return fcntl(folder.get(), F_DUPFD_CLOEXEC, 0);
  }
  if (errno == EWOULDBLOCK && flock(folder.get(), LOCK_SH | LOCK_NB) != 0) {
    return absl::AbortedError(
        absl::StrCat(path, ": ", LockHolderOf(path),
                     " has it locked and does not finish with it: wait for that ",
                     "process, or end it, and start again, or name another checkpoint"));
  }
  return -1;
}

std::string LockHolderOf(const std::string& path) {
  const OwnedFd folder(OpenFolder(path));
  const Writer writer = folder.open() ? WriterIn(folder.get()) : Writer();
  const int pid = writer.pid;
  if (pid == 0 && folder.open() && flock(folder.get(), LOCK_SH | LOCK_NB) == 0) {
    return "a process that loads from there";
  }
  if (pid == 0) return "a process that this machine does not show";
  // The table names the process that took the lock.
  if (writer.has_ended) return absl::StrCat("a child of process ", pid, ", which has ended");
  const absl::StatusOr<std::string> name = ReadFile(absl::StrCat("/proc/", pid, "/comm"));
  char host[256] = "";
  (void)gethostname(host, sizeof(host) - 1);
  return absl::StrCat(
      "process ", pid,
      name.ok() ? absl::StrCat(" (", Printable(absl::StripTrailingAsciiWhitespace(*name)), ")")
                : "",
      " on ", host);
}

absl::Duration SetLockPatience(absl::Duration patience) {
  return absl::Milliseconds(patience_ms.exchange(absl::ToInt64Milliseconds(patience)));
}

void ShareLock(int lock) { (void)flock(lock, LOCK_SH | LOCK_NB); }

bool UnshareLock(int lock) {
  if (flock(lock, LOCK_EX | LOCK_NB) == 0) return true;
  ShareLock(lock);  // the system has released it
  return false;
}

bool HoldInPlace(const std::string& path) {
  OwnedFd folder(OpenFolder(path));
  // Opening the files in it reports why.
  if (!folder.open()) return true;
  // If the file system has no locks, no other process has one.
  if (flock(folder.get(), LOCK_SH | LOCK_NB) != 0) return errno != EWOULDBLOCK;
  HeldInPlace& held = Held();
  const MutexLock lock(&held.mu);
  held.locks.push_back(std::move(folder));
  return true;
}

void ReleaseInPlace() {
  HeldInPlace& held = Held();
  const MutexLock lock(&held.mu);
  held.locks.clear();
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

bool MayHaveDistantWriter(const std::string& path) {
  if (IsDoomed(path) || WriterOf(path) == FolderWriter::kGone) return false;
  const std::optional<absl::Time> last = LastChange(path);
  return !last.has_value() || absl::Now() - *last < kQuietTime;
}

absl::StatusOr<WriterFolder> MakeWriterFolder(absl::FunctionRef<std::string()> new_path) {
  std::string path;
  for (int i = 0; i < kAttempts; ++i) {
    path = new_path();
    if (mkdir(path.c_str(), 0777) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot make folder ", path));
    }
    const int lock = LockFolder(path);
    // Another process may take it for abandoned, and remove it, before it is locked.
    const bool taken = lock < 0 && WriterOf(path) == FolderWriter::kAlive;
    if (!taken && PathExists(path)) return WriterFolder{.path = std::move(path), .lock = lock};
    if (lock >= 0) close(lock);
  }
  return absl::UnavailableError(
      absl::StrCat("other processes remove ", path, " and folders like it before they are locked"));
}

}  // namespace muster
