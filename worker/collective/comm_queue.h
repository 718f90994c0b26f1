#ifndef MUSTER_WORKER_COLLECTIVE_COMM_QUEUE_H_
#define MUSTER_WORKER_COLLECTIVE_COMM_QUEUE_H_

#include <functional>
#include <memory>

#include "c10/core/Device.h"

namespace muster {

// Runs collectives beside the computation, one after the other in the order in which they were
// submitted. Each process of a job has one, and a Comm that also runs on it keeps that order
// (MakeOrderedComm): ranks that submit and call in one order stay in step, as without a queue.
//
// When a collective throws, those after it are not run and throw the same, until the error has been
// thrown to a caller: the ranks would no longer be in step. No error is lost: what no Wait() has
// thrown, the next Drain() throws.
//
// Implementations: CommThread for tensors on the CPU, CommStream for those on a GPU. Thread-safe.
class CommQueue {
 public:
  // The handle of what was submitted.
  class Work {
   public:
    virtual ~Work() = default;
  };
  using Ticket = std::shared_ptr<Work>;

  virtual ~CommQueue() = default;

  // Whether its collectives are in order with operations on tensors on `device`.
  virtual bool Suits(const c10::Device& device) const = 0;
  // Whether the order is that of a stream of the device: Submit() returns when everything is queued
  // there, and Wait() makes the current stream wait, not its caller.
  virtual bool on_stream() const = 0;

  // Collectives in `body` are attributed to the caller's CallSite.
  virtual Ticket Submit(std::function<void()> body) = 0;
  // What the caller does next comes after the work of `ticket`. Throws what that work has thrown.
  virtual void Wait(const Ticket& ticket) = 0;
  // Waits, and returns whether the work has succeeded; an error is left for another call to throw.
  virtual bool WaitQuietly(const Ticket& ticket) = 0;
  // What the caller does next comes after everything submitted. Throws an error that was not thrown
  // by a Wait() yet.
  virtual void Drain() = 0;
  // Whether the caller is inside a body.
  virtual bool IsCurrent() const = 0;

  // Runs `allocate`, whose tensors get their memory from the same pool as those of bodies, so that
  // each can reuse what the other has freed. The caller may use the tensors at once.
  virtual void Allocate(const std::function<void()>& allocate) = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_COMM_QUEUE_H_
