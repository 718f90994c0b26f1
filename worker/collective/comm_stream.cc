#include "worker/collective/comm_stream.h"

#include <algorithm>
#include <utility>

#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

thread_local const CommStream* current = nullptr;

}  // namespace

struct CommStream::StreamWork : Work {
  explicit StreamWork(c10::DeviceType type) : done(type) {}

  c10::Event done;
  uint64_t number = 0;  // 0: it was not run
  std::exception_ptr error;
};

// While it lives, the calling thread is the one in a body.
class CommStream::InBody {
 public:
  explicit InBody(CommStream& queue) : queue_(queue) {
    TORCH_CHECK(!queue_.IsCurrent(), "CommStream: work that submits work");
    MutexLock lock(&queue_.mu_);
    while (queue_.busy_) queue_.changed_.Wait(&queue_.mu_);
    queue_.busy_ = true;
    outer_ = std::exchange(current, &queue_);
  }
  ~InBody() {
    current = outer_;
    MutexLock lock(&queue_.mu_);
    queue_.busy_ = false;
    queue_.changed_.SignalAll();
  }
  InBody(const InBody&) = delete;
  InBody& operator=(const InBody&) = delete;

 private:
  CommStream& queue_;
  const CommStream* outer_ = nullptr;
};

CommStream::CommStream(c10::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type())
                  .getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

c10::Stream CommStream::Current() const {
  return c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device());
}

void CommStream::Follow() {
  const c10::Stream here = Current();
  std::vector<c10::Stream> users;
  {
    MutexLock lock(&mu_);
    users.swap(users_);
    // A stream of the program may be gone by now, and another one may have the same id.
    waited_.clear();
  }
  if (std::find(users.begin(), users.end(), here) == users.end()) users.push_back(here);
  try {
    for (const c10::Stream& user : users) {
      if (user == stream_) continue;
      c10::Event event(stream_.device_type());
      event.record(user);
      event.block(stream_);
    }
  } catch (...) {
    MutexLock lock(&mu_);
    users_.insert(users_.end(), users.begin(), users.end());
    throw;
  }
}

CommQueue::Ticket CommStream::Submit(std::function<void()> body) {
  const auto work = std::make_shared<StreamWork>(stream_.device_type());
  const InBody in_body(*this);
  {
    MutexLock lock(&mu_);
    if (unseen_ != nullptr) {
      work->error = unseen_;
      return work;
    }
  }
  const auto keep_error = [&](const auto& step) {
    try {
      step();
    } catch (...) {
      if (work->error == nullptr) work->error = std::current_exception();
    }
  };
  keep_error([&] {
    Follow();
    const c10::StreamGuard guard(stream_);
    body();
  });
  // Free what the body holds (tensors) before other threads learn of its end.
  keep_error([&] { body = nullptr; });
  // Also after a body that has thrown, because what it has queued uses its memory.
  keep_error([&] { work->done.record(stream_); });
  MutexLock lock(&mu_);
  work->number = ++submitted_;
  last_ = work;
  // If this work has no error, an error left by another thread's quiet wait stays.
  if (work->error != nullptr) unseen_ = work->error;
  return work;
}

void CommStream::Join(const StreamWork* work) {
  const c10::Stream here = Current();
  if (here == stream_) return;
  MutexLock lock(&mu_);
  if (std::find(users_.begin(), users_.end(), here) == users_.end()) users_.push_back(here);
  if (work == nullptr) return;
  uint64_t& waited = waited_[here];
  if (waited >= work->number) return;
  work->done.block(here);
  waited = work->number;
}

void CommStream::Wait(const Ticket& ticket) {
  const auto& work = static_cast<const StreamWork&>(*ticket);
  Join(&work);
  if (work.error == nullptr) return;
  MutexLock lock(&mu_);
  if (unseen_ == work.error) unseen_ = nullptr;
  std::rethrow_exception(work.error);
}

bool CommStream::WaitQuietly(const Ticket& ticket) {
  const auto& work = static_cast<const StreamWork&>(*ticket);
  try {
    Join(&work);
  } catch (...) {
    MutexLock lock(&mu_);
    if (unseen_ == nullptr) unseen_ = std::current_exception();
    return false;
  }
  return work.error == nullptr;
}

void CommStream::Drain() {
  std::shared_ptr<StreamWork> last;
  {
    MutexLock lock(&mu_);
    while (busy_) changed_.Wait(&mu_);
    last = last_;
  }
  Join(last.get());
  MutexLock lock(&mu_);
  if (unseen_ != nullptr) std::rethrow_exception(std::exchange(unseen_, nullptr));
}

bool CommStream::IsCurrent() const { return current == this; }

void CommStream::Allocate(const std::function<void()>& allocate) {
  if (IsCurrent()) return allocate();
  // Other code may still use freed memory: a stream that has waited, or a body.
  Wait(Submit(allocate));
}

}  // namespace muster
