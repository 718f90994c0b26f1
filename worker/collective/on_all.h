#ifndef MUSTER_WORKER_COLLECTIVE_ON_ALL_H_
#define MUSTER_WORKER_COLLECTIVE_ON_ALL_H_

#include <exception>
#include <string>

#include "absl/functional/function_ref.h"
#include "worker/collective/comm.h"

namespace muster {

// Collective. Runs `step`, which makes no collectives, on every rank: for operations that may fail
// on one rank alone, before collectives in which the others would wait for it. A rank on which it
// throws rethrows that exception; the others throw c10::Error, "rank 1 cannot WHAT: why", for the
// first such rank.
void OnAll(Comm& comm, const std::string& what, absl::FunctionRef<void()> step);

// Returns the message of the exception. Never empty.
std::string TextOf(const std::exception_ptr& thrown);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_ON_ALL_H_
