#include "worker/checkpoint/tree_remover.h"

#include <system_error>
#include <utility>

#include "base/file.h"
#include "base/log.h"

namespace muster {

TreeRemover::TreeRemover(std::function<absl::Status(const std::string& path)> remove)
    : remove_(remove != nullptr ? std::move(remove) : RemoveTree) {}

TreeRemover::~TreeRemover() {
  std::thread thread;
  {
    MutexLock lock(&mu_);
    stop_ = true;
    changed_.SignalAll();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

void TreeRemover::Remove(std::string path) {
  {
    MutexLock lock(&mu_);
    try {
      if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
      queue_.push_back(std::move(path));
      changed_.SignalAll();
      return;
    } catch (const std::system_error&) {
      // No thread: it is removed here.
    }
  }
  RemoveNow(path);
}

bool TreeRemover::busy() const {
  MutexLock lock(&mu_);
  return removing_ || !queue_.empty();
}

void TreeRemover::Wait() {
  MutexLock lock(&mu_);
  while (removing_ || !queue_.empty()) changed_.Wait(&mu_);
}

void TreeRemover::Run() {
  while (true) {
    std::string path;
    {
      MutexLock lock(&mu_);
      removing_ = false;
      changed_.SignalAll();
      while (queue_.empty() && !stop_) changed_.Wait(&mu_);
      if (queue_.empty()) return;
      path = std::move(queue_.front());
      queue_.pop_front();
      removing_ = true;
    }
    RemoveNow(path);
  }
}

void TreeRemover::RemoveNow(const std::string& path) const {
  // The next save in this folder removes what is left.
  if (const absl::Status removed = remove_(path); !removed.ok()) {
    MUSTER_LOG(Warning) << removed.message();
  }
}

}  // namespace muster
