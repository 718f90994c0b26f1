#include "client/cli/backup_command.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/backoff.h"
#include "base/clock.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "client/cli/connection.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/backup.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

// Monotonic, because the wall clock may be set while the coordinator writes its snapshot.
absl::Time Now() { return Clock::Real().Now(); }

absl::Status Exists(const std::string& path) {
  return absl::AlreadyExistsError(
      absl::StrCat(path, " exists, and a backup does not replace files: choose a new name"));
}

// Gives a file its name, unless the name is taken.
absl::Status Publish(const std::string& from, const std::string& to) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0)
    return SyncDirectory(ParentPath(to));
  const int error = errno;
  if (error == EEXIST) return Exists(to);
  // The file system has no rename that replaces nothing.
  if (error == EINVAL && !PathExists(to) && rename(from.c_str(), to.c_str()) == 0)
    return SyncDirectory(ParentPath(to));
  return absl::ErrnoToStatus(error, absl::StrCat("cannot write '", to, "'"));
}

struct Written {
  uint64_t revision = 0;
  uint64_t bytes = 0;
};

// Copies the state of a coordinator into a file.
class Backup {
 public:
  // `deadline`: by Now().
  Backup(const Connection& connection, absl::Time deadline)
      : timeout_(connection.timeout),
        deadline_(deadline),
        admin_(v1::Admin::NewStub(connection.channel)),
        backup_(v1::Backup::NewStub(connection.channel)) {}

  // Writes a new snapshot to `path`. Begins again if newer snapshots have replaced it meanwhile.
  absl::StatusOr<Written> WriteTo(const std::string& path) {
    for (;;) {
      MUSTER_ASSIGN_OR_RETURN(const uint64_t revision, TakeSnapshot());
      bool replaced = false;
      const absl::StatusOr<Written> written = Copy(revision, path, &replaced);
      if (!replaced || Now() >= deadline_) return written;
    }
  }

 private:
  // Returns the revision of a new snapshot. The coordinator writes one at a time: waits for
  // another.
  absl::StatusOr<uint64_t> TakeSnapshot() {
    Backoff backoff(absl::Milliseconds(100), absl::Seconds(2));
    for (;;) {
      grpc::ClientContext call;
      rpc::SetTimeout(call, std::max(deadline_ - Now(), absl::Milliseconds(1)));
      v1::SnapshotReply reply;
      const absl::Status status =
          rpc::FromGrpc(admin_->Snapshot(&call, v1::SnapshotRequest(), &reply));
      if (status.ok()) return reply.revision();
      const absl::Duration wait = backoff.Next(RandomShare());
      if (rpc::GetReason(status) != v1::ERROR_REASON_OVERLOADED || Now() + wait > deadline_)
        return status;
      (void)poll(nullptr, 0, static_cast<int>(absl::ToInt64Milliseconds(wait)));
    }
  }

  // Sets `*replaced` if it failed because the snapshot no longer exists.
  absl::StatusOr<Written> Copy(uint64_t revision, const std::string& path, bool* replaced) {
    MUSTER_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path, 0600));
    Written written{.revision = revision};
    for (uint64_t offset = 0; offset == 0 || offset < written.bytes;) {
      v1::ReadBackupRequest request;
      request.set_revision(revision);
      request.set_offset(offset);
      v1::ReadBackupReply reply;
      grpc::ClientContext call;
      rpc::SetTimeout(call, timeout_);
      const absl::Status status = rpc::FromGrpc(backup_->Read(&call, request, &reply));
      *replaced = absl::IsNotFound(status);
      if (!status.ok()) return status;
      if (offset == 0) written.bytes = reply.bytes();
      if (reply.data().empty() || reply.bytes() != written.bytes) {
        return absl::AbortedError(
            "the coordinator was replaced while its backup was read: repeat the command");
      }
      MUSTER_RETURN_IF_ERROR(file.Append(reply.data()));
      offset += reply.data().size();
    }
    MUSTER_RETURN_IF_ERROR(file.Commit());
    return written;
  }

  const absl::Duration timeout_;
  const absl::Time deadline_;
  const std::unique_ptr<v1::Admin::Stub> admin_;
  const std::unique_ptr<v1::Backup::Stub> backup_;
};

}  // namespace

int RunBackupCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster backup",
      .summary = "Writes the state of a running coordinator to a file, while it serves.",
      .usage = "--out FILE [OPTIONS]",
      .details =
          "The file has mode 0600 and replaces none. muster-coordinator --verify FILE checks it; "
          "muster-coordinator\n--restore FILE --data_dir DIR puts it back, so that no term and no "
          "revision is used twice (docs/coordinator.md).\n"
          "Exit codes: 0 done; 2 wrong options, or the coordinator keeps nothing on disk; 4 the "
          "file "
          "exists; 5 it took too\nlong; 7 no coordinator answers; 8 it requires a token, or an "
          "admin's.",
      .options =
          ConnectionOptions({{.name = "out", .value_name = "FILE", .help = "The file to write"},
                             {.name = "within",
                              .value_name = "TIME",
                              .help = "How long it may take (default 10m)"}})};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const std::string path = line.Get("out");
  if (path.empty()) {
    return Fail(spec, context, absl::InvalidArgumentError("give the file to write: --out FILE"),
                kExitUsage);
  }
  absl::Duration within = absl::Minutes(10);
  if (line.Has("within") && (!absl::ParseDuration(line.Get("within"), &within) ||
                             within < absl::Seconds(1) || within > absl::Hours(24))) {
    return Fail(spec, context,
                absl::InvalidArgumentError(
                    absl::StrCat("--within ", line.Get("within"), ": write 30s or 10m")),
                kExitUsage);
  }
  // Checked before the coordinator does any work.
  if (PathExists(path)) return Fail(spec, context, Exists(path), kExitConflict);
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  const std::string part = absl::StrCat(path, ".", RandomHex(), ".part");
  const absl::StatusOr<Written> written = Backup(connection, Now() + within).WriteTo(part);
  absl::Status status = written.status();
  if (status.ok()) {
    status = Publish(part, path);
    if (!status.ok()) unlink(part.c_str());
  }
  if (!status.ok()) return FailCall(spec, context, status);
  context.out << path << ": revision " << written->revision << " of the coordinator at "
              << connection.address << ", " << HumanBytes(static_cast<int64_t>(written->bytes))
              << "\n";
  return kExitOk;
}

}  // namespace muster::client
