#ifndef MUSTER_WORKER_JOB_JOB_TRIGGERS_H_
#define MUSTER_WORKER_JOB_JOB_TRIGGERS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "worker/collective/comm.h"
#include "worker/job/coordinator_client.h"
#include "worker/job/trigger.h"
#include "worker/job/trigger_watch.h"

namespace muster {

// The named triggers of one process of a job.
//
// With a coordinator (also for a job of one process) they are the coordinator's, and a check only
// looks at memory, see TriggerWatch. Without one a check is a collective over `comm`, and all ranks
// must ask for the same names in the same order. Steps count from 1.
//
// Any thread may call Raise and the constructor, only the training thread the other methods.
class JobTriggers {
 public:
  struct Options {
    // Whether ShouldStop(), from its first call on, treats SIGTERM as the trigger "stop" of all
    // ranks (see StopSignal).
    bool stop_on_sigterm = true;
  };
  // Borrows `comm`. `coordinator` may be null.
  JobTriggers(std::shared_ptr<CoordinatorClient> coordinator, Comm* comm, Options options);

  // Errors: INVALID_ARGUMENT for a name or payload that is too long; those of CoordinatorClient.
  absl::Status Raise(const std::string& name, const std::string& payload);

  // Returns the next trigger of that name that takes effect, now that `finished` steps are done;
  // the same on every rank, each trigger once. Throws c10::Error when the generation has ended.
  std::optional<Trigger> Check(const std::string& name, int64_t finished);

  // Whether a trigger "stop" has taken effect; stays true from then on.
  bool ShouldStop(int64_t finished);
  // The trigger that asked for it; set once ShouldStop() is true.
  const std::optional<Trigger>& stop() const { return stop_; }

  ~JobTriggers() { Close(); }
  JobTriggers(const JobTriggers&) = delete;
  JobTriggers& operator=(const JobTriggers&) = delete;

  // Reports to the coordinator the triggers on which this process has acted, because it ends. No
  // checks may follow. Blocks for a poll or two, and CoordinatorClient's exit_patience (3 s) at
  // most, also while the coordinator is away and a SIGTERM is yet to be reported. May be called
  // repeatedly.
  void Close();

 private:
  void RaiseForSignal();
  std::optional<Trigger> CheckTogether(const std::string& name);

  const std::shared_ptr<CoordinatorClient> coordinator_;
  Comm* const comm_;
  const Options options_;
  std::atomic<bool> watch_signal_{false};
  bool signal_told_ = false;  // used only by the thread that looks for it
  std::optional<Trigger> stop_;

  Mutex mu_;
  std::deque<Trigger> raised_ ABSL_GUARDED_BY(mu_);  // on this rank, without a coordinator

  std::unique_ptr<TriggerWatch> watch_;  // made by the first check; last member: it calls back
};

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_JOB_TRIGGERS_H_
