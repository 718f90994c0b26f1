#include "coordinator/service/fan_out.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>

namespace muster::coordinator {
namespace {

// From this many writes on, the second thread helps, a few at a time: to wake it costs as much as
// several writes.
constexpr size_t kManyWrites = 48;
constexpr size_t kWritesAtATime = 8;

}  // namespace

struct FanOut::Writes {
  explicit Writes(std::vector<std::shared_ptr<AttachedAgent>> list) : agents(std::move(list)) {}
  // Works until all are done or taken by the other thread.
  void Work() {
    for (size_t at; (at = next.fetch_add(kWritesAtATime)) < agents.size();) {
      const size_t end = std::min(at + kWritesAtATime, agents.size());
      for (; at < end; ++at) agents[at]->Writable();
    }
  }
  const std::vector<std::shared_ptr<AttachedAgent>> agents;
  std::atomic<size_t> next{0};
};

void FanOut::Start() {
  thread_ = std::thread([this] { Run(); });
}

void FanOut::Stop() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
  }
  wake_.SignalAll();
  if (thread_.joinable()) thread_.join();
}

void FanOut::Write(std::vector<std::shared_ptr<AttachedAgent>> agents) {
  if (agents.size() < kManyWrites) {
    for (const auto& agent : agents) agent->Writable();
    return;
  }
  const auto writes = std::make_shared<Writes>(std::move(agents));
  {
    MutexLock lock(&mu_);
    writes_ = writes;
  }
  wake_.SignalAll();
  writes->Work();
}

void FanOut::Run() {
  while (true) {
    std::shared_ptr<Writes> writes;
    {
      MutexLock lock(&mu_);
      while (writes_ == nullptr && !stop_) wake_.Wait(&mu_);
      if (writes_ == nullptr) return;
      writes.swap(writes_);
    }
    writes->Work();
  }
}

}  // namespace muster::coordinator
