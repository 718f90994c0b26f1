#ifndef MUSTER_TESTS_CHAOS_CHILD_H_
#define MUSTER_TESTS_CHAOS_CHILD_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "agent/process.h"
#include "base/mutex.h"

namespace muster::chaos {

// Returns an absolute path of a program that the test depends on
// ("coordinator/cmd/muster-coordinator").
std::string ProgramPath(const std::string& path);

// Returns a loopback port that is unused now, below the range from which the kernel draws: a client
// that keeps trying to reach a dead server on a port of that range may connect to itself.
int PickPort();

// A real process with the lines it wrote. Thread-safe.
class Child {
 public:
  // `changed` is called, on the host's thread, after each line and at the end.
  Child(agent::ProcessHost& host, std::vector<std::string> argv,
        const std::map<std::string, std::string>& env, std::function<void()> changed);

  pid_t pid() const { return process_->pid(); }
  void Signal(int signal) { process_->Signal(signal); }
  // Blocks until the process has ended. -N: signal N ended it.
  int Wait();
  // Returns what Wait would, if the process has ended.
  std::optional<int> ended() const;

  // Returns both streams, in order of arrival.
  std::string text() const;
  // Returns whether a line has `part` in it.
  bool Says(absl::string_view part) const;
  // Returns how many lines have `part` in them.
  size_t Count(absl::string_view part) const;
  // The first line of standard output, once there is one.
  std::optional<std::string> first_line() const;
  // The newest line of standard output that begins with `prefix`, without it.
  std::optional<std::string> Newest(absl::string_view prefix) const;

  // Waits until a line has `part` in it. Returns false after `timeout` or at the end of the
  // process.
  bool WaitFor(absl::string_view part, absl::Duration timeout) const;

 private:
  bool SaysLocked(absl::string_view part) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  mutable CondVar changed_;
  std::vector<std::pair<agent::OutputStream, std::string>> lines_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  int result_ ABSL_GUARDED_BY(mu_) = 0;
  std::shared_ptr<agent::Process> process_;
};

}  // namespace muster::chaos

#endif  // MUSTER_TESTS_CHAOS_CHILD_H_
