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
// clients: one job, fixed worlds, no journal, no leases. Otherwise follows the contract of
// proto/muster/v1. Thread-safe.
class FakeCoordinator {
 public:
  FakeCoordinator();
  ~FakeCoordinator();

  // "127.0.0.1:PORT".
  std::string address() const;

  // Answers the next `n` calls with UNAVAILABLE, every other one of them after it has been carried
  // out, as if an answer were lost.
  void LoseAnswers(int n);
  // Answers the next change with UNAVAILABLE that asks to wait for `retry_after`, below a second.
  void Overload(absl::Duration retry_after);
  // Ignores the next `n` joins, arrivals at barriers and waits for keys, and answers them with
  // UNAVAILABLE.
  void LoseArrivals(int n);
  // The time, in microseconds, that the last of them that was not ignored said that it had waited.
  int64_t waited_us() const;
  // The revision that the last arrival at a barrier had seen.
  uint64_t revision_seen() const;
  // The revision of the next seats.
  static constexpr uint64_t kRevision = 77;
  // Calls `meanwhile` after the next cancellation of a barrier, or the next heartbeat that is
  // answered with the end of its generation, and before the answer.
  void BeforeAnswer(std::function<void()> meanwhile);
  // Ends the generation: heartbeats report that, fenced calls fail.
  void EndGeneration(const std::string& why);
  // Carries out every other call about checkpoints from now on but answers it with UNAVAILABLE.
  void LoseCheckpointAnswers();
  // Forgets what ranks have reported of checkpoints before the `n`th report from now is handled (1:
  // the next), as a restart does.
  void ForgetReports(int n);
  // Makes answers about checkpoints name this restore (ReplyHeader.restore_id) from now on.
  void BecomeRestored(uint64_t restore_id);
  // The parts of reports that were accepted, in order: "rank 0 part 1 last"; and checkpoints
  // without records that were counted.
  std::vector<std::string> reports() const;
  // The number of changes that were carried out, without repeats.
  int64_t writes() const;
  // The number of rows of the rank table that were sent.
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
