#include "worker/checkpoint/for_each.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace muster {

std::optional<std::thread> TryStartThread(std::function<void()> work) {
  try {
    return std::thread(std::move(work));
  } catch (const std::system_error&) {
    return std::nullopt;
  }
}

absl::Status ForEach(uint64_t count, const ForEachOptions& options,
                     absl::FunctionRef<absl::Status(uint64_t)> work) {
  std::atomic<uint64_t> next{0};
  Mutex mu;
  absl::Status first;
  const auto run = [&] {
    while (true) {
      const uint64_t i = next.fetch_add(1);
      if (i >= count) return;
      if (const absl::Status status = work(i); !status.ok()) {
        next.store(count);
        MutexLock lock(&mu);
        first.Update(status);
        return;
      }
    }
  };
  const uint64_t threads = std::min<uint64_t>(std::max(options.threads, 1), count);
  std::vector<std::thread> running;
  while (threads > 1 && running.size() < threads) {
    std::optional<std::thread> thread =
        options.start == nullptr ? TryStartThread(run) : options.start(run);
    if (!thread.has_value()) break;
    running.push_back(*std::move(thread));
  }
  if (options.meanwhile != nullptr) options.meanwhile();
  if (running.empty()) run();
  for (std::thread& thread : running) thread.join();
  return first;
}

}  // namespace muster
