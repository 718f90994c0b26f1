#ifndef MUSTER_AGENT_JOB_SIGNALS_H_
#define MUSTER_AGENT_JOB_SIGNALS_H_

#include <signal.h>

#include <functional>
#include <optional>
#include <thread>

#include "absl/time/time.h"

namespace muster::agent {

// The signals that stop a job: SIGINT, SIGTERM and SIGHUP, except those that this process ignored
// when it was started (nohup, background jobs of shells), which stay ignored.

inline constexpr int kJobSignals[] = {SIGINT, SIGTERM, SIGHUP};

// Holds these signals back for SignalWatcher, and ignores SIGPIPE. Call it before any thread is
// started.
void BlockJobSignals();
// From now on each of these signals ends this process at once, with exit code 128 + its number.
void EndByJobSignals();

// Calls back on its own thread for each of these signals until destroyed.
class SignalWatcher {
 public:
  explicit SignalWatcher(std::function<void(int)> on_signal);
  ~SignalWatcher();
  SignalWatcher(const SignalWatcher&) = delete;
  SignalWatcher& operator=(const SignalWatcher&) = delete;

 private:
  void Loop(const std::function<void(int)>& on_signal);

  const int stop_fd_;
  std::thread thread_;
};

// Distinguishes the requests that signals express. Pure.
class StopRequests {
 public:
  // A second signal within this time counts as the same request: timeout(1), SLURM and a closing
  // terminal signal a process and then its group, systemd sends SIGHUP after SIGTERM.
  static constexpr absl::Duration kSameRequest = absl::Seconds(1);

  enum class Request { kStop, kRepeated, kKill };
  Request Take(absl::Time now);

 private:
  std::optional<absl::Time> first_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_JOB_SIGNALS_H_
