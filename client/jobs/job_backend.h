#ifndef MUSTER_CLIENT_JOBS_JOB_BACKEND_H_
#define MUSTER_CLIENT_JOBS_JOB_BACKEND_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/jobs/client_on_channel.h"
#include "client/jobs/job_client.h"
#include "client/jobs/job_types.h"

namespace muster::client {

// A system that runs submitted jobs: a coordinator with its agents, or the queue of another system.
// The operations and their errors are those of muster::Client; a backend that cannot do one returns
// UNIMPLEMENTED with what to do instead. All may block on the network; several threads may call
// them at once.
class JobBackend {
 public:
  virtual ~JobBackend() = default;

  virtual absl::StatusOr<Submission> submit(const JobSpec& spec, const SubmitOptions& options) = 0;
  virtual absl::StatusOr<Job> get(const std::string& job) = 0;
  virtual absl::StatusOr<std::vector<Job>> list(const ListOptions& options) = 0;
  virtual absl::StatusOr<Job> watch(const std::string& job,
                                    const std::function<bool(const Job&)>& changed,
                                    absl::Duration timeout) = 0;
  virtual absl::Status watch_all(const ListOptions& options,
                                 const std::function<bool(const JobUpdate&)>& changed) = 0;
  virtual absl::StatusOr<Job> cancel(const std::string& job, const std::string& why) = 0;
  virtual absl::StatusOr<Job> suspend(const std::string& job, const std::string& why) = 0;
  virtual absl::StatusOr<Job> resume(const std::string& job) = 0;
  virtual absl::StatusOr<Job> retry(const std::string& job) = 0;
  virtual absl::StatusOr<Job> resize(const std::string& job, int min_processes, int max_processes,
                                     const std::string& why) = 0;
  virtual absl::Status remove(const std::string& job) = 0;
  virtual absl::StatusOr<LogChunk> read_log(const std::string& job, const LogOptions& options) = 0;
  virtual absl::Status follow_log(const std::string& job, const LogOptions& options,
                                  const std::function<bool(const LogChunk&)>& chunk) = 0;
  // Ends follow_log() on all threads with CANCELLED; nothing else may be called after it.
  virtual void stop() = 0;
};

std::unique_ptr<JobBackend> CoordinatorBackend(StoppableClient client);

// Returns how many processes the attempt of this number has; nullopt: it is not kept.
std::optional<int> ProcessesOfAttempt(const Job& job, int attempt);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_JOB_BACKEND_H_
