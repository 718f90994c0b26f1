#ifndef MUSTER_WORKER_TRAIN_GUARD_H_
#define MUSTER_WORKER_TRAIN_GUARD_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "c10/util/Exception.h"

namespace muster {

// The only place where exceptions of tensor code become a Status, and a Status an exception.

// A Status as an exception, thrown by ThrowIfError. Guard() returns the same Status.
class StatusError : public c10::Error {
 public:
  explicit StatusError(absl::Status status);
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

// Runs `tensor_code` and returns OK, or its exception as a status, without the backtrace:
//   StatusError                                          its Status
//   c10::DistError (backend, store, network, timeouts)   UNAVAILABLE: peers are gone; leave the
//                                                        group and join the next one
//   c10::OutOfMemoryError, std::bad_alloc                RESOURCE_EXHAUSTED
//   c10::ValueError, IndexError, TypeError               INVALID_ARGUMENT
//   c10::NotImplementedError                             UNIMPLEMENTED
//   any other exception                                  INTERNAL
absl::Status Guard(absl::FunctionRef<void()> tensor_code);

// The same for an exception in flight: call it in a catch block.
absl::Status StatusOfCurrentException();

// Throws StatusError unless `status` is OK.
void ThrowIfError(const absl::Status& status);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_GUARD_H_
