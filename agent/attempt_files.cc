#include "agent/attempt_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/owned_fd.h"

namespace muster::agent {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
}

absl::Status WriteAll(int fd, absl::string_view contents, const std::string& path) {
  while (!contents.empty()) {
    const ssize_t n = write(fd, contents.data(), contents.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Failed("write", path);
    contents.remove_prefix(n);
  }
  return absl::OkStatus();
}

// The folder has other files, such as logs, that nobody waits for.
absl::Status SyncRecord(const std::string& path) {
  const OwnedFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.open()) return Failed("open", path);
  return fsync(fd.get()) == 0 ? absl::OkStatus() : Failed("sync", path);
}

}  // namespace

absl::Status PutFile(const std::string& path, absl::string_view contents, mode_t mode) {
  const std::string temporary = absl::StrCat(path, ".tmp-", RandomHex());
  const OwnedFd fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (!fd.open()) return Failed("create", path);
  absl::Status status = WriteAll(fd.get(), contents, path);
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) {
    status = Failed("publish", path);
  }
  if (!status.ok()) unlink(temporary.c_str());
  return status;
}

absl::Status SyncAttempt(const std::string& folder) {
  absl::Status status = SyncRecord(JoinPath(folder, "record.json"));
  if (status.ok()) status = SyncDirectory(folder);
  if (status.ok()) status = SyncDirectory(ParentPath(folder));
  if (status.ok()) return status;
  return absl::InternalError(
      absl::StrCat("the record of the attempt may not be on the disk: ", status.message()));
}

AttemptSync::AttemptSync(std::string folder)
    : folder_(std::move(folder)), thread_([this] {
        status_ = SyncAttempt(folder_);
        done_.Notify();
      }) {}

AttemptSync::~AttemptSync() { thread_.join(); }

absl::Status AttemptSync::Wait() {
  done_.WaitForNotification();
  return status_;
}

}  // namespace muster::agent
