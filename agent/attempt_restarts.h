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

// The runner's side: the ends of one node's part of an attempt, and its restarts within the
// attempt, which the coordinator allows. The runner asks by a file in the folder of the attempt,
//   restart_K.json     why, for the K-th time
// and the node's agent answers by another,
//   restarts_allowed   how many restarts it may make, and how long it waits before the last one
// so that either side may be started again in between. Not thread-safe, except for Cancel.
class AttemptRestarts final : public RestartGate {
 public:
  struct Options {
    std::string folder;
    int left = 0;  // restarts
    std::vector<int> user_error_codes = {};
    int num_nodes = 1;
    // How long to wait for an answer. An agent or coordinator that was replaced by an older version
    // gives none.
    absl::Duration patience = absl::Hours(24);
  };
  // Counts the processes that the kernel kills for memory from now on.
  explicit AttemptRestarts(Options options);

  // Does the same as DescribeEnd, for what has happened since the last restart.
  v1::AttemptEnd Describe(const JobResult& result, const HangReport* hang) const;

  bool MayAsk(int restart, const WorkerEnd& cause) const override;
  // Further errors: those of the disk; DEADLINE_EXCEEDED no answer within `patience`.
  absl::Status Await(int restart, const JobResult& result) override;
  void Cancel() override;

 private:
  // Blocks until a file may have appeared in the folder, for at most `time`. Returns false if
  // cancelled.
  bool Wait(int folder_events, absl::Duration time) const;

  bool IsCancelled() const;

  const Options options_;
  int64_t memory_kills_;
  const OwnedFd cancelled_;  // readable after Cancel
};

// The agent's side.

struct RestartRequest {
  int restart = 0;  // 0: no request
  v1::AttemptEnd end;
  absl::Time at;  // by the wall clock
};
// Returns the newest request that a runner has left in its folder. Errors: those of the disk.
absl::StatusOr<RestartRequest> ReadRestartRequest(const std::string& folder);
// Returns the restart that the runner had requested because of this end when it was stopped before
// it read an answer; 0: none. Errors: those of ReadRestartRequest.
absl::StatusOr<int> AskedFor(const std::string& folder, const v1::AttemptEnd& end);
// Writes the answer to a request. Errors: those of the disk.
absl::Status AllowRestart(const std::string& folder, int restart, absl::Duration delay);

// Returns a descriptor that becomes readable when a file has appeared in one of its folders. Not
// open if the system has no more of them; then the folders are polled.
OwnedFd WatchFolders();
// Adds a folder. Returns a number for UnwatchFolder. Errors: the system's message.
absl::StatusOr<int> WatchFolder(int folder_events, const std::string& folder);
void UnwatchFolder(int folder_events, int watch);
// Makes the descriptor unreadable again. Returns whether it was readable.
bool TakeFolderEvents(int folder_events);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ATTEMPT_RESTARTS_H_
