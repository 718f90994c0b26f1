#ifndef MUSTER_COORDINATOR_UNSEATED_H_
#define MUSTER_COORDINATOR_UNSEATED_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/answer.h"
#include "coordinator/stack_calls.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// The processes of jobs that have no seat, as reported in their agents' beats: programs without
// Muster's library, and those that have not joined yet. They are kept only so that their stacks can
// be taken; they are not journaled, and one that no beat has named for kFresh is forgotten. Pure;
// not thread-safe.
class Unseated {
 public:
  // Three beats of an agent.
  static constexpr absl::Duration kFresh = absl::Seconds(6);
  static constexpr size_t kMaxProcesses = 1 << 16;  // for all jobs; others are not known

  struct Process {
    std::string worker_id;
    uint64_t incarnation = 0;
    int64_t pid = 0;
    std::string host;
    std::string node;  // the agent's node, or its hub's
    std::string process_state;
    absl::Time heard;
    std::string stack;  // the last one
  };

  // Records a beat with `unseated` set.
  void Said(absl::string_view node, const v1::WorkerBeat& beat, absl::Time now);

  // Returns the highest rank of such a process of the job, plus one; 0: there is none.
  int32_t Size(absl::string_view job_id, absl::Time now) const;
  // Returns null if there is none, or it is no longer known.
  const Process* Find(absl::string_view job_id, int32_t rank, absl::Time now) const;
  // Keeps the answer of the agent. Returns false if the process is another one now.
  bool SetStack(absl::string_view job_id, const std::string& worker_id,
                const v1::StackReply& stack);

  // The callers that wait for stacks of a job that Size() knows.
  bool CallsAreFull(absl::string_view job_id) const;
  std::vector<StackCalls::Done> AddCall(absl::string_view job_id, CallId call, absl::Time deadline,
                                        int32_t next, std::vector<StackCalls::Asked> asked);
  std::vector<StackCalls::Done> Answered(absl::string_view job_id, uint64_t query);
  void Abandon(absl::string_view job_id, CallId call);
  // Returns the jobs whose callers have waited long enough.
  std::vector<std::string> Expired(absl::Time now) const;
  std::vector<StackCalls::Done> TakeExpired(absl::string_view job_id, absl::Time now);
  absl::Time NextDeadline() const;

 private:
  struct Row {
    std::map<int32_t, Process> processes;  // by rank
    StackCalls calls;
  };
  void Forget(absl::Time now);

  absl::flat_hash_map<std::string, Row> jobs_;
  size_t processes_ = 0;
  absl::Time forget_at_ = absl::InfinitePast();
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_UNSEATED_H_
