#include "agent/attempt_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "base/variable_list.h"

namespace muster::agent {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
}

// Syncs only this file, because the folder has others, such as logs, that need not be durable.
absl::Status SyncRecord(const std::string& path) {
  const OwnedFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.open()) return Failed("open", path);
  return TEMP_FAILURE_RETRY(fsync(fd.get())) == 0 ? absl::OkStatus() : Failed("sync", path);
}

}  // namespace

absl::Status PutFile(const std::string& path, absl::string_view contents, mode_t mode) {
  MUSTER_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path, mode));
  MUSTER_RETURN_IF_ERROR(file.Append(contents));
  return file.Publish();
}

absl::Status PutVariables(const std::string& path,
                          const std::map<std::string, std::string>& variables) {
  return PutFile(path, VariableList(variables), 0600);
}

absl::StatusOr<std::map<std::string, std::string>> TakeVariables(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  unlink(path.c_str());
  return ParseVariableList(text, path);
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
