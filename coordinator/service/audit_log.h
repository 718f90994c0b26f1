#ifndef MUSTER_COORDINATOR_SERVICE_AUDIT_LOG_H_
#define MUSTER_COORDINATOR_SERVICE_AUDIT_LOG_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "coordinator/access.h"
#include "coordinator/answer.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// A log of who changed what: a file with one JSON object a line, of mode 0600, only appended to,
//
//   {"time":"2026-11-23T09:30:00.125Z","user":"ann","role":"submit","from":"ipv4:10.0.0.7:4711",
//    "call":"control_job","job":"mnist-3","action":"JOB_ACTION_CANCEL","result":"OK"}
//
// for each operation that IsAudited (access.h), with the code it was answered with, and for what
// was refused. A line is in the file before the caller has the answer; it is not synced. When the
// file has been moved away (logrotate), the next line opens a new one. Thread-safe.
class AuditLog {
 public:
  // Errors: those of the file, naming it.
  static absl::StatusOr<std::unique_ptr<AuditLog>> Open(const std::string& path,
                                                        const Clock* clock = &Clock::Real());

  // The facts about an operation before it is done. Null `who`: this process.
  struct Entry {
    std::string user, role, from, call, job, node, action, name;
  };
  static Entry Begin(const Identity* who, absl::string_view from, const v1::Op& op);
  void End(const Entry& entry, const Answer& answer);
  // Logs a call that is no operation: `what` is "write a snapshot".
  void Done(const Identity* who, absl::string_view from, absl::string_view what);
  void Refused(const Identity& who, absl::string_view from, absl::string_view what);

 private:
  AuditLog(std::string path, const Clock* clock) : path_(std::move(path)), clock_(*clock) {}
  absl::Status Reopen() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Append(const Entry& entry, absl::string_view result, absl::string_view error);

  const std::string path_;
  const Clock& clock_;
  Mutex mu_;
  OwnedFd file_ ABSL_GUARDED_BY(mu_);
  bool failed_ ABSL_GUARDED_BY(mu_) = false;  // and it was logged
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_AUDIT_LOG_H_
