#ifndef MUSTER_WORKER_CHECKPOINT_FOR_EACH_H_
#define MUSTER_WORKER_CHECKPOINT_FOR_EACH_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace muster {

// Work for threads that the system may refuse to start: then the caller does it. Thread-safe.

// Starts a thread that runs `work`, which must not throw. Absent: the system gives no more threads.
std::optional<std::thread> TryStartThread(std::function<void()> work);

struct ForEachOptions {
  // With 1, the caller does everything.
  int threads = 1;
  // Called by the caller's thread while the threads work, or before it works itself. Null: it
  // waits.
  std::function<void()> meanwhile = nullptr;
  // Starts a thread. Null: TryStartThread().
  std::function<std::optional<std::thread>(std::function<void()> work)> start = nullptr;
};

// Calls `work` for each number below `count`, in any order and from several threads at once. Begins
// no call after one has failed, and returns the first error when all threads have ended. `work`
// must not throw.
absl::Status ForEach(uint64_t count, const ForEachOptions& options,
                     absl::FunctionRef<absl::Status(uint64_t)> work);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_FOR_EACH_H_
