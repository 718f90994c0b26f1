#include "client/jobs/job_backend.h"

#include <utility>

namespace muster::client {
namespace {

class OfCoordinator final : public JobBackend {
 public:
  explicit OfCoordinator(StoppableClient client)
      : client_(std::move(client.client)), stop_(std::move(client.stop)) {}

  absl::StatusOr<Submission> submit(const JobSpec& spec, const SubmitOptions& options) override {
    return client_.submit(spec, options);
  }
  absl::StatusOr<Job> get(const std::string& job) override { return client_.get(job); }
  absl::StatusOr<std::vector<Job>> list(const ListOptions& options) override {
    return client_.list(options);
  }
  absl::StatusOr<Job> watch(const std::string& job, const std::function<bool(const Job&)>& changed,
                            absl::Duration timeout) override {
    return client_.watch(job, changed, timeout);
  }
  absl::Status watch_all(const ListOptions& options,
                         const std::function<bool(const JobUpdate&)>& changed) override {
    return client_.watch_all(options, changed);
  }
  absl::StatusOr<Job> cancel(const std::string& job, const std::string& why) override {
    return client_.cancel(job, why);
  }
  absl::StatusOr<Job> suspend(const std::string& job, const std::string& why) override {
    return client_.suspend(job, why);
  }
  absl::StatusOr<Job> resume(const std::string& job) override { return client_.resume(job); }
  absl::StatusOr<Job> retry(const std::string& job) override { return client_.retry(job); }
  absl::StatusOr<Job> resize(const std::string& job, int min_processes, int max_processes,
                             const std::string& why) override {
    return client_.resize(job, min_processes, max_processes, why);
  }
  absl::Status remove(const std::string& job) override { return client_.remove(job); }
  absl::StatusOr<LogChunk> read_log(const std::string& job, const LogOptions& options) override {
    return client_.read_log(job, options);
  }
  absl::Status follow_log(const std::string& job, const LogOptions& options,
                          const std::function<bool(const LogChunk&)>& chunk) override {
    return client_.follow_log(job, options, chunk);
  }
  void stop() override { stop_(); }

 private:
  Client client_;
  const std::function<void()> stop_;
};

}  // namespace

std::unique_ptr<JobBackend> CoordinatorBackend(StoppableClient client) {
  return std::make_unique<OfCoordinator>(std::move(client));
}

std::optional<int> ProcessesOfAttempt(const Job& job, int attempt) {
  for (const Attempt& one : job.history) {
    if (one.number != attempt) continue;
    int processes = 0;
    for (const Placement& placement : one.placements) processes += placement.processes;
    return processes;
  }
  return std::nullopt;
}

}  // namespace muster::client
