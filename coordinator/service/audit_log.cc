#include "coordinator/service/audit_log.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "coordinator/errors.h"
#include "rpc/log_level.h"

namespace muster::coordinator {
namespace {

constexpr size_t kMaxText = 256;  // of what callers send

std::string Text(absl::string_view text) { return Cut(OneLine(Cut(text, kMaxText)), kMaxText); }

}  // namespace

absl::StatusOr<std::unique_ptr<AuditLog>> AuditLog::Open(const std::string& path,
                                                         const Clock* clock) {
  std::unique_ptr<AuditLog> log(new AuditLog(path, clock));
  MutexLock lock(&log->mu_);
  MUSTER_RETURN_IF_ERROR(log->Reopen());
  return log;
}

absl::Status AuditLog::Reopen() {
  struct stat here {
  }, there{};
  if (file_.open() && fstat(file_.get(), &here) == 0 && stat(path_.c_str(), &there) == 0 &&
      here.st_ino == there.st_ino && here.st_dev == there.st_dev) {
    return absl::OkStatus();
  }
  // A pipe without a reader must not stop the coordinator.
  OwnedFd file(open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600));
  if (!file.open()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("audit_log: cannot open '", path_, "'"));
  }
  file_ = std::move(file);
  return absl::OkStatus();
}

AuditLog::Entry AuditLog::Begin(const Identity* who, absl::string_view from, const v1::Op& op) {
  Entry entry;
  if (who != nullptr) {
    entry.user = who->role == Role::kAttempt ? absl::StrCat("attempt ", who->group) : who->name;
    entry.role = std::string(RoleName(who->role));
  }
  entry.from = std::string(from);
  entry.call = std::string(NameOf(op));
  entry.job = Text(JobOf(op));
  switch (op.kind_case()) {
    case v1::Op::kSubmitJob:
      entry.name = Text(op.submit_job().spec().name());
      if (op.submit_job().dry_run()) entry.action = "dry_run";
      break;
    case v1::Op::kControlJob:
      entry.action = v1::JobAction_Name(op.control_job().action());
      break;
    case v1::Op::kControlNode:
      entry.node = Text(op.control_node().node());
      entry.action = v1::NodeAction_Name(op.control_node().action());
      if (op.control_node().action() == v1::NODE_ACTION_LOG_LEVEL) {
        entry.name = rpc::LogLevelName(static_cast<v1::LogLevel>(op.control_node().log_level()));
        if (op.control_node().has_for_()) {
          absl::StrAppend(&entry.name, " for ",
                          absl::FormatDuration(FromProto(op.control_node().for_())));
        }
      }
      break;
    case v1::Op::kRaiseTrigger:
      entry.name = Text(op.raise_trigger().name());
      break;
    case v1::Op::kQuarantine:
      entry.node = Text(op.quarantine().host());
      break;
    default:
      break;
  }
  return entry;
}

void AuditLog::End(const Entry& entry, const Answer& answer) {
  if (answer.kind() != v1::OpResult::KIND_NOT_SET) {
    if (entry.call != "submit_job") return Append(entry, "OK", "");
    Entry submitted = entry;
    submitted.job = answer.Parse().submit_job().job().job_id();
    return Append(submitted, "OK", "");
  }
  const v1::OpResult result = answer.Parse();
  Append(entry, absl::StatusCodeToString(static_cast<absl::StatusCode>(result.error().code())),
         result.error().message());
}

void AuditLog::Done(const Identity* who, absl::string_view from, absl::string_view what) {
  Entry entry = Begin(who, from, {});
  entry.call = Text(what);
  Append(entry, "OK", "");
}

void AuditLog::Refused(const Identity& who, absl::string_view from, absl::string_view what) {
  Entry entry = Begin(&who, from, {});
  entry.call = Text(what);
  Append(entry, absl::StatusCodeToString(absl::StatusCode::kPermissionDenied), "");
}

void AuditLog::Append(const Entry& entry, absl::string_view result, absl::string_view error) {
  nlohmann::ordered_json line = {
      {"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", clock_.WallNow(), absl::UTCTimeZone())}};
  const std::pair<const char*, absl::string_view> fields[] = {
      {"user", entry.user}, {"role", entry.role}, {"from", entry.from}, {"call", entry.call},
      {"job", entry.job},   {"node", entry.node}, {"name", entry.name}, {"action", entry.action},
      {"result", result},   {"error", error}};
  for (const auto& [name, text] : fields) {
    if (!text.empty()) line[name] = std::string(text);
  }
  // Texts from callers may not be UTF-8.
  const std::string text = absl::StrCat(
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), "\n");
  MutexLock lock(&mu_);
  absl::Status status = Reopen();
  if (status.ok()) {
    // Written in one call, so that no other line comes between; a full disk may take a part of it.
    const ssize_t written = write(file_.get(), text.data(), text.size());
    if (written != static_cast<ssize_t>(text.size())) {
      status = absl::ErrnoToStatus(written < 0 ? errno : ENOSPC,
                                   absl::StrCat("audit_log: cannot write '", path_, "'"));
    }
  }
  if (!status.ok() && !failed_) {
    MUSTER_LOG(Error) << status.message() << ": lines are missing from here on";
  } else if (status.ok() && failed_) {
    MUSTER_LOG(Info) << "audit_log: '" << path_ << "' is written again";
  }
  failed_ = !status.ok();
}

}  // namespace muster::coordinator
