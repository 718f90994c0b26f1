#ifndef MUSTER_WORKER_JOB_TRIGGER_WATCH_H_
#define MUSTER_WORKER_JOB_TRIGGER_WATCH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "worker/job/coordinator_client.h"

namespace muster {

// One rank's view of the triggers of its job: reports each trigger to the training thread at the
// same step as on every other rank, without a collective and without a call to the coordinator at
// each check.
//
// A separate thread polls the coordinator. While no trigger is raised, Check() only looks at memory
// (tens of nanoseconds) and training does not depend on the coordinator; the first one waits for
// the first answer, which contains the decisions from before this rank joined. When a poll returns
// a trigger, this rank promises (see PollTriggersRequest) not to begin the step after the one in
// progress before it knows the decision; Check() then waits at that step, usually for one more poll
// of the slowest rank. Every rank of the job must run a TriggerWatch, since the decision waits for
// all.
//
// Thread-safe.
class TriggerWatch {
 public:
  using PollFunction = std::function<absl::StatusOr<std::vector<TriggerInfo>>(const TriggerPoll&)>;

  struct Options {
    // The time between polls while no trigger waits for its decision, and while one does.
    absl::Duration period = absl::Milliseconds(250);
    absl::Duration pending_period = absl::Milliseconds(10);
    // Called on the thread before each poll; may raise triggers.
    std::function<void()> before_poll = nullptr;
    // After this time, a waiting check warns that a rank has not polled.
    absl::Duration warn_after = absl::Seconds(10);
    std::function<void(const std::string&)> warn = nullptr;  // null: the log
  };
  // Returns periods that keep the coordinator at a few thousand polls a second, however large the
  // job is.
  static Options OptionsFor(int world_size);

  // `finished`: the last step that this rank has finished (steps count from 1; 0: none).
  TriggerWatch(int64_t finished, PollFunction poll, Options options);
  // Reports the triggers on which this rank has acted, unless the coordinator is away. Blocks for a
  // poll or two.
  ~TriggerWatch();
  TriggerWatch(const TriggerWatch&) = delete;
  TriggerWatch& operator=(const TriggerWatch&) = delete;

  // Returns the next trigger `name` that takes effect, now that `finished` steps are done and the
  // next one has not begun; each trigger once. May block while a trigger is being decided, and
  // warns if that takes long. Errors: those of a generation that has ended, and of a coordinator
  // that refuses the poll.
  absl::StatusOr<std::optional<TriggerInfo>> Check(const std::string& name, int64_t finished);

  // Polls at once, because this rank has raised a trigger.
  void Hurry();

 private:
  void Loop();
  void Warn(const std::string& text);
  std::string WhyWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  TriggerPoll NextPoll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Take(const TriggerPoll& poll, const std::vector<TriggerInfo>& triggers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  const PollFunction poll_;
  const Options options_;

  Mutex mu_;
  CondVar changed_;  // for Check
  CondVar wake_;     // for the thread
  int64_t finished_ ABSL_GUARDED_BY(mu_);
  int64_t begun_ ABSL_GUARDED_BY(mu_);  // no later step has begun
  // Undecided triggers, and the step before which their decisions must be known; nullopt: no
  // promise is given.
  std::set<uint64_t> pending_ ABSL_GUARDED_BY(mu_);
  std::optional<int64_t> promised_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, TriggerInfo> decided_ ABSL_GUARDED_BY(mu_);  // decided but not yet acted upon
  std::set<std::string> checked_ ABSL_GUARDED_BY(mu_);            // names that Check was asked for
  std::set<uint64_t> acknowledge_ ABSL_GUARDED_BY(mu_);           // not reported yet
  std::set<uint64_t> seen_ ABSL_GUARDED_BY(mu_);                  // ever in decided_
  bool polled_ ABSL_GUARDED_BY(mu_) = false;
  bool hurry_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status ended_ ABSL_GUARDED_BY(mu_);
  absl::Status last_poll_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, std::string> pending_names_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;  // last member
};

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_TRIGGER_WATCH_H_
