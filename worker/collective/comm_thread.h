#ifndef MUSTER_WORKER_COLLECTIVE_COMM_THREAD_H_
#define MUSTER_WORKER_COLLECTIVE_COMM_THREAD_H_

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "worker/collective/call_site.h"
#include "worker/collective/comm_queue.h"

namespace muster {

// A thread that runs submitted work, for tensors on the CPU: Wait() and Drain() block. It starts
// with the first Submit().
class CommThread : public CommQueue {
 public:
  CommThread() = default;
  // Runs what is in the queue, and ends.
  ~CommThread() override;
  CommThread(const CommThread&) = delete;
  CommThread& operator=(const CommThread&) = delete;

  bool Suits(const c10::Device& device) const override { return device.is_cpu(); }
  bool on_stream() const override { return false; }
  Ticket Submit(std::function<void()> body) override;
  void Wait(const Ticket& ticket) override;
  bool WaitQuietly(const Ticket& ticket) override;
  void Drain() override;
  bool IsCurrent() const override;
  void Allocate(const std::function<void()>& allocate) override { allocate(); }

 private:
  struct ThreadWork;

  void Run();

  Mutex mu_;
  CondVar changed_;
  // The first one is under way.
  std::deque<std::shared_ptr<ThreadWork>> queue_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::exception_ptr unseen_ ABSL_GUARDED_BY(mu_);
  std::thread thread_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_COMM_THREAD_H_
