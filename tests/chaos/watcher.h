#ifndef MUSTER_TESTS_CHAOS_WATCHER_H_
#define MUSTER_TESTS_CHAOS_WATCHER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"

namespace grpc {
class ClientContext;
}

namespace muster::chaos {

// Watches the durable counters of a job through all crashes, resuming by revision or, if that is no
// longer kept, from a reading of the keys, and checks what the watch promises: in order, nothing
// missing, nothing twice.
class Watcher {
 public:
  Watcher(const std::string& address, const std::string& job, const std::string& prefix);
  ~Watcher();

  // Waits until the counter `key` has been seen at `value`.
  bool WaitFor(const std::string& key, int64_t value, absl::Duration timeout);
  // Returns what was wrong so far; empty: nothing.
  std::string violation() const;
  // Returns how often the stream was opened.
  int streams() const;

 private:
  void Run();
  // Reads the counters as they are now. The watch continues after `*revision`.
  bool ReadAll(uint64_t* revision);

  const std::string address_, job_, prefix_;
  mutable Mutex mu_;
  CondVar changed_;
  std::map<std::string, int64_t> seen_ ABSL_GUARDED_BY(mu_);
  std::string violation_ ABSL_GUARDED_BY(mu_);
  int streams_ ABSL_GUARDED_BY(mu_) = 0;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::thread thread_;
};

}  // namespace muster::chaos

#endif  // MUSTER_TESTS_CHAOS_WATCHER_H_
