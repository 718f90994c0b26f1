#ifndef MUSTER_WORKER_JOB_FAKE_COORDINATOR_H_
#define MUSTER_WORKER_JOB_FAKE_COORDINATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace muster {

// A coordinator in memory behind a real gRPC server on a free loopback port, for tests of its
// clients: one job, fixed worlds, no journal, no leases. Follows the contract of proto/muster/v1 in
// what it does. Thread-safe.
class FakeCoordinator {
 public:
  FakeCoordinator();
  ~FakeCoordinator();

  // "127.0.0.1:PORT".
  std::string address() const;

  // The next `n` calls are answered with UNAVAILABLE; every other one of them after it has been
  // carried out, as when an answer is lost.
  void LoseAnswers(int n);
  // The next change is answered with UNAVAILABLE that asks to wait for `retry_after`, below a
  // second.
  void Overload(absl::Duration retry_after);
  // The next `n` joins, arrivals at barriers and waits for keys are not heard of, and answered with
  // UNAVAILABLE.
  void LoseArrivals(int n);
  // For how long the last of them that was heard of said that it had waited, in microseconds.
  int64_t waited_us() const;
  // By the last arrival at a barrier.
  uint64_t revision_seen() const;
  // The data for the next seats.
  static constexpr uint64_t kRevision = 77;
  // Calls `meanwhile` after the next cancellation of a barrier, or the next heartbeat that is told
  // of the end of its generation, and before the answer.
  void BeforeAnswer(std::function<void()> meanwhile);
  // Ends the generation: heartbeats say so, fenced calls fail.
  void EndGeneration(const std::string& why);
  // From now on every other call about checkpoints is carried out and answered with UNAVAILABLE.
  void LoseCheckpointAnswers();
  // What ranks have reported of checkpoints is forgotten before the `n`th report from now is looked
  // at (1: the next), as by a restart.
  void ForgetReports(int n);
  // Answers about checkpoints name this restore (ReplyHeader.restore_id) from now on.
  void BecomeRestored(uint64_t restore_id);
  // The parts of reports that were taken, in order: "rank 0 part 1 last"; and checkpoints without
  // records that were counted.
  std::vector<std::string> reports() const;
  // How many changes were carried out, repeats not counted.
  int64_t writes() const;
  // Rows of the rank table that were sent.
  int64_t rows_sent() const;
  // The last heartbeat, as "step phase last_collective", and " restored" and " stepped" if it says
  // how long ago that was; " saving PATH of step STEP, BYTES of BYTES" if it has a save.
  std::string WaitForHeartbeat();
  std::string last_heartbeat() const;
  uint64_t last_progress() const;  // of the last heartbeat

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_FAKE_COORDINATOR_H_
