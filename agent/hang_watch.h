#ifndef MUSTER_AGENT_HANG_WATCH_H_
#define MUSTER_AGENT_HANG_WATCH_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "agent/hang_core.h"
#include "agent/op_sender.h"
#include "base/mutex.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// Asks the coordinator from time to time how far a job's ranks are, and tells of a hang when it has
// their stacks. Thread-safe.
class HangWatch {
 public:
  // What AttemptEnd.hung may have.
  static constexpr size_t kMaxReportBytes = 60 << 10;

  struct Options {
    std::string job;             // the group of its workers
    absl::Duration timeout;      // positive
    OpSender* sender = nullptr;  // borrowed
    // Whether this node is the one that judges now: one is enough, and to ask costs the coordinator
    // as much as the job has ranks. Called on the thread of the watch.
    std::function<bool()> judges;
    // The same; may block.
    std::function<void(HangReport)> on_hang;
    // Tests: instead of HangCore::Period.
    absl::Duration period = absl::ZeroDuration();
  };
  static std::unique_ptr<HangWatch> Start(Options options);
  // Tells no more when it returns. Not from a callback.
  ~HangWatch();
  HangWatch(const HangWatch&) = delete;
  HangWatch& operator=(const HangWatch&) = delete;

 private:
  // What answers, which may come late, know of the watch.
  struct Shared {
    Mutex mu;
    CondVar changed;
    bool stop ABSL_GUARDED_BY(mu) = false;
  };

  explicit HangWatch(Options options) : options_(std::move(options)), core_(options_.timeout) {}
  void Loop();
  // False: it is to stop.
  bool Wait(absl::Duration time);
  // Errors: CANCELLED it is to stop; UNAVAILABLE no answer in time; those of the operation.
  absl::StatusOr<v1::OpResult> Call(v1::Op op, absl::Duration timeout);
  absl::StatusOr<v1::GetMembersReply> Members();
  std::vector<v1::RankStack> Stacks();

  const Options options_;
  HangCore core_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::thread thread_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_HANG_WATCH_H_
