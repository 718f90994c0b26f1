#ifndef MUSTER_WORKER_COLLECTIVE_COMM_THREAD_H_
#define MUSTER_WORKER_COLLECTIVE_COMM_THREAD_H_

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "worker/collective/call_site.h"

namespace muster {

// A thread that runs collectives beside the computation, one after the other in the order in which
// they were submitted. Each process of a job has one, and a Comm that runs on it too keeps that
// order (MakeOrderedComm): ranks that submit and call in one order stay in step, as with one
// thread.
//
// When a collective throws, those after it are not run and throw the same, until somebody has seen
// the error: ranks would no longer be in step. No error is lost: what no Wait() has thrown, the
// next Drain() throws.
//
// Thread-safe. The thread starts with the first Submit().
class CommThread {
 public:
  struct Work;
  using Ticket = std::shared_ptr<Work>;

  CommThread() = default;
  // Runs what is in the queue, and ends.
  ~CommThread();
  CommThread(const CommThread&) = delete;
  CommThread& operator=(const CommThread&) = delete;

  // Collectives in `body` are said to come from the caller's CallSite.
  Ticket Submit(std::function<void()> body);
  // Returns when the work is done. Throws what it has thrown.
  void Wait(const Ticket& ticket);
  // Whether it has ended well; an error stays for others to throw.
  bool WaitQuietly(const Ticket& ticket);
  // Returns when nothing is queued or under way. Throws an error that nobody has seen.
  void Drain();
  // Whether the caller is this thread.
  bool IsCurrent() const;

 private:
  void Run();

  Mutex mu_;
  CondVar changed_;
  std::deque<Ticket> queue_ ABSL_GUARDED_BY(mu_);  // the first one is under way
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::exception_ptr unseen_ ABSL_GUARDED_BY(mu_);
  std::thread thread_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_COMM_THREAD_H_
