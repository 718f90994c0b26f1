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

// Asks the coordinator periodically how far a job's ranks are, and reports a hang once it has their
// stacks. Thread-safe.
class HangWatch {
 public:
  // The limit of AttemptEnd.hung.
  static constexpr size_t kMaxReportBytes = 60 << 10;

  struct Options {
    std::string job;             // the group of its workers
    absl::Duration timeout;      // positive
    OpSender* sender = nullptr;  // borrowed
    // Returns whether this node is the one that judges now: one is enough, and each query costs the
    // coordinator work in proportion to the job's ranks. Called on the thread of the watch.
    std::function<bool()> judges;
    // Called on the same thread; may block.
    std::function<void(HangReport)> on_hang;
    // For tests: replaces HangCore::Period.
    absl::Duration period = absl::ZeroDuration();
  };
  static std::unique_ptr<HangWatch> Start(Options options);
  // Reports nothing more once it returns. Do not call it from a callback.
  ~HangWatch();
  HangWatch(const HangWatch&) = delete;
  HangWatch& operator=(const HangWatch&) = delete;

 private:
  // The state that callbacks of late answers share with the watch.
  struct Shared {
    Mutex mu;
    CondVar changed;
    bool stop ABSL_GUARDED_BY(mu) = false;
  };

  explicit HangWatch(Options options) : options_(std::move(options)), core_(options_.timeout) {}
  void Loop();
  // Returns false if the watch must stop.
  bool Wait(absl::Duration time);
  // Errors: CANCELLED the watch must stop; UNAVAILABLE no answer in time; those of the operation.
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
