#include "worker/collective/comm_thread.h"

#include <optional>
#include <utility>

namespace muster {
namespace {

thread_local const CommThread* current = nullptr;

}  // namespace

struct CommThread::ThreadWork : Work {
  std::function<void()> body;
  SavedCallSite site;
  // Guarded by the lock of its thread.
  bool done = false;
  std::exception_ptr error;
};

CommThread::~CommThread() {
  std::thread thread;
  {
    MutexLock lock(&mu_);
    stop_ = true;
    changed_.SignalAll();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

CommThread::Ticket CommThread::Submit(std::function<void()> body) {
  const auto ticket = std::make_shared<ThreadWork>();
  ticket->body = std::move(body);
  ticket->site = SaveCallSite();
  MutexLock lock(&mu_);
  if (unseen_ != nullptr) {
    ticket->done = true;
    ticket->error = unseen_;
    return ticket;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  queue_.push_back(ticket);
  changed_.SignalAll();
  return ticket;
}

void CommThread::Wait(const Ticket& ticket) {
  const auto& work = static_cast<const ThreadWork&>(*ticket);
  MutexLock lock(&mu_);
  while (!work.done) changed_.Wait(&mu_);
  if (work.error == nullptr) return;
  if (unseen_ == work.error) unseen_ = nullptr;
  std::rethrow_exception(work.error);
}

bool CommThread::WaitQuietly(const Ticket& ticket) {
  const auto& work = static_cast<const ThreadWork&>(*ticket);
  MutexLock lock(&mu_);
  while (!work.done) changed_.Wait(&mu_);
  return work.error == nullptr;
}

void CommThread::Drain() {
  MutexLock lock(&mu_);
  while (!queue_.empty()) changed_.Wait(&mu_);
  if (unseen_ != nullptr) std::rethrow_exception(std::exchange(unseen_, nullptr));
}

bool CommThread::IsCurrent() const { return current == this; }

void CommThread::Run() {
  current = this;
  for (;;) {
    std::shared_ptr<ThreadWork> next;
    {
      MutexLock lock(&mu_);
      while (!stop_ && queue_.empty()) changed_.Wait(&mu_);
      if (queue_.empty()) return;
      next = queue_.front();
    }
    std::exception_ptr error;
    try {
      const CallSite site(next->site);
      next->body();
    } catch (...) {
      error = std::current_exception();
    }
    // Free what the body holds (tensors) before other threads learn that it is done.
    next->body = nullptr;
    MutexLock lock(&mu_);
    next->done = true;
    next->error = error;
    queue_.pop_front();
    if (error != nullptr) {
      unseen_ = error;
      for (const std::shared_ptr<ThreadWork>& waiting : queue_) {
        waiting->body = nullptr;
        waiting->done = true;
        waiting->error = error;
      }
      queue_.clear();
    }
    changed_.SignalAll();
  }
}

}  // namespace muster
