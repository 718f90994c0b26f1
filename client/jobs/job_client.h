#ifndef MUSTER_CLIENT_JOBS_JOB_CLIENT_H_
#define MUSTER_CLIENT_JOBS_JOB_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/jobs/job_types.h"

namespace muster {

// How to reach a coordinator.
struct ClientOptions {
  std::string address;  // "10.0.0.5:29400", "unix:/path"
  // Files. `tls_ca` turns TLS on; the certificate and its key, or the token, identify the caller.
  std::string tls_ca = {};
  std::string tls_cert = {};
  std::string tls_key = {};
  std::string token_file = {};
  absl::Duration timeout = absl::Seconds(10);  // for the connection, and of each call
  // How long a lost call (the coordinator restarts) is repeated.
  absl::Duration retry_for = absl::Seconds(30);
};

struct SubmitOptions {
  // The same key and specification return the job of the first call. Empty: a random key, so that a
  // repeat after a lost answer does not create a second job.
  std::string idempotency_key = {};
  bool dry_run = false;  // plans, but submits nothing
  std::string owner = {};
};

struct ListOptions {
  std::vector<JobState> states = {};  // empty: all
  std::string owner = {};             // empty: all
  std::string id_prefix = {};
};

struct LogOptions {
  int rank = 0;
  int attempt = 0;     // 0: the last one
  int64_t offset = 0;  // in bytes since the start of the rank; -1: the last `tail_lines` lines
  int tail_lines = 0;
  // If not infinite, replaces `offset`: starts at the first line written at most this long ago,
  // with a precision of one second.
  absl::Duration since = absl::InfiniteDuration();
  absl::Duration wait = absl::ZeroDuration();  // for the first byte; at most 30 s
};

// Submits and controls a coordinator's jobs. Calls block; several threads may make them at once.
// Errors are an absl::Status with one line of text and a code listed in docs/errors.md; UNAVAILABLE
// names the address. Nothing throws.
class Client {
 public:
  // Blocks until the coordinator answers. Errors: INVALID_ARGUMENT: a bad address or option;
  // UNAVAILABLE: no coordinator answers within options.timeout.
  static absl::StatusOr<Client> Connect(const ClientOptions& options);
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();

  // Submits a job. Errors: INVALID_ARGUMENT: the specification is invalid; FAILED_PRECONDITION: the
  // key belongs to another specification, or no nodes could ever run the job.
  absl::StatusOr<Submission> submit(const JobSpec& spec, const SubmitOptions& options = {});
  absl::StatusOr<Job> get(const std::string& job);
  // Returns all pages, in the order of submission. `history` has only the last attempt; `spec` has
  // no env.
  absl::StatusOr<std::vector<Job>> list(const ListOptions& options = {});

  // Calls `changed` with the job now and after each change until it returns false or the job has
  // ended. The coordinator streams the changes: nothing polls. If `changed` is slow, it gets the
  // latest state next, not each one in between. Continues after a restart of the coordinator that
  // takes less than a minute, or than options.retry_for if that is longer. DEADLINE_EXCEEDED after
  // `timeout`.
  absl::StatusOr<Job> watch(const std::string& job, const std::function<bool(const Job&)>& changed,
                            absl::Duration timeout = absl::InfiniteDuration());
  // The same for all jobs that match `options`, in the form of list(): now, in the order of their
  // last changes, and after each change, until `changed` returns false. UNIMPLEMENTED: the
  // coordinator is too old.
  absl::Status watch_all(const ListOptions& options,
                         const std::function<bool(const JobUpdate&)>& changed);
  // Blocks until the job has ended and returns it.
  absl::StatusOr<Job> wait(const std::string& job,
                           absl::Duration timeout = absl::InfiniteDuration());

  // These calls are repeatable. FAILED_PRECONDITION if the call is meaningless in the job's state.
  absl::StatusOr<Job> cancel(const std::string& job, const std::string& why = "");
  absl::StatusOr<Job> suspend(const std::string& job, const std::string& why = "");
  absl::StatusOr<Job> resume(const std::string& job);
  absl::StatusOr<Job> retry(const std::string& job);
  // Makes attempts have min_processes to max_processes from now on. A running attempt with more
  // processes is stopped at once and restarts; one with fewer restarts when there is room for more.
  // INVALID_ARGUMENT: invalid bounds.
  absl::StatusOr<Job> resize(const std::string& job, int min_processes, int max_processes,
                             const std::string& why = "");
  absl::Status remove(const std::string& job);

  // Reads a part of a rank's log. NOT_FOUND: no such job, attempt or rank; UNAVAILABLE: the node
  // that has the log is not connected.
  absl::StatusOr<LogChunk> read_log(const std::string& job, const LogOptions& options = {});
  // Calls `chunk` with the rank's past and new output until the job has ended or `chunk` returns
  // false. Continues with the next attempt, unless options.attempt names one; also, with a warning
  // in the log, if the node that has the rest of the log is lost, or if an attempt has no such
  // rank. The coordinator, or a node on which the attempt runs, may be unreachable for a minute, or
  // for the client's options.retry_for if that is longer.
  absl::Status follow_log(const std::string& job, LogOptions options,
                          const std::function<bool(const LogChunk&)>& chunk);

  absl::StatusOr<std::vector<Node>> nodes();
  absl::Status cordon(const std::string& node, const std::string& why = "");
  absl::Status drain(const std::string& node, const std::string& why = "");
  absl::Status uncordon(const std::string& node);
  // Sets how much the node's agent logs: "debug", "info", "warning" or "error". After `span` (1 s
  // to 24 h) the previous level returns automatically. INVALID_ARGUMENT: another word or span;
  // UNAVAILABLE: the node is not connected.
  absl::Status set_log_level(const std::string& node, const std::string& level,
                             absl::Duration span = absl::InfiniteDuration());

  // For Muster's own code, which already has a channel.
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster

#endif  // MUSTER_CLIENT_JOBS_JOB_CLIENT_H_
