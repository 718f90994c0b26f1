#include "worker/checkpoint/disposal.h"

#include <cstdlib>
#include <utility>

#include "base/log.h"
#include "worker/checkpoint/for_each.h"
#include "worker/checkpoint/removal.h"

namespace muster {

Disposal::Disposal(std::function<absl::Status(const std::string& path)> remove)
    : remove_(remove != nullptr ? std::move(remove) : RemoveCheckpointTree) {}

Disposal::~Disposal() {
  std::thread thread;
  {
    MutexLock lock(&mu_);
    stop_ = true;
    changed_.SignalAll();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

Disposal& Disposal::OfProcess() {
  static Disposal* const disposal = [] {
    auto* const made = new Disposal;
    (void)std::atexit([] { OfProcess().Wait(); });
    return made;
  }();
  return *disposal;
}

void Disposal::Remove(std::string path, OwnedFd lock) {
  Add({.path = std::move(path), .memory = nullptr, .lock = std::move(lock)});
}

void Disposal::Free(std::shared_ptr<const void> memory) {
  Add({.path = "", .memory = std::move(memory), .lock = OwnedFd()});
}

void Disposal::Add(Item item) {
  {
    MutexLock lock(&mu_);
    if (!thread_.joinable()) {
      if (auto thread = TryStartThread([this] { Run(); })) thread_ = *std::move(thread);
    }
    if (thread_.joinable()) {
      queue_.push_back(std::move(item));
      changed_.SignalAll();
      return;
    }
  }
  Do(std::move(item));
}

bool Disposal::busy() const {
  MutexLock lock(&mu_);
  return working_ || !queue_.empty();
}

void Disposal::Wait() {
  MutexLock lock(&mu_);
  while (working_ || !queue_.empty()) changed_.Wait(&mu_);
}

void Disposal::Run() {
  while (true) {
    Item item;
    {
      MutexLock lock(&mu_);
      working_ = false;
      changed_.SignalAll();
      while (queue_.empty() && !stop_) changed_.Wait(&mu_);
      if (queue_.empty()) return;
      item = std::move(queue_.front());
      queue_.pop_front();
      working_ = true;
    }
    Do(std::move(item));
  }
}

// By value, so that its contents are released when the function returns.
void Disposal::Do(Item item) const {  // NOLINT(performance-unnecessary-value-param)
  if (item.path.empty()) return;
  // If that fails, the next save in this folder removes the rest.
  if (const absl::Status removed = remove_(item.path); !removed.ok()) {
    MUSTER_LOG(Warning) << removed.message();
  }
}

}  // namespace muster
