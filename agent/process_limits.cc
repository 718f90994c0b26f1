#include "agent/process_limits.h"

#include <pthread.h>

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/descriptor_limit.h"
#include "base/mutex.h"

namespace muster::agent {
namespace {

void* Wait(void* until) {
  static_cast<Notification*>(until)->WaitForNotification();
  return nullptr;
}

}  // namespace

absl::Status EnsureDescriptors(int workers) {
  // Measured, and rounded up: threads of gRPC, coordinator, relay and guard; for each worker its
  // pidfd, two pipes and two connections.
  const uint64_t needed = 48 + 6 * static_cast<uint64_t>(workers);
  const uint64_t limit = RaiseDescriptorLimit();
  if (limit == 0 || limit >= needed) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "this process may have ", limit, " open files (ulimit -Hn), but ", workers,
      workers == 1 ? " process needs " : " processes need ", needed, ": raise the limit"));
}

absl::Status EnsureThreads(int workers) {
  // Measured: the threads of coordinator, agent and gRPC, and the workers themselves.
  const size_t needed = 25 + static_cast<size_t>(workers);
  Notification done;
  std::vector<pthread_t> threads;
  pthread_t thread;
  // With stacks of the usual size, which must fit a limit of the address space.
  while (threads.size() < needed && pthread_create(&thread, nullptr, Wait, &done) == 0) {
    threads.push_back(thread);
  }
  done.Notify();
  for (const pthread_t started : threads) pthread_join(started, nullptr);
  if (threads.size() == needed) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("there is room for ", threads.size(), " more threads and processes, but ",
                   workers, workers == 1 ? " process needs " : " processes need ", needed,
                   ": raise the limit (ulimit -u or -v, or pids.max of a container)"));
}

}  // namespace muster::agent
