#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/identity.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"

namespace muster {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path) {
  const int error = errno;
  const absl::Status status = absl::ErrnoToStatus(error, absl::StrCat("cannot ", what, " ", path));
  // A device or server that is gone, or that refuses a call. Abseil has NOT_FOUND for the first
  // three, as for a file that does not exist, and FAILED_PRECONDITION and UNIMPLEMENTED for the
  // others.
  const bool is_gone = error == ENODEV || error == ENXIO || error == ENOMEDIUM ||
                       error == ENOTCONN || error == ESHUTDOWN || error == EOPNOTSUPP ||
                       error == ENOSYS;
  return is_gone ? absl::UnavailableError(status.message()) : status;
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  const OwnedFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return Failed("open", path);
  struct stat info;
  if (fstat(file.get(), &info) != 0) return Failed("examine", path);
  if (S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat("cannot read ", path, ": it is a folder"));
  }
  std::string contents;
  if (info.st_size > 0 && info.st_size <= max_bytes) contents.reserve(info.st_size);
  char buffer[1 << 16];
  while (true) {
    const ssize_t n = read(file.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Failed("read", path);
    if (n == 0) return contents;
    contents.append(buffer, n);
    if (static_cast<int64_t>(contents.size()) > max_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat(path, " is larger than the ", max_bytes, " bytes allowed here"));
    }
  }
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view contents) {
  MUSTER_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path));
  MUSTER_RETURN_IF_ERROR(file.Append(contents));
  return file.Commit();
}

absl::Status MakeDirectories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot make folder ", path));
  }
  if (!std::filesystem::is_directory(path, error)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " exists and is not a folder"));
  }
  return absl::OkStatus();
}

absl::Status SyncDirectory(const std::string& path) {
  const OwnedFd folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) return Failed("open folder", path);
  // Some network file systems cannot sync a folder and return EINVAL: nothing better can be done
  // there.
  if (TEMP_FAILURE_RETRY(fsync(folder.get())) != 0 && errno != EINVAL) {
    return Failed("sync folder", path);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) {
  DIR* const folder = opendir(path.c_str());
  if (folder == nullptr) return Failed("list folder", path);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* const entry = readdir(folder)) {
    const absl::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  // At the end of the folder there is no error.
  const absl::Status ended = errno == 0 ? absl::OkStatus() : Failed("list folder", path);
  closedir(folder);
  MUSTER_RETURN_IF_ERROR(ended);
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status RemoveTree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot remove ", path));
  return absl::OkStatus();
}

bool PathExists(const std::string& path) {
  struct stat info;
  return lstat(path.c_str(), &info) == 0;
}

bool IsFolder(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

std::string JoinPath(absl::string_view folder, absl::string_view name) {
  if (folder.empty() || absl::StartsWith(name, "/")) return std::string(name);
  if (absl::EndsWith(folder, "/")) return absl::StrCat(folder, name);
  return absl::StrCat(folder, "/", name);
}

std::string ParentPath(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos) return ".";
  return slash == 0 ? "/" : std::string(path.substr(0, slash));
}

std::string BaseName(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos || path == "/") return std::string(path);
  return std::string(path.substr(slash + 1));
}

std::string RandomHex() { return absl::StrFormat("%016x", RandomId()); }

absl::StatusOr<AtomicFile> AtomicFile::Create(const std::string& path, mode_t mode) {
  std::string temporary = absl::StrCat(path, ".tmp-", RandomHex());
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (fd < 0) return Failed("create", path);
  return AtomicFile(fd, path, std::move(temporary));
}

AtomicFile::AtomicFile(int fd, std::string path, std::string temporary)
    : fd_(fd), path_(std::move(path)), temporary_(std::move(temporary)) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)) {
  other.temporary_.clear();
}

AtomicFile& AtomicFile::operator=(AtomicFile&& other) noexcept {
  if (this == &other) return *this;
  Discard();
  fd_ = std::exchange(other.fd_, -1);
  path_ = std::move(other.path_);
  temporary_ = std::move(other.temporary_);
  other.temporary_.clear();
  return *this;
}

AtomicFile::~AtomicFile() { Discard(); }

void AtomicFile::Discard() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
  if (!temporary_.empty()) unlink(temporary_.c_str());
  temporary_.clear();
}

absl::Status AtomicFile::Append(absl::string_view bytes) {
  while (!bytes.empty()) {
    // The kernel takes at most 2 GiB less a page in one call.
    const ssize_t n = write(fd_, bytes.data(), std::min(bytes.size(), size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Failed("write", path_);
    bytes.remove_prefix(n);
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::Sync() {
  if (TEMP_FAILURE_RETRY(fdatasync(fd_)) != 0) return Failed("sync", path_);
  return absl::OkStatus();
}

absl::Status AtomicFile::Commit() {
  if (TEMP_FAILURE_RETRY(fsync(fd_)) != 0) return Failed("sync", path_);
  MUSTER_RETURN_IF_ERROR(Publish());
  return SyncDirectory(ParentPath(path_));
}

absl::Status AtomicFile::Publish() {
  if (close(std::exchange(fd_, -1)) != 0) return Failed("close", path_);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return Failed("publish", path_);
  temporary_.clear();
  return absl::OkStatus();
}

}  // namespace muster
