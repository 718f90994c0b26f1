#ifndef MUSTER_AGENT_ATTEMPT_RESTARTS_H_
#define MUSTER_AGENT_ATTEMPT_RESTARTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "agent/agent.h"
#include "agent/hang_core.h"
#include "base/owned_fd.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::agent {

// The ends of one node's part of an attempt, and its restarts within the attempt, which the
// coordinator allows: the runner's side. It asks by a file in the folder of the attempt,
//   restart_K.json     why, for the K-th time
// and the node's agent answers by another,
//   restarts_allowed   how often it may, and how long it waits before the last one
// so that either may be started again in between. Not thread-safe, except for Cancel.
class AttemptRestarts final : public RestartGate {
 public:
  struct Options {
    std::string folder;
    int left = 0;  // restarts
    std::vector<int> user_error_codes = {};
    int num_nodes = 1;
    // For the answer. An agent or coordinator that was replaced by an older one gives none.
    absl::Duration patience = absl::Hours(24);
  };
  // Counts what the kernel kills for memory from now on.
  explicit AttemptRestarts(Options options);

  // As DescribeEnd, of what has happened since the last restart.
  v1::AttemptEnd Describe(const JobResult& result, const HangReport* hang) const;

  bool MayAsk(int restart, const WorkerEnd& cause) const override;
  // Errors also: those of the disk; DEADLINE_EXCEEDED no answer within `patience`.
  absl::Status Await(int restart, const JobResult& result) override;
  void Cancel() override;

 private:
  // Blocks until something may have come into the folder, for at most `time`. False: cancelled.
  bool Wait(int folder_events, absl::Duration time) const;

  bool IsCancelled() const;

  const Options options_;
  int64_t memory_kills_;
  const OwnedFd cancelled_;  // readable after Cancel
};

// The agent's side.

struct RestartRequest {
  int restart = 0;  // 0: nothing is asked
  v1::AttemptEnd end;
  absl::Time at;  // of the wall clock
};
// The newest that a runner has left in its folder. Errors: those of the disk.
absl::StatusOr<RestartRequest> ReadRestartRequest(const std::string& folder);
// For which restart this end of the runner was asked for: it was stopped before it had read an
// answer. 0: for none. Errors: those of ReadRestartRequest.
absl::StatusOr<int> AskedFor(const std::string& folder, const v1::AttemptEnd& end);
// Errors: those of the disk.
absl::Status AllowRestart(const std::string& folder, int restart, absl::Duration delay);

// Becomes readable when a file has come into one of its folders. Not open: the system has no more
// of them, and the folders are looked at now and then.
OwnedFd WatchFolders();
// Returns a number for UnwatchFolder. Errors: the system's words.
absl::StatusOr<int> WatchFolder(int folder_events, const std::string& folder);
void UnwatchFolder(int folder_events, int watch);
// Makes it unreadable again. Returns whether it was readable.
bool TakeFolderEvents(int folder_events);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ATTEMPT_RESTARTS_H_
